"""Units with entries that are too large for a group: their parts are stored first, and a group names them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from bufstore import elapsed
from bufstore.buffer.groups.choosing import Queued
from bufstore.buffer.groups.group import size_of
from bufstore.buffer.groups.oversize import parts_of, reference
from bufstore.buffer.groups.stream import GroupsInStream
from bufstore.buffer.subjects import Subjects
from bufstore.config import large_bytes_max
from bufstore.errors import BufstoreError, LogFull, LogUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.group_commit import end_one, unsent
from bufstore.jetstream.messages import AppendUnknown, Conflict
from bufstore.log_lines import LogLines
from bufstore.tasks import end, spawn

_log = LogLines(__name__)


class LargeUnits:
    """Stores the parts of one unit at a time, and hands the unit on."""

    def __init__(
        self,
        stream: GroupsInStream,
        subjects: Subjects,
        room: Callable[[], int],
        ready: Callable[[Queued], None],
        timeout_s: float,
    ) -> None:
        """`room`: how many bytes of entries fit into one message now. `ready`: gets a unit whose parts are stored.

        `timeout_s`: the longest wait for one answer.
        """
        self._stream, self._subjects, self._room, self._ready = stream, subjects, room, ready
        self._timeout_s = timeout_s
        #: The units whose parts are being stored, or wait for that.
        self.units: list[Queued] = []
        #: How many parts had no answer, in a row.
        self.unanswered = 0
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def store(self, queued: Queued) -> None:
        """Store the parts of a unit's large entries, then hand it on, with entries that say where the parts stand."""
        self.units.append(queued)
        task = spawn(self._store(queued), name="bufstore-parts", among=self._tasks)
        task.add_done_callback(partial(self._ended, queued))

    async def aclose(self) -> None:
        """Stop. Units that were not handed on fail with Closed."""
        self._closed = True
        await end(*self._tasks)

    def _ended(self, queued: Queued, task: asyncio.Task[None]) -> None:
        self.units.remove(queued)
        if task.cancelled():  # perhaps before it began
            end_one(queued.unit, unsent(closed=self._closed))
        elif task.exception() is not None:  # of a signal's handler; the app may run the loop again
            end_one(queued.unit, AppendUnknown("a signal interrupted the write"))

    async def _store(self, queued: Queued) -> None:
        try:
            messages = list(queued.messages)
            async with self._one:
                # Parts that do not all fit would fill the log for everyone until they can be purged, and count for
                # nothing.
                used, limit = await self._stream.fill()
                size = sum(len(messages[number].body) for number in queued.elsewhere)
                if used + size > large_bytes_max(limit):
                    raise LogFull(f"the log has no room for a large entry of {size} bytes")
                parts_at = elapsed.now_s()
                if queued.unit.given_up:
                    end_one(queued.unit, Conflict("its caller gave up"))
                    return
                queued.unit.sent()  # it goes on even when a write's time is over: begun anew, it would never end
                for number in queued.elsewhere:
                    payload = messages[number].body
                    parts = parts_of(self._subjects.parts, payload, self._room())
                    seqs = [await self._stream.publish(part, self._timeout_s) for part in parts]
                    messages[number] = msgspec.structs.replace(messages[number], body=reference(payload, seqs))
        except AppendUnknown as e:
            self.unanswered += 1
            # Parts count for nothing without a group.
            end_one(queued.unit, LogUnavailable(f"a part of a large entry was not stored: {e}"))
        except BufstoreError as e:
            end_one(queued.unit, e)
        except Exception as e:
            # Never leave writers waiting until their deadlines.
            _log.exception(
                "the parts of a large entry could not be stored; the outcome of its write is unknown",
                extra={"action": "group_commit_error"},
            )
            end_one(queued.unit, AppendUnknown(f"unexpected {type(e).__name__}"))
        else:
            self.unanswered = 0
            reach(Failpoint.PARTS_STORED)
            self._ready(
                msgspec.structs.replace(queued, messages=messages, size=sum(map(size_of, messages)), parts_at=parts_at)
            )
