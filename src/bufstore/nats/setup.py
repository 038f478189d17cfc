"""The required settings of stream and bucket, and the errors when they differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bufstore.buffer.ports.log import UNALTERED, Altered
from bufstore.buffer.subjects import Subjects, first_sequence
from bufstore.buffer.target import Target
from bufstore.buffer.windows import Windows
from bufstore.config import LogConfig
from bufstore.errors import ConfigDrift, ConfigError, LogRolledBack
from bufstore.jetstream.buckets import bucket, storage
from bufstore.jetstream.drift import FREE, UNSET, check
from bufstore.jetstream.errors import StreamMissing, StreamTaken
from bufstore.jetstream.stream import NatsStream

#: Epochs are below this (`bufstore.buffer.places`).
EPOCHS_MAX = 1 << 12

#: The suffix of the first word of a log's subjects while the log is being repaired.
WITHDRAWN = "-withdrawn"

_OURS = "bufstore."
_TARGET = ("domain", "store", "target")
#: How entries stand in the stream: many in one message (docs/adr/0027). Earlier, each was a message of its own.
_FORM = "groups"

#: Settings of a log that decide what leaves it by itself: nothing may.
_KEEPS_ALL: Mapping[str, Any] = {"discard": "new", "max_age": 0, "max_msgs": -1, "max_msgs_per_subject": -1}
#: Settings of a log with which it takes no writes when they are changed. (Without direct reads no thread is looked up.)
_STOP_WRITES = ("sealed", "allow_direct", *UNSET)


def epoch_of(found: Mapping[str, Any]) -> int:
    """Return the generation of an existing log."""
    return int(found["metadata"][_OURS + "epoch"])


def said_by(found: Mapping[str, Any]) -> tuple[Windows, Target]:
    """Return what an existing log says of its windows, and where it is flushed to.

    Raises ConfigDrift for a stream that is no log, or a log of an earlier release, and for a log whose metadata
    somebody has damaged.
    """
    metadata = found.get("metadata") or {}
    _check_form(found["name"], metadata)
    try:
        windows, target = windows_of(metadata), target_of(metadata)
        for name in ("epoch", "partitions"):
            int(metadata[_OURS + name])
        lanes_of(metadata), metadata[_OURS + "bucket"], metadata[_OURS + "form"]
    except (KeyError, ValueError) as e:
        raise ConfigDrift(
            f"stream {found['name']}",
            "metadata",
            expected="what was written when the log was made",
            found=f"without {e.args[0]}" if isinstance(e, KeyError) else str(e),
            way_out="Somebody has changed it since. `nats stream edit --metadata` sets all of it at once: give all "
            "present values and the missing ones. domain, store, target and epoch are in table buffer_log of Postgres, "
            f"form is {_FORM}, and the rest is in the app's LogConfig.",
        ) from None
    return windows, target


def windows_of(metadata: Mapping[str, Any]) -> Windows:
    """Return what a log says of its windows; `said_by` has looked at the metadata."""
    next_s, next_archive = (metadata.get(_OURS + name) for name in ("next_failover_window_s", "next_archive"))
    return Windows(
        failover_window_s=_seconds(metadata[_OURS + "failover_window_s"]),
        archive=metadata[_OURS + "archive"] == "true",
        next_failover_window_s=_seconds(next_s) if next_s is not None else None,
        next_archive=next_archive == "true" if next_archive is not None else None,
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(f"a failover window of {text} s")
    return seconds


def target_of(metadata: Mapping[str, Any]) -> Target:
    """Return where a log says that it is flushed to; `said_by` has looked at the metadata."""
    return Target(*(metadata[_OURS + name] for name in _TARGET))


def with_windows(metadata: Mapping[str, Any], windows: Windows) -> dict[str, str]:
    """Return the log's metadata, with these windows instead of the ones in it."""
    said = msgspec.structs.asdict(windows)
    kept = {name: value for name, value in metadata.items() if name.removeprefix(_OURS) not in said}
    return kept | {_OURS + n: json.dumps(value) for n, value in said.items() if value is not None}


def out_of_service(config: LogConfig) -> list[str]:
    """Return the subjects that a log listens on while it is being repaired; nobody writes there."""
    return list(Subjects(config.subject + WITHDRAWN, config.partitions).stored)


def is_withdrawn(config: LogConfig, found: Mapping[str, Any]) -> bool:
    """Return whether a log with this configuration was taken out of service."""
    return found.get("subjects") == out_of_service(config)


def withdrawn(
    config: LogConfig, found: Mapping[str, Any], common: Sequence[int]
) -> tuple[dict[str, Any], Sequence[int]]:
    """Return the log's configuration with subjects to which nobody writes, and the positions that it remembers."""
    metadata = {_OURS + "common": ",".join(map(str, common)), **(found.get("metadata") or {})}
    subjects = out_of_service(config)
    kept = [int(seq) for seq in metadata[_OURS + "common"].split(",")]
    return {**found, "subjects": subjects, "metadata": metadata}, kept


