"""Sets threads aside that wait for long, so that they take no space from others.

A feed delivers only so much ahead of the cursor, and the cursor stays before the first entry of a thread that has to
wait. So once a feed holds half of what it may, such entries are set aside (`bufstore.buffer.flush.owned_partition`) and
the feed goes on without them. When the thread's turn comes they are read again from the log, a part at a time, in a
task of its own: flushing the others does not wait for the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set

from bufstore.buffer.entry import Assembler, Item
from bufstore.buffer.flush.owned_partition import Aside, OwnedPartition
from bufstore.buffer.flush.window_flusher import TRIED_AT_ONCE, WindowFlusher
from bufstore.buffer.parts import AnyParts
from bufstore.errors import BufstoreError
from bufstore.jetstream.messages import AppendUnknown

_log = logging.getLogger(__name__)

#: Messages of one thread that are read again at a time, and of all threads together.
_PART = 1000
_PARTS = 4000
_TIMEOUT_S = 10.0
#: The pause after an error.
_PAUSE_S = 1.0
_LOOK_S = 0.05


class Recaller:
    """Sets entries aside that block others, and reads them again when their time has come."""

    def __init__(
        self,
        parts: AnyParts,
        owned_partitions: Mapping[int, OwnedPartition],
        windows: WindowFlusher,
        wake: Callable[[], None],
    ) -> None:
        self._log, self._subjects = parts.log, parts.subjects
        #: Bytes of what was set aside that may be in memory again.
        self._bytes_max = parts.config.flush_max_bytes // 4
        self._owned = owned_partitions
        self._waiting = windows.waiting
        self._tries_some = windows.tries_some
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._again_at = 0.0

    async def aclose(self) -> None:
        """Ask the log for nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def look(self) -> None:
        """See what can be set aside, and whose turn it is. Call this often, but not during a flush."""
        now = self._loop.time()
        crowded = [owned for owned in self._owned.values() if owned.feed.crowded]
        if not (crowded or self._waiting.absent or any(s.aside for s in self._owned.values())) or now < self._again_at:
            return
        # Of those whose turn it is, what has come back stays.
        waits = {t for t in self._waiting if self._waiting.until(t) > now}
        for owned in self._owned.values():
            back = {t for t, aside in owned.aside.items() if aside.recalled and t in waits}
            if gone := waits if owned in crowded else back:
                owned.set_aside(gone)
        absent = {t: owned for owned in self._owned.values() for t, a in owned.aside.items() if not a.recalled}
        self._waiting.absent = set(absent)
        if self._task is None or self._task.done():
            crowded = [owned for owned in crowded if owned.aside]
            wanted = [(absent[t], t) for t in self._wanted(absent.keys() - waits)]
            if crowded or wanted:
                self._task = asyncio.create_task(self._work(crowded, wanted), name="bufstore-flusher-recall")
        # Where very many wait, looking takes time: spend a tenth of the time on it, at most.
        self._again_at = now + max(_LOOK_S, 10 * (self._loop.time() - now))

    def _wanted(self, due: Set[str]) -> Iterator[str]:
        """The ones of these threads to read again now: of each cause no more than are tried at a time."""
        yield from (t for t in due if t not in self._waiting)
        counts: Counter[str] = Counter()
        some: dict[str, bool] = {}
        for thread_id in self._waiting:  # the one tried last comes last
            if thread_id is None or thread_id not in due:
                continue
            cause = self._waiting.cause(thread_id)
            counts[cause] += 1
            if cause not in some:
                some[cause] = self._tries_some(cause)
            if counts[cause] <= TRIED_AT_ONCE or not some[cause]:
                yield thread_id

    async def _work(self, crowded: list[OwnedPartition], wanted: list[tuple[OwnedPartition, str]]) -> None:
        try:
            for owned in crowded:
                await owned.feed.go_on(owned.passable)
            messages, size = _PARTS, self._bytes_max
            for owned, thread_id in wanted:
                if messages <= 0 or size <= 0:
                    break
                taken = await self._recall(owned, thread_id, min(_PART, messages), size)
                messages, size = messages - taken[0], size - taken[1]
        except (BufstoreError, AppendUnknown) as e:
            self._again_at = self._loop.time() + _PAUSE_S
            _log.warning(
                "cannot read waiting entries from the log again; tries again: %s", e, extra={"action": "recall_failed"}
            )
        finally:
            self._wake()

    async def _recall(self, owned: OwnedPartition, thread_id: str, messages: int, size: int) -> tuple[int, int]:
        """Read the next part of a thread's entries; how many there were, and of how many bytes."""
        aside = owned.aside.get(thread_id)
        if aside is None or aside.recalled:
            return 0, 0
        limit = max(1, min(messages, size * aside.entries // max(aside.bytes, 1)))
        while True:
            last, read_to = aside.last, aside.read_to
            found = await self._log.after(self._subjects.of(thread_id), read_to, _TIMEOUT_S, limit)
            if not self._is_current(owned, thread_id, aside) or aside.read_to != read_to:
                return 0, 0  # given up meanwhile, or it has gone on
            ended = bool(found) and found[-1].seq >= last
            assembler = Assembler()
            items: list[Item] = [i for m in found if m.seq <= last for i in assembler.feed(m, thread_id)]
            if ended:
                items += assembler.abandon()
            if (ended and (not items or items[-1].seq != last)) or (not ended and len(found) < limit):
                # It was there, and nothing unsettled is ever removed: the server that answers cannot be trusted, and
                # the partition is taken again.
                owned.doubt = f"entry {last} of a thread that waits is not found again"
                return 0, 0
            if items:
                owned.recall(thread_id, items)
                self._waiting.absent.discard(thread_id)
                return len(found), sum(len(m.body) for m in found)
            limit *= 2  # the pieces of one large entry

    def _is_current(self, owned: OwnedPartition, thread_id: str, aside: Aside) -> bool:
        return self._owned.get(owned.cursor.partition) is owned and owned.aside.get(thread_id) is aside
