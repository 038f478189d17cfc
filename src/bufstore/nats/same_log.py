"""Checks whether this is still the log that we wrote to: on every new connection, and again while it is not.

The node that answers may be a leader that the others have left, or may have no leader to ask. So an old end is believed
only when a write that was sent after the question is stored, and by where it is stored. A lone leader stores nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import nats.errors
from nats.aio.client import Client

from bufstore.errors import BufstoreError, LogRolledBack, LogUnavailable
from bufstore.jetstream.answers import Answer, answer_of
from bufstore.jetstream.exchange import AGAIN_S
from bufstore.jetstream.messages import AppendUnknown, Outgoing, StoredMessage
from bufstore.log_lines import LogLines
from bufstore.tasks import Lasting

_log = LogLines(__name__)

#: A server that leads all streams and was left by the others steps down within 20 s. So a server is believed that says
#: for longer than this, in seconds, that there is no such stream.
GONE_S = 30.0
_LOOK_AGAIN_S = 1.0
_ASK_S = 5.0
_STREAM_MISSING = 10059

#: Set in the task that checks whether a refusal still holds: its own calls are not refused.
_looking: ContextVar[bool] = ContextVar("looking", default=False)


class Unproven(nats.errors.Error):
    """The log shown is old or missing, and no node has proved that it leads; or no JetStream shows one."""


class SameLog:
    """What this process knows to be in the log, and whether the log is refused because it lacks that."""

    def __init__(self, stream: str, withdrawn: str, replicated: bool) -> None:
        """`withdrawn`: a subject that the log listens on when a repair has taken it out of service."""
        self._stream = stream
        self._withdrawn = withdrawn
        self._replicated = replicated
        #: The highest position this process knows to be in the log.
        self.highest = 0
        #: Why nothing is appended or flushed; None when all is well.
        self.refused: LogRolledBack | None = None
        #: The last message that was acknowledged to this process: position, subject, header. None: there is none yet.
        self._acked: tuple[int, str, str | None] | None = None
        #: The same of a later message that stood in the refused log together with that one, which may be purged since:
        #: a log that holds the later one has not lost the earlier one. None: none was seen.
        self._beside: tuple[int, str, str | None] | None = None
        #: The stream's configuration, as the last new connection showed it; empty: not yet.
        self.settings: Mapping[str, Any] = {}
        self._gone_since: float | None = None
        self._look: Lasting | None = None

    def note(self, seq: int) -> int:
        """Note that this position is in the log."""
        if seq > self.highest:
            self.highest = seq
        return seq

    def acked(self, seq: int, message: Outgoing) -> int:
        """Note that this message of ours is in the log, at this position."""
        if self._acked is None or seq > self._acked[0]:
            self._acked, self._beside = (seq, message.subject, message.header), None
        return self.note(seq)

    def check(self) -> None:
        """Raise LogRolledBack while the log is refused."""
        if self.refused is not None and not _looking.get():
            raise LogRolledBack(self.refused.reason, self.refused.way_out)  # each caller's has a traceback of its own

    def refuse(self, why: LogRolledBack, stands_again: Callable[[], Awaitable[bool]]) -> None:
        """Append and flush nothing more until `stands_again`, which is asked once a second, returns True."""
        if self.refused is None:
            self.refused = why
            _log.error("refusing the log; nothing is appended or flushed: %s", why, extra={"action": "log_refused"})
            self._look = Lasting(partial(self._look_again, stands_again), name="bufstore-log-refused")

    async def aclose(self) -> None:
        """Stop looking."""
        if self._look is not None:
            await self._look.aclose()

    async def _look_again(self, stands_again: Callable[[], Awaitable[bool]]) -> None:
        _looking.set(True)
        while self.refused is not None:
            await asyncio.sleep(_LOOK_AGAIN_S)
            with contextlib.suppress(BufstoreError, AppendUnknown):
                if await stands_again():
                    _log.warning("accepting the log again; it was refused because %s", self.refused.reason,
                                 extra={"action": "log_accepted"})  # fmt: skip
                    self.refused = None

    async def holds_what_we_wrote(self, read: Callable[[int], Awaitable[StoredMessage | None]], end: int) -> bool:
        """Return whether the log holds the last message acknowledged to this process, or certainly let go of it in
        order; True if there is none. `end`: the position of the last group, which no purge takes for a while.
        """
        if self._acked is None:
            return True
        last = await read(end) if end else None  # before the others: it stands beside what is found after it
        for seq, subject, header in filter(None, (self._acked, self._beside)):
            found = await read(seq)
            if found is not None:
                same = (found.subject, found.header) == (subject, header)
                if same and last is not None and last.seq > seq:
                    self._beside = last.seq, last.subject, last.header
                return same
        return False

    async def look(self, client: Client, info_subject: str, barrier: str) -> str | None:
        """Return why the log that this connection leads to is not the one we know; None when it is.

        Raises what `Client.request` raises, Unproven, LogUnavailable.
        """
        if not self.highest:
            return None
        info = await _ask(client, info_subject)
        self.settings = info.get("config") or {}
        missing = (info.get("error") or {}).get("err_code") == _STREAM_MISSING
        if not missing:
            self._gone_since = None
        if int((info.get("state") or {}).get("last_seq", -1)) >= self.highest:
            return None
        if "state" not in info and not missing:
            return None  # JetStream has another kind of trouble: each call will say so
        if self._withdrawn in (self.settings.get("subjects") or ()):
            return f"a repair of stream {self._stream} was begun and not finished"
        if self._replicated:
            return await self._proof(client, barrier, missing)
        if missing:
            return f"stream {self._stream} is gone"
        return f"the log ends at {info['state']['last_seq']}, this process has seen {self.highest} in it"

    async def _proof(self, client: Client, barrier: str, missing: bool) -> str | None:
        """Return the same, proved by a write: its position is above all that was ever acknowledged in this log."""
        try:
            answer = await client.request(barrier, b"", timeout=2)
            seq = int(answer_of(answer.data).get("seq", 0))
        except (nats.errors.NoRespondersError, LogUnavailable):
            seq = 0
        if not seq:
            if missing and self._gone_for(asyncio.get_running_loop().time()):
                return f"stream {self._stream} is gone"
            what = "no stream" if missing else "an old end"
            raise Unproven(f"NATS shows {what} for {self._stream}, and no node proves that it leads the stream")
        self._gone_since = None
        if seq > self.highest:
            return None
        return f"the log goes on at {seq}, this process has seen {self.highest} in it"

    def _gone_for(self, now: float) -> bool:
        if self._gone_since is None:
            self._gone_since = now
        return now - self._gone_since > GONE_S


async def _ask(client: Client, subject: str) -> Answer:
    """Ask in short tries: a request sent while no node leads is never answered, even once a node leads."""
    pause = AGAIN_S
    async with asyncio.timeout(_ASK_S):
        while True:
            try:
                answer = await client.request(subject, b"", timeout=pause)
            except nats.errors.NoRespondersError:
                raise Unproven(_nobody(subject)) from None
            except nats.errors.TimeoutError:
                pause *= 2
            else:
                return answer_of(answer.data)


def _nobody(subject: str) -> str:
    """Return what it means that nobody takes this request of the JetStream API."""
    api, off = subject.partition(".STREAM.")[0], "it is switched off, or starting"
    if api == "$JS.API":
        return f"JetStream does not answer on this server: {off}"
    # A leaf node, say: it needs no JetStream of its own.
    return f"JetStream does not answer on {api}: this server has lost the servers that have it, or {off} there"
