"""The one table from the server's error codes to our errors.

Codes are the server's own (``err_code`` of an API error); texts only distinguish errors that share a code.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from bufstore.errors import ConfigError, LogFull, LogUnavailable
from bufstore.jetstream.messages import BatchRefused, Conflict


class ApiError(msgspec.Struct, frozen=True):
    """The ``error`` object of an answer."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class StreamMissing(LogUnavailable):
    """The stream or bucket does not exist (any more)."""


class StreamTaken(ConfigError):
    """There is a stream of this name, with other settings."""


class Mirrored(ConfigError):
    """A mirror answered a read: it may lag, or hold less. This is no outage: only whoever made it can end it."""

    def __init__(self, stream: str, by: str) -> None:
        super().__init__(
            f"stream {by} mirrors {stream} and answers its reads, but does not hold all of its messages: remove {by} "
            f"(`nats stream rm {by}`); for a copy, make a stream that has {stream} as a source"
        )


class NobodyStores(LogUnavailable):
    """Nobody listens on a subject whose messages are to be stored: there is no leader of its stream, or no stream."""


class ConsumerMissing(LogUnavailable):
    """The consumer does not exist (any more)."""


class TooManyResults(LogUnavailable):
    """A direct get matches more subjects than the server answers in one go."""


class SubjectFull(LogFull):
    """The subject holds as many messages as it may."""


class StorageFull(LogFull):
    """NATS has no room for any stream. The room that a stream reserves is kept from other reservations only."""

    def __init__(self, said: str) -> None:
        super().__init__(
            f"NATS has no storage left ({said}): other streams, or other files on its disk, have taken it. Make room "
            "there, or raise the server's max_file_store (of a stream in memory: max_memory_store) or the account's "
            "storage."
        )
        #: The server's own words.
        self.said = said


#: What was tried with which file, in front of why it failed.
_FILE = re.compile(r"\b\w+ /.*: ")


class StorageFailed(LogUnavailable):
    """NATS could not write to its disk."""

    def __init__(self, said: str) -> None:
        # The file of a consumer has another name at each attempt to make one, and repeats are known by their text.
        said = _FILE.sub("", said)
        super().__init__(f"the storage of NATS failed ({said}); if its disk is full, free it and restart nats-server")


class NoConsumerNow(LogUnavailable):
    """The cluster has no place for a consumer of the stream at this moment."""


class TooManyMessages(LogFull):
    """The stream holds as many messages as somebody else has set."""

    def __init__(self, said: str, stream: str = "") -> None:
        of = f"stream {stream}" if stream else "the stream"
        super().__init__(f"{of} has a max_msgs, which bufstore does not set ({said}): set it to -1")


class MessageTooLarge(LogUnavailable):
    """The server takes no message of this size (any more), headers included."""


class MessageMissing(LogUnavailable):
    """There is no message of this sequence (any more)."""


def _store_failed(e: ApiError) -> Exception:
    # The server has one code for everything that its store refuses: a limit of ours, a full disk, or a fault.
    text = e.description.lower()
    if "per subject exceeded" in text:
        return SubjectFull(f"the subject is full: {e.description}")
    if "no space" in text:
        return StorageFull(e.description)
    if "maximum messages" in text:
        return TooManyMessages(e.description)
    if "exceeded" in text:
        return LogFull(e.description)
    return StorageFailed(e.description)


def _too_many(what: str, limit: str) -> Callable[[ApiError], Exception]:
    return lambda e: ConfigError(f"NATS permits no further {what} ({e.description}): raise {limit}")


def _not_so(what: str) -> Callable[[ApiError], Exception]:
    # The server has one code for settings that cannot work and for settings that it could not write to its disk.
    def error(e: ApiError) -> Exception:
        text = e.description.lower()
        if "no space" in text or "creating store" in text:
            return StorageFailed(e.description)
        return ConfigError(f"{what} these settings: {e.description}")

    return error


def _not_placed(e: ApiError) -> Exception:
    # The server has one code for too few nodes with such tags and for a node that is just starting again.
    if "offline" in e.description.lower():
        return LogUnavailable(f"a node of the cluster is away: {e.description}")
    if e.description.endswith("placement"):  # all nodes suit, as far as the cluster knows of them
        return ConfigError(
            f"fewer nodes have ever joined this cluster than the stream has replicas ({e.description}): where it is "
            "being started for the first time, open again once all nodes are there. Or no cluster of these servers has "
            "the name that LogConfig.placement_cluster gives"
        )
    return ConfigError(f"too few nodes suit this stream's size, replicas and placement: {e.description}")