def metadata_of(config: LogConfig, epoch: int, target: Target) -> dict[str, str]:
    """Return the metadata of a new log: what it says of itself."""
    said = {"partitions": str(config.partitions), "epoch": str(epoch), "bucket": config.bucket, "form": _FORM}
    if config.lanes > 1:
        said |= {"lanes": str(config.lanes), "lane": str(config.lane)}
    said |= zip(_TARGET, (target.domain, target.store, target.id), strict=True)
    return with_windows({_OURS + name: value for name, value in said.items()}, Windows.of(config))


def stream_config(config: LogConfig, epoch: int, target: Target) -> dict[str, Any]:
    """Return the log's configuration: nothing ages out, nothing is dropped, and a full log refuses writes.

    Raises ConfigError for an epoch whose positions would not fit into 62 bits.
    """
    if not 0 <= epoch < EPOCHS_MAX:
        raise ConfigError(f"epoch {epoch} of stream {config.stream} is not below {EPOCHS_MAX}")
    subjects = Subjects(config.subject, config.partitions)
    return {
        "name": config.stream,
        "subjects": list(subjects.stored),
        "retention": "limits",  # an ack must not delete: a failed-over Postgres may need the entry again
        **_KEEPS_ALL,
        "max_msg_size": -1,
        "max_bytes": config.max_bytes,
        "first_seq": first_sequence(epoch),
        **storage(config),
        "metadata": metadata_of(config, epoch, target),
    }


def bucket_stream(config: LogConfig) -> str:
    """Return the name of the stream in which the shared-state bucket is kept."""
    return f"KV_{config.bucket}"


async def ensure_bucket(stream: NatsStream, config: LogConfig) -> None:
    """Create the shared-state bucket, or check it. Raises ConfigDrift."""
    try:
        found = await found_bucket(stream, config)
    except StreamMissing:
        made = bucket(config.bucket, config, max_bytes=-1) | {"metadata": {_OURS + "log": config.stream}}
        try:
            found = (await stream.api(f"STREAM.CREATE.{made['name']}", made))["config"]
        except StreamTaken:  # made at the same moment, for another log or by an earlier release
            found = await found_bucket(stream, config)
    check_shared_state(config, found)


async def found_bucket(stream: NatsStream, config: LogConfig) -> Mapping[str, Any]:
    """Return the configuration of the shared-state bucket as it stands on the server. Raises StreamMissing."""
    found: Mapping[str, Any] = (await stream.api(f"STREAM.INFO.{bucket_stream(config)}"))["config"]
    return found


def check_owner(config: LogConfig, found: Mapping[str, Any]) -> None:
    """Raise ConfigDrift for a shared-state bucket of another log.

    A bucket that an earlier release made does not say whose it is.
    """
    log = (found.get("metadata") or {}).get(_OURS + "log", config.stream)
    if log != config.stream:
        raise ConfigDrift(
            f"bucket {config.bucket}",
            "log",
            expected=config.stream,
            found=log,
            way_out="The bucket belongs to that log: set LogConfig.bucket to a name of its own for this log.",
        )


def check_shared_state(config: LogConfig, found: Mapping[str, Any]) -> None:
    """Compare an existing shared-state bucket with the configuration. Raises ConfigDrift."""
    check_owner(config, found)
    what, wanted = f"bucket {config.bucket}", bucket(config.bucket, config, max_bytes=-1)
    del wanted["max_bytes"]  # some accounts demand that it has one; then it was made by hand
    check(what, UNSET, found, "", f"nats stream edit {wanted['name']}")
    check(what, wanted, found, "LogConfig", f"nats stream edit {wanted['name']}")


def check_in_service(config: LogConfig, found: Mapping[str, Any]) -> None:
    """Raise LogRolledBack for a log that an unfinished repair has taken out of service."""
    if found["subjects"] == out_of_service(config):
        raise LogRolledBack(f"a repair of stream {config.stream} was begun and not finished")


def check_stream(config: LogConfig, found: Mapping[str, Any]) -> int:
    """Compare an existing log, whose metadata `said_by` has looked at, with the configuration; return its epoch.

    Raises ConfigDrift, LogRolledBack.
    """
    what, metadata = f"stream {config.stream}", found["metadata"]
    check_in_service(config, found)
    partitions = metadata[_OURS + "partitions"]
    if partitions != str(config.partitions):
        raise ConfigDrift(
            what,
            "partitions",
            expected=str(config.partitions),
            found=partitions,
            way_out="The number of partitions is fixed for the life of a stream: "
            f"set LogConfig.partitions to {partitions} or choose another stream and bucket.",
        )
    check_lanes(config, metadata)
    check_bucket(config.stream, config.bucket, metadata)
    windows_of(metadata).check(config)
    for drift in _drifts(config, found, stream_config(config, epoch_of(found), target_of(metadata))):
        raise drift
    return epoch_of(found)


