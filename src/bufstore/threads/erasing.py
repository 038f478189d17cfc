"""Erases a thread: deletes it, and removes its content wherever else the buffer keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import NamedTuple

from bufstore.buffer.entry import entry_id
from bufstore.buffer.operate.quarantine import discard_superseded
from bufstore.errors import AlreadyExists, NotFound
from bufstore.jetstream.messages import StoredMessage
from bufstore.tasks import together
from bufstore.threads import edits
from bufstore.threads.buffered_edits import BufferedEdits
from bufstore.threads.buffered_lineage import BufferedLineage
from bufstore.threads.lanes import ThreadBuffer, ThreadLanes
from bufstore.threads.lineage import Children, deletion

#: How many threads are read at the same time.
_AT_ONCE = 50


@dataclass(frozen=True, kw_only=True)
class Erasure:
    """What `erase` has removed, and what it could not."""

    #: The threads: the one that was named, and its descendants if they went too.
    thread_ids: tuple[str, ...]
    #: Whether anything of them was found: the thread itself, messages in the log, parked entries, or rows set aside.
    found: bool
    #: The threads that exist, or that only quarantine has: they were written to since their deletion, or were not
    #: deleted because they are no descendants any more. Their earlier content may exist, too.
    written_again: tuple[str, ...]
    #: How many messages were removed from the log.
    log_messages: int
    #: How many entries were removed from quarantine.
    quarantined: int
    #: How many rows were removed that pipelines had set aside as not fit to be written.
    set_aside: int
    #: Archives of the log below this position may hold the content, and so may what a run left that died; 0: the log
    #: was never archived.
    archived_below: int


class ThreadEraser:
    """See `BufferedThreadStore.erase`."""

    def __init__(self, lanes: ThreadLanes, edits: BufferedEdits, lineage: BufferedLineage) -> None:
        self._lanes, self._config = lanes, lanes.config
        self._erase_set_aside = lanes.first.backing.erase_set_aside
        self._edits = edits
        self._lineage = lineage

    async def erase(self, thread_id: str, children: Children) -> Erasure:
        """Delete the thread, then remove what is kept beside the tables. Safe to repeat, also after an error."""
        wanted = deletion(thread_id, children)
        ledger, going = self._lanes.first.ledger, None
        if children is Children.CASCADE:
            # Once the descendants are deleted, only this record tells a later try whose descendants they were. `going`
            # adds those that come meanwhile; they go, too. Another process may finish what this one has begun.
            going = partial(self._remember, thread_id)
            await going(await self._lineage.descendants(thread_id))
        existed = True
        try:
            await self._lineage.change(wanted, going=going)
        except NotFound:
            existed = False
        remembered = await ledger.begin_erasure(thread_id, ()) if going is not None else []
        alive = await self._existing(remembered)
        threads = [thread_id, *(t for t in remembered if t not in alive)]
        logs = await together(self._erase(buffer, some) for buffer, some in self._lanes.shared_out(threads))
        removed = sum(log.removed for log in logs)
        again = [t for log in logs for t in log.written_again]
        erased = [t for t in threads if t not in again]
        quarantined = sum([await discard_superseded(self._lanes.of(t).quarantine, t) for t in erased])
        again += await self._existing(erased)  # what was written while this waited stays
        set_aside = await self._erase_set_aside(erased) if self._erase_set_aside is not None else 0
        archived = max([await buffer.ledger.may_be_archived() for buffer, _ in self._lanes.shared_out(threads)])
        await ledger.end_erasure(thread_id, remembered)
        return Erasure(
            thread_ids=tuple(threads),
            found=existed or any(log.waited for log in logs) or bool(removed or quarantined or set_aside),
            written_again=(*alive, *again),
            log_messages=removed,
            quarantined=quarantined,
            set_aside=set_aside,
            archived_below=archived,
        )

    async def _remember(self, thread_id: str, descendants: Sequence[str]) -> None:
        await self._lanes.first.ledger.begin_erasure(thread_id, descendants)

    async def _existing(self, thread_ids: Sequence[str]) -> list[str]:
        """Those of these threads that exist: written to since, not descendants any more, or never deleted."""
        found: list[str] = []
        for some in (thread_ids[n : n + _AT_ONCE] for n in range(0, len(thread_ids), _AT_ONCE)):
            states = await together(self._lanes.of(t).reads.joined(t) for t in some)
            there = [s.thread is not None or s.watermark.broken_since is not None for s, _ in states]
            found += compress(some, there)
        return found

    async def _erase(self, buffer: ThreadBuffer, threads: Sequence[str]) -> _FromLog:
        """Remove what the buffer's log has of these threads."""
        # A scan shows what is on the log's disk; a lookup by thread does not show what nobody needs any more.
        shown = {m.subject: m async for _, m in buffer.log.scan(threads=threads)}
        last = {t: found for t in threads if (found := shown.get(buffer.subjects.of(t))) is not None}
        waited = await self._flush_waiting(buffer, [t for t in threads if t not in last])
        below = {t: await self._removed_at(buffer, t, found) for t, found in last.items()}
        removed = await buffer.eraser.erase({t: seq for t, seq in below.items() if seq is not None})
        return _FromLog(removed, [t for t, seq in below.items() if seq is None], waited)

    async def _flush_waiting(self, buffer: ThreadBuffer, threads: Sequence[str]) -> bool:
        """Wait until nothing of these threads, of which the log has nothing, waits in Postgres; return whether it did.

        Until their deletions are flushed, their content is in the tables.
        """
        waiting = await buffer.reads.restored.counting(lambda: buffer.ledger.waiting.among(threads))
        for thread_id in waiting:
            await buffer.force_flush(thread_id)
        return bool(waiting)

    async def _removed_at(self, buffer: ThreadBuffer, thread_id: str, last: StoredMessage) -> int | None:
        """The position of the thread's removal; None if it was written again.

        `last`: the thread's last entry in the log. It stays there, because writers build on it, so it must be an entry
        without content. If the log holds entries and no removal behind them (the entries were parked, and there was no
        thread to delete), this writes a removal.
        """
        await buffer.waiter.partitions({buffer.subjects.partition(thread_id): last.seq}, self._config.flush_timeout_s)
        watermark = await buffer.ledger.watermark(thread_id)
        if watermark.gone and entry_id(last) == watermark.applied_id:
            return watermark.flushed_seq
        try:
            return await self._remove_remains(thread_id)
        except AlreadyExists:
            return watermark.flushed_seq if watermark.gone else None

    async def _remove_remains(self, thread_id: str) -> int:
        return (await self._edits.edit(edits.remove_remains(thread_id))).thread_seq


class _FromLog(NamedTuple):
    """What was done to one log."""

    #: How many messages were removed.
    removed: int
    #: The threads that were written again.
    written_again: Sequence[str]
    #: Whether something was flushed of threads of which the log had nothing.
    waited: bool
