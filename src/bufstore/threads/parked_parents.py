"""The parents that entries in quarantine name: a replay would give them to their threads, so a deletion sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from bufstore.buffer.entry import StoredEntry
from bufstore.buffer.operate.replay import ParkedEntry
from bufstore.threads.lanes import ThreadBuffer, ThreadLanes
from bufstore.threads.model import Thread
from bufstore.threads.payload import Edit, Payload, Removal, decode_payload


class _Named(msgspec.Struct, frozen=True):
    """What an entry says of its thread's parent."""

    parent: str | None
    #: Whether it replaces a parent that the thread has; a run names one only for a thread that has none.
    replaces: bool


class _Parked(msgspec.Struct):
    """A thread whose chain is broken: its entries in quarantine that name a parent, by position."""

    since: int
    #: The position behind the last entry that was looked at; later ones are parked behind it.
    next: int
    named: dict[int, _Named]


_NOTHING = _Parked(0, 0, {})


class ParkedParents:
    """Reads each entry in quarantine once, for all changes of lineage that a process makes."""

    def __init__(self, lanes: ThreadLanes, thread: Callable[[str], Awaitable[Thread | None]]) -> None:
        """`thread`: the thread as reads show it."""
        self._lanes, self._thread = lanes, thread
        self._threads: dict[str, _Parked] = {}
        #: One look after the other: each reads only what was parked since the one before.
        self._looking = asyncio.Lock()

    async def children(self, thread_id: str) -> list[str]:
        """Return the threads whose parent this one is, or would be after a replay.

        What was acknowledged before counts if it is flushed. Raises StoreUnavailable, StoreMisconfigured.
        """
        threads = await self._look()
        candidates = [t for t, parked in threads.items() if any(n.parent == thread_id for n in parked.named.values())]
        return [t for t in candidates if await self._parent_of(t, threads[t]) == thread_id]

    async def parent_of(self, thread_id: str) -> str | None:
        """Return the parent that the thread would have after a replay. Raises StoreUnavailable, StoreMisconfigured."""
        return await self._parent_of(thread_id, (await self._look()).get(thread_id, _NOTHING))

    async def leaving(
        self, thread_id: str, descendants: Callable[[str], Awaitable[list[str]]]
    ) -> tuple[str, int] | None:
        """Return a descendant of this thread that a replay would move away, and since when its chain is broken.

        None: there is none. Raises what `descendants` raises, StoreUnavailable, StoreMisconfigured.
        """
        threads = await self._look()
        moving = [t for t, parked in threads.items() if any(n.replaces for n in parked.named.values())]
        below = await descendants(thread_id) if moving else ()
        for descendant in set(moving).intersection(below):
            if await self._parent_of(descendant, threads[descendant]) not in (thread_id, *below):
                return descendant, threads[descendant].since
        return None

    async def _parent_of(self, thread_id: str, parked: _Parked) -> str | None:
        named = parked.named
        there = await self._lanes.of(thread_id).ledger.parked.present(list(named)) if named else ()
        thread = await self._thread(thread_id)
        parent = thread.parent_thread_id if thread is not None else None
        for found in (named[seq] for seq in sorted(there)):
            if found.replaces or parent is None:
                parent = found.parent
        return parent

    async def _look(self) -> dict[str, _Parked]:
        async with self._looking:
            found: dict[str, _Parked] = {}
            for lane in self._lanes.all:
                broken = await lane.ledger.broken()
                marks = await lane.ledger.watermarks(sorted(broken)) if broken else {}
                ends = await lane.ledger.parked.ends() if broken else {}
                for thread_id, (watermark, _) in marks.items():
                    if (since := watermark.broken_since) is not None:
                        before = self._threads.get(thread_id)
                        if before is None or before.since > since:  # the latter in a Postgres that went back
                            before = _Parked(since, since, {})
                        found[thread_id] = await self._looked(lane, thread_id, since, before, ends.get(thread_id, 0))
            self._threads = found
            return found

    async def _looked(self, lane: ThreadBuffer, thread_id: str, since: int, before: _Parked, end: int) -> _Parked:
        """`end`: the position of the thread's last entry in quarantine."""
        named = {seq: found for seq, found in before.named.items() if seq >= since}
        start = max(before.next, since)
        while start <= end and (entries := await lane.ledger.parked.of_thread(thread_id, start)):
            named.update((entry.seq, found) for entry in entries if (found := _named_in(entry)) is not None)
            start = entries[-1].seq + 1
        return _Parked(since, start, named)


def _named_in(entry: ParkedEntry) -> _Named | None:
    """Return what the entry says of its thread's parent; None: nothing, or no replay could read or apply it."""
    if entry.base_id is None:
        return None
    try:
        payload = decode_payload(entry.item.entry.payload) if isinstance(entry.item, StoredEntry) else None
    except ValueError:
        return None
    if isinstance(payload, Removal):
        return _Named(None, replaces=True)
    if isinstance(payload, Edit) and payload.parent is not None:
        return _Named(payload.parent[0], replaces=True)
    if isinstance(payload, Payload) and payload.save.parent_thread_id is not None:
        return _Named(payload.save.parent_thread_id, replaces=False)
    return None
