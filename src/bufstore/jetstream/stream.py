"""Writing and reading one JetStream stream: single messages, atomic batches (ADR-50), direct gets (ADR-31)."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from bufstore.errors import BufstoreError, ConfigDrift, ConfigError, LogUnavailable, TooLarge
from bufstore.jetstream.answers import NO_ANSWER, Answer, answer_of
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.direct_gets import DirectGets, NobodyReads, Shown
from bufstore.jetstream.errors import ApiError, MessageMissing, StreamMissing, consumer_error, to_error
from bufstore.jetstream.headers import entry_header
from bufstore.jetstream.messages import (
    AppendUnknown,
    BatchRefused,
    Conflict,
    Outgoing,
    Part,
    StoredMessage,
)
from bufstore.jetstream.portions import portions
from bufstore.jetstream.posted import Posted
from bufstore.jetstream.questions import Doubt
from bufstore.jetstream.server_version import check_version
from bufstore.log_lines import LogLines
from bufstore.shared_call import SharedCall

_log = LogLines(__name__)

#: How long a leader may take to prove that it leads, in seconds.
_PROOF_S = 5.0
#: A sequence that no stream reaches.
_NOWHERE = 1 << 62
#: The most bytes that the headers of a message take, unless the message is an entry of a log.
_HEADERS_BYTES = 512
_MESSAGES_PER_GET = 1000
#: Seconds after which a node that lags is asked again.
_LAGS_S = 0.05
#: Requests that are idempotent: every consumer here has a name.
_REPEATABLE = ("STREAM.INFO.", "CONSUMER.INFO.", "CONSUMER.CREATE.", "CONSUMER.DELETE.")


class _PubAck(msgspec.Struct):
    seq: int = 0
    error: ApiError | None = None


_ack_decoder = msgspec.json.Decoder(_PubAck)


class NatsStream:
    """One stream, seen as a writer and reader of subjects.

    Writes raise Conflict, BatchRefused, AppendUnknown, LogFull or LogUnavailable (certainly not stored).
    """

    def __init__(
        self, connection: Connection, api: str, name: str, replicas: int, *, consumed_whole: bool = False
    ) -> None:
        """`consumed_whole`: a consumer of the stream takes all subjects."""
        self._connection = connection
        self._api = api
        self.name = name
        #: Whether the stream has replicas. Any of them may answer a direct get, and may lag: only the leader is asked.
        self.replicated = replicas > 1
        #: A node may refuse a write without asking the others, for want of room for example. A conflict is believed:
        #: its writer checks what is there. One proof is enough for all writes that were refused meanwhile.
        leads = self._remove_nothing if consumed_whole else lambda: self.prove(f"{name}.unused", _PROOF_S)
        self._doubt = Doubt(_is_refused, SharedCall(leads)) if self.replicated else None
        self._direct = DirectGets(connection, api, name, replicated=self.replicated)
        #: See `watch_settings`; and what it found at the last look.
        self._check_settings: Callable[[Mapping[str, Any]], None] | None = None
        self._altered = ""
        connection.on_connect(check_version)

    @property
    def message_bytes_max(self) -> int:
        """The server's max_payload: headers and body of one message."""
        return self._connection.client().max_payload

    def portions(self, subjects: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield the subjects in order, as many at a time as a request for their last messages may name."""
        return portions(subjects, self.message_bytes_max - _HEADERS_BYTES)

    def check_size(self, body: bytes, room: int = 0) -> None:
        """Raise TooLarge for a body that no message can hold, or not with `room` more bytes."""
        limit = self.message_bytes_max - _HEADERS_BYTES - room
        if len(body) > limit:
            raise TooLarge(len(body), limit, "the NATS server's max_payload")

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        """Store one message durably. Returns its sequence."""
        return self._seq(await self._connection.write([message], "", timeout_s, doubt=self._doubt))

    async def publish_each(
        self, messages: Sequence[Outgoing], timeout_s: float, ended: Callable[[int, int | Exception], None]
    ) -> None:
        """Store the messages one by one, side by side; return when all have ended.

        `ended` is called for each with its number and its sequence, or the error that `publish` would raise. Raises
        only a BufstoreError, when nothing was sent.
        """

        await self._connection.write_each(
            messages, timeout_s, lambda number, answer: ended(number, self._outcome(answer)), doubt=self._doubt
        )

    @property
    def posts(self) -> bool:
        """Whether `post` is possible now, for a small message. Not on replicas, where a refusal has to be proven."""
        return self._doubt is None and self._connection.posts

    def post(self, message: Outgoing, timeout_s: float, ended: Callable[[int | Exception], None]) -> Posted | None:
        """Send one message before this returns, without a task; None if that is not possible: see `publish`.

        `ended` is called once, later, with the message's sequence, or the error that `publish` would raise.
        """
        if not self.posts:
            return None
        return self._connection.post(message, timeout_s, lambda answer: ended(self._outcome(answer)))

    def _outcome(self, answer: bytes | Exception) -> int | Exception:
        try:
            return answer if isinstance(answer, Exception) else self._seq(answer)
        except (Conflict, BatchRefused, AppendUnknown, BufstoreError) as e:
            return e

    async def publish_batch(self, messages: Sequence[Outgoing], timeout_s: float) -> int:
        """Store all messages or none, as neighbours. Returns the last sequence."""
        batch = secrets.token_hex(8)
        return self._seq(await self._connection.write(messages, batch, timeout_s, doubt=self._doubt))

    def _seq(self, answer: bytes) -> int:
        try:
            ack = _ack_decoder.decode(answer)
        except ValueError:
            raise AppendUnknown("NATS answered with something other than a publish ack") from None
        if ack.error is not None:
            raise to_error(ack.error, self.name)
        if ack.seq <= 0:
            raise AppendUnknown("NATS answered without a sequence")
        return ack.seq

    async def last(self, subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
        """Return the last message of each subject (wildcards allowed); subjects without one are left out."""
        found: dict[str, StoredMessage] = {}
        if self.replicated and not any("*" in s or ">" in s for s in subjects):
            for message in await asyncio.gather(*(self._leader_get({"last_by_subj": s}, timeout_s) for s in subjects)):
                if message is not None:
                    found[message.subject] = message
            return found
        for some in self.portions(subjects):
            for message in await self._get_all({"multi_last": list(some)}, timeout_s):
                found[message.subject] = message
        return found

    async def after(self, subject: str, seq: int, timeout_s: float, limit: int = 0) -> list[StoredMessage]:
        """Return the subject's messages above `seq`, in order; at most `limit` of them if it is not 0."""
        if not self.replicated:
            return await self.read(subject, seq, timeout_s, limit)
        messages: list[StoredMessage] = []
        while not limit or len(messages) < limit:
            message = await self._leader_get({"seq": seq + 1, "next_by_subj": subject}, timeout_s)
            if message is None:
                break
            messages.append(message)
            seq = message.seq
        return messages

    async def read(self, subject: str, seq: int, timeout_s: float, limit: int = 0) -> list[StoredMessage]:
        """Return the messages like `after`, but from any replica, which may lag."""
        request = {"seq": seq + 1, "next_by_subj": subject, "batch": limit or _MESSAGES_PER_GET}
        return await self._get_all(request, timeout_s, limit)

    async def part(self, subject: str, seq: int, timeout_s: float, limit: int, bytes_max: int = 0) -> Part:
        """Return the first messages of the subject above `seq`, from any replica, which may lag.

        At most `limit`, and no more once they have `bytes_max` bytes; fewer when the time is over before all of them
        have come. Raises LogUnavailable when none has come.
        """
        request: dict[str, Any] = {"seq": seq + 1, "next_by_subj": subject, "batch": limit}
        messages, more, _ = await self._get(
            request | ({"max_bytes": bytes_max} if bytes_max else {}), timeout_s, partly=True
        )
        return Part(messages, more)

    async def identity(self, seq: int) -> StoredMessage | None:
        """Return the message at exactly this sequence, from the leader; None when there is none."""
        return await self._leader_get({"seq": seq}, 5.0)

    async def held(self, seq: int, timeout_s: float = 5.0) -> StoredMessage | None:
        """Return the message at exactly this sequence, which was there once; None if it is gone.

        Raises LogUnavailable when nobody tells in time: a node that the others have left may never have had it.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            # One answer must show that its node has come as far: by the message, by one behind it, or by where the
            # node's copy begins.
            found = await self._leader_get({"seq": seq, "next_by_subj": ">"}, timeout_s)
            if found is not None:
                return found if found.seq == seq else None
            if int((await self.info(timeout_s))["state"]["first_seq"]) > seq:
                return None
            if asyncio.get_running_loop().time() > deadline:
                raise LogUnavailable(f"the node that answers for {self.name} has no message {seq} yet")
            await asyncio.sleep(_LAGS_S)

    async def ends(self, filters: Sequence[str], timeout_s: float) -> list[int]:
        """Return the last sequence that matches each filter (wildcards allowed), from the leader; 0 for none."""
        found = await asyncio.gather(*(self._leader_get({"last_by_subj": f}, timeout_s) for f in filters))
        return [message.seq if message is not None else 0 for message in found]

    async def shown(self, subjects: Sequence[str], start: int, timeout_s: float) -> Shown:
        """Return the last message of each subject, if at or above `start`, from any replica, which may lag.

        An answer without messages does not say how far the replica is. At most 1024 subjects.
        """
        request: dict[str, Any] = {"multi_last": list(subjects)}
        return await self._get(request | ({"seq": start} if start else {}), timeout_s)

    async def prove(self, unused: str, timeout_s: float) -> None:
        """Return once the leader has proved that it leads. Raises LogUnavailable.

        A leader that the others have left answers reads for seconds. A purge needs their votes, as a write does;
        but a purge of a subject without messages stores nothing, leaves no hole, and works on a full stream.
        """
        asked = Outgoing(f"{self._api}.STREAM.PURGE.{self.name}", json.dumps({"filter": unused}).encode())
        # Sent as a write: a leader without followers does not answer, and then its connection is given up.
        try:
            answer = await self._connection.write([asked], "", timeout_s, again=True)
        except AppendUnknown as e:  # it purges nothing: no write is in doubt
            raise LogUnavailable(f"no node proves that it leads {self.name}: {e}") from None
        self._result(answer)

    async def _remove_nothing(self) -> None:
        """Prove the same without a purge: even an empty one makes a consumer of all subjects forget its waiters."""
        with suppress(MessageMissing):
            await self.delete(_NOWHERE)

    async def api(self, verb: str, body: dict[str, Any] | None = None, timeout_s: float = 5.0) -> Answer:
        """Send a request to the JetStream API, e.g. ``STREAM.INFO.<name>``.

        Raises the error of `to_error`, or of `consumer_error` where it is about a consumer.
        """
        try:
            answer = await self._connection.request(
                f"{self._api}.{verb}",
                json.dumps(body).encode() if body is not None else b"",
                timeout_s,
                again=verb.startswith(_REPEATABLE),
            )
        except AppendUnknown as e:
            raise LogUnavailable(f"NATS does not answer {verb.split('.')[0]} requests: {e}") from None
        return self._result(answer, consumer_error if verb.startswith("CONSUMER.") else to_error)

    async def info(self, timeout_s: float = 5.0) -> Answer:
        """Return what the server says of the stream."""
        info = await self.api(f"STREAM.INFO.{self.name}", timeout_s=timeout_s)
        if self._check_settings is not None:
            before, self._altered = self._altered, ""
            try:
                self._check_settings(info["config"])
            except ConfigDrift as e:
                self._altered = str(e)
                if self._altered != before:
                    _log.error("a stream's settings were changed: %s", e, extra={"action": "stream_altered"})
        return info

    def watch_settings(self, check: Callable[[Mapping[str, Any]], None]) -> None:
        """Log it once when somebody changes the settings beside this process. `check` raises ConfigDrift."""
        self._check_settings = check

    async def consumer(self, name: str, timeout_s: float = 5.0) -> Answer:
        """Return what the server says of a consumer of the stream. Raises ConsumerMissing."""
        return await self.api(f"CONSUMER.INFO.{self.name}.{name}", timeout_s=timeout_s)

    async def remove_consumer(self, name: str) -> None:
        """Remove a consumer, if that takes no longer than a second. Raises ConsumerMissing."""
        await self.api(f"CONSUMER.DELETE.{self.name}.{name}", timeout_s=1.0)

    def next_of(self, consumer: str) -> str:
        """Return the subject on which this consumer is asked for messages."""
        return f"{self._api}.CONSUMER.MSG.NEXT.{self.name}.{consumer}"

    async def delete(self, seq: int, timeout_s: float = 5.0) -> None:
        """Remove one message. Raises MessageMissing."""
        await self.api(f"STREAM.MSG.DELETE.{self.name}", {"seq": seq, "no_erase": True}, timeout_s)

    async def purge(self, subject: str, seq: int | None = None, timeout_s: float = 5.0) -> None:
        """Remove the messages that match a filter, up to a sequence if one is given. A purge stores nothing."""
        up_to = {} if seq is None else {"seq": seq + 1}
        await self.api(f"STREAM.PURGE.{self.name}", {"filter": subject, **up_to}, timeout_s)

    def _result(self, answer: bytes, said: Callable[[ApiError, str], Exception] = to_error) -> Answer:
        result = answer_of(answer)
        try:
            error = msgspec.convert(result.get("error"), ApiError | None)
        except ValueError:
            raise LogUnavailable(NO_ANSWER) from None
        if error is not None:
            raise said(error, self.name)
        return result

    async def _leader_get(self, request: dict[str, Any], timeout_s: float) -> StoredMessage | None:
        try:
            answer = await self._connection.request(
                f"{self._api}.STREAM.MSG.GET.{self.name}", json.dumps(request).encode(), timeout_s, again=True
            )
        except AppendUnknown as e:
            raise LogUnavailable(f"the log's leader does not answer: {e}") from None
        try:
            got = _get_decoder.decode(answer)
        except ValueError:
            raise LogUnavailable(NO_ANSWER) from None
        if got.error is not None:
            if got.error.err_code == 10037:  # no message found
                return None
            raise to_error(got.error, self.name)
        if (m := got.message) is None:
            raise LogUnavailable(NO_ANSWER)
        return StoredMessage(m.subject, m.seq, entry_header(m.hdrs), m.data)

    async def _get_all(self, request: dict[str, Any], timeout_s: float, limit: int = 0) -> list[StoredMessage]:
        """Send a direct get and its continuations: the server stops an answer at some bytes or messages."""
        messages: list[StoredMessage] = []
        while True:
            part, more, _ = await self._get(request, timeout_s)
            messages += part
            if not more or not part or (limit and len(messages) >= limit):
                return messages
            request = {**request, "seq": part[-1].seq + 1} | ({"batch": limit - len(messages)} if limit else {})

    async def _get(self, request: dict[str, Any], timeout_s: float, *, partly: bool = False) -> Shown:
        """Send one direct get. `partly`: the messages that have come when the time is over are an answer, too."""
        until = asyncio.get_running_loop().time() + timeout_s
        try:
            return await self._direct.get(request, timeout_s, partly=partly)
        except NobodyReads:
            # So it is when there is no such stream, while a stream has no leader, and without direct reads.
            if (why := await self._why_unread(until - asyncio.get_running_loop().time())) is not None:
                raise why from None
            raise

    async def _why_unread(self, timeout_s: float) -> LogUnavailable | None:
        """Return why nobody answers reads; None if the server does not say."""
        try:
            config = (await self.info(max(timeout_s, 0.1))).get("config") or {}
        except StreamMissing:
            return StreamMissing(f"stream {self.name} is gone")
        except ConfigError as e:  # JetStream was switched off
            return NobodyReads(f"nobody answers reads of stream {self.name}: {e}")
        except BufstoreError:
            return None
        if config.get("allow_direct"):
            return None
        how = f"switch it on again: `nats stream edit {self.name} --allow-direct`"
        return NobodyReads(f"somebody has switched off allow_direct of stream {self.name}, so nobody reads it; {how}")


def _is_refused(answer: bytes) -> bool:
    try:
        error = _ack_decoder.decode(answer).error
    except ValueError:
        return False
    return error is not None and not isinstance(to_error(error, ""), Conflict)


class _LeaderMessage(msgspec.Struct):
    subject: str
    seq: int
    data: bytes = b""
    hdrs: bytes = b""


class _LeaderGet(msgspec.Struct):
    message: _LeaderMessage | None = None
    error: ApiError | None = None


_get_decoder = msgspec.json.Decoder(_LeaderGet)