_TABLE: dict[int, Callable[[ApiError], Exception]] = {
    10071: lambda e: Conflict(e.description),  # wrong last sequence
    10164: lambda e: Conflict(e.description),  # wrong last sequence, another write in flight
    10077: _store_failed,
    10005: _not_placed,
    10002: lambda e: StorageFull(e.description),
    10047: lambda e: StorageFull(e.description),
    10023: lambda e: StorageFull(e.description),
    10028: lambda e: StorageFull(e.description),
    10026: _too_many("consumer of this stream", "max_consumers of the account, or of the stream if it has one"),
    10027: _too_many("stream", "max_streams of the account"),
    10175: lambda e: BatchRefused(e.description),  # sequence missing
    10176: lambda e: BatchRefused(e.description),  # incomplete, e.g. abandoned for being idle
    10177: lambda e: BatchRefused(e.description),  # a header that batches do not support
    10179: lambda e: BatchRefused(e.description),  # batch id
    10199: lambda e: BatchRefused(e.description),  # too large
    10200: lambda e: BatchRefused(e.description),  # commit header
    10201: lambda e: BatchRefused(e.description),  # duplicate message id
    10210: lambda e: BatchRefused(e.description),  # too many batches in flight
    10211: lambda e: BatchRefused(e.description),  # too many batches in flight on the server
    10037: lambda e: MessageMissing(e.description),
    10043: lambda e: MessageMissing(e.description),
    10057: lambda e: MessageMissing(e.description),  # deleting what is not there
    10051: lambda e: StorageFailed(e.description),  # a purge
    10012: _not_so("the consumer cannot be created or changed with"),
    10049: _not_so("the stream cannot be created with"),
    10069: _not_so("the stream cannot be changed to"),
    10052: lambda e: ConfigError(f"the server does not accept this stream: {e.description}"),
    10058: lambda e: StreamTaken(f"a stream of this name has other settings: {e.description}"),
    10065: lambda e: ConfigError(f"another stream listens on these subjects: {e.description}"),
    10098: lambda e: ConfigError(f"a work queue needs explicit acks: {e.description}"),
    10099: lambda e: ConfigError(f"the work queue has another consumer: {e.description}"),
    10100: lambda e: ConfigError(f"the work queue has another consumer for these subjects: {e.description}"),
    10121: lambda e: ConfigError(f"raise max_ack_pending of the server or the account: {e.description}"),
    10148: lambda e: ConfigError(f"a consumer of this name has other settings: {e.description}"),
    10165: lambda e: ConfigError(f"a time to live must be whole seconds, at least one: {e.description}"),
    10059: lambda e: StreamMissing(e.description),
    10014: lambda e: ConsumerMissing(e.description),
    10076: lambda e: ConfigError("JetStream is not enabled on the server"),
    10039: lambda e: ConfigError("JetStream is not enabled for the account"),
    10008: lambda e: LogUnavailable(e.description),  # cluster not available
    10009: lambda e: LogUnavailable(e.description),  # no leader
}


#: Settings of a stream that somebody has changed since, or that were forgotten when it was made by hand.
_SETTINGS = {
    10054: "has a max_msg_size",
    10166: "allows no time to live per message",
    10174: "does not allow atomic batches",
}


def consumer_error(e: ApiError, stream: str) -> Exception:
    """Return the exception for an error answer about a consumer of the stream."""
    if e.err_code == 10023:  # no storage is meant: a cluster makes no consumer on nodes that it does not see
        return NoConsumerNow(
            f"stream {stream} can have no new consumer now ({e.description}): too few of its nodes are there, or they "
            "have as many streams and consumers as their max_ha_assets permits"
        )
    return to_error(e, stream)


def to_error(e: ApiError, stream: str) -> Exception:
    """Return the exception for an error answer about a stream. Each error answer means that nothing was stored."""
    if (setting := _SETTINGS.get(e.err_code)) is not None:
        return ConfigError(f"stream {stream} {setting} ({e.description}): change that (`nats stream edit {stream}`)")
    make = _TABLE.get(e.err_code)
    if make is not None:
        error = make(e)
        if isinstance(error, StreamMissing):
            return StreamMissing(f"{e.description}: {stream}")
        if isinstance(error, TooManyMessages):
            return TooManyMessages(e.description, stream)
        return LogFull(f"stream {stream} is full: {e.description}") if type(error) is LogFull else error
    if e.code == 429 or e.code >= 500:  # a stream that is offline, an error of the consensus: these may pass
        return LogUnavailable(f"NATS: {e.description} ({e.err_code})")
    return ConfigError(f"NATS refused: {e.description} ({e.err_code})")