def altered(config: LogConfig, found: Mapping[str, Any]) -> Altered:
    """Return what somebody has changed of a log that is in use.

    A repair that has taken the log out of service, and changed metadata, are found elsewhere.
    """
    wanted = stream_config(config, 0, Target("", "", ""))
    for field in FREE:
        wanted.pop(field, None)
    drifts = () if is_withdrawn(config, found) else tuple(_drifts(config, found, wanted))
    if not drifts:
        return UNALTERED
    fields = {drift.field for drift in drifts}
    heard = all(any(_hears(s, ours) for s in found.get("subjects") or ()) for ours in wanted["subjects"])
    stops_writes = not heard or not fields.isdisjoint(_STOP_WRITES)
    return Altered(" ".join(map(str, drifts)), stops_writes, "allow_direct" in fields)


def _hears(subject: str, ours: str) -> bool:
    """Return whether a stream that listens on this subject, which may have wildcards, gets what we send."""
    tokens, sent = subject.split("."), ours.split(".")
    if tokens[-1] == ">" and len(sent) >= len(tokens):
        tokens, sent = tokens[:-1], sent[: len(tokens) - 1]
    return len(tokens) == len(sent) and all(token in ("*", word) for token, word in zip(tokens, sent, strict=True))


def _drifts(config: LogConfig, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[ConfigDrift]:
    """Yield what is not as it must be of an existing log's settings, one by one."""
    what, edit = f"stream {config.stream}", f"nats stream edit {config.stream}"
    if found.get("sealed"):  # sealing sets other fields, too
        yield ConfigDrift(
            what,
            "sealed",
            expected=False,
            found=True,
            way_out="Nothing can be written to it any more, and the server cannot undo that. Let the running processes "
            f"flush it; what is not flushed is lost when you remove the stream (`nats stream rm {config.stream}`) and "
            "begin a new log with `bufstore repair --apply`.",
        )
        return
    lost = f"Entries may leave the log before they are flushed, and be lost: change it back at once (`{edit}`)."
    chosen = {field: wanted[field] for field in wanted if field not in ("first_seq", "metadata", *_KEEPS_ALL)}
    for fields, ours, way_out in ((UNSET, "", ""), (_KEEPS_ALL, "", lost), (chosen, "LogConfig", "")):
        for field, value in fields.items():
            try:
                check(what, {field: value}, found, ours, edit, way_out=way_out)
            except ConfigDrift as e:
                yield e


def lanes_of(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many lanes an existing log has, itself included, and which lane it is.

    A log without other lanes says nothing of them.
    """
    return int(metadata.get(_OURS + "lanes", "1")), int(metadata.get(_OURS + "lane", "0"))


def check_lanes(config: LogConfig, metadata: Mapping[str, Any]) -> None:
    """Raise ConfigDrift for a log with other lanes than configured: threads would be looked for in the wrong one."""
    for field, found, expected in zip(("lanes", "lane"), lanes_of(metadata), (config.lanes, config.lane), strict=True):
        if found != expected:
            raise ConfigDrift(
                f"stream {config.stream}",
                field,
                expected=str(expected),
                found=str(found),
                way_out="The number of lanes is fixed for the life of a stream, and each is a log of its own: set "
                "LogConfig.stream and LogConfig.lanes to the values they had when the lanes were created, or choose "
                "another stream and bucket.",
            )


def _check_form(stream: str, metadata: Mapping[str, Any]) -> None:
    """Raise ConfigDrift for a stream that is no log, and for a log of an earlier release.

    This release cannot read the entries of such a log, which must not get lost.
    """
    form, begun = metadata.get(_OURS + "form"), _OURS + "epoch" in metadata
    if not any(name.startswith(_OURS) for name in metadata):
        raise ConfigDrift(
            f"stream {stream}",
            "partitions",
            expected="a number",
            found=None,
            way_out="bufstore did not create this stream (or somebody removed its metadata): choose another one.",
        )
    if form != _FORM and (form is not None or begun):
        raise ConfigDrift(
            f"stream {stream}",
            "form",
            expected=_FORM,
            found=form,
            way_out="An earlier release wrote this log (or somebody has removed bufstore.form since: then set it to "
            f"{_FORM} again with `nats stream edit --metadata`, which sets all of the metadata at once). With that "
            "release, stop all writers and run `bufstore flush --all`; remove the stream "
            f"(`nats stream rm {stream}`); then, with this release, begin a new log with `bufstore repair --apply`.",
        )


def check_bucket(stream: str, bucket: str, metadata: Mapping[str, Any]) -> None:
    """Raise ConfigDrift for a log that belongs to another bucket: its flushers and runs would be in two places."""
    found = metadata[_OURS + "bucket"]
    if found != bucket:
        raise ConfigDrift(
            f"stream {stream}",
            "bucket",
            expected=bucket,
            found=found,
            way_out=f"A log and its bucket belong together: set LogConfig.bucket (--bucket) to {found}, or choose "
            "another stream.",
        )
