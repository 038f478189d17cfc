"""Children that only the quarantine knows: a replay would make them, so a change of lineage has to see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable

from bufstore.buffer.entry import StoredEntry
from bufstore.errors import NotFound
from bufstore.threads.lanes import ThreadBuffer, ThreadLanes
from bufstore.threads.model import Thread
from bufstore.threads.payload import Edit, Payload, decode_payload

_PAGE = 1000


class ParkedChildren:
    """The children of each thread in the quarantines of all lanes, as they were at the first look."""

    def __init__(self, lanes: ThreadLanes, thread: Callable[[str], Awaitable[Thread | None]]) -> None:
        """`thread`: the thread as reads show it."""
        self._lanes, self._thread = lanes, thread
        self._found: dict[str, set[str]] | None = None

    async def of(self, thread_id: str) -> set[str]:
        """Return the children of this thread. Everything must be flushed that was acknowledged before."""
        if self._found is None:
            self._found = defaultdict(set)
            for lane in self._lanes.all:
                await self._look(lane, self._found)
        return self._found.get(thread_id, set())

    async def _look(self, lane: ThreadBuffer, found: dict[str, set[str]]) -> None:
        after = 0
        while page := await lane.quarantine.page(after=after, limit=_PAGE):
            after = page[-1].seq
            for info in page:
                if info.superseded or info.thread_id is None or info.entry_id is None:
                    continue  # no replay applies it
                parent = await self._parent_in(lane, info.thread_id, info.seq)
                if parent is not None:
                    found[parent].add(info.thread_id)

    async def _parent_in(self, lane: ThreadBuffer, thread_id: str, seq: int) -> str | None:
        """Return the parent that the entry would give the thread, if any."""
        try:
            item = (await lane.quarantine.show(seq)).item
            payload = decode_payload(item.entry.payload) if isinstance(item, StoredEntry) else None
        except (NotFound, ValueError):  # replayed or discarded meanwhile; or nothing that a replay could read
            return None
        if isinstance(payload, Edit):
            return payload.parent[0] if payload.parent is not None else None
        if not isinstance(payload, Payload) or payload.save.parent_thread_id is None:
            return None
        thread = await self._thread(thread_id)
        has_another = thread is not None and thread.parent_thread_id is not None
        return None if has_another else payload.save.parent_thread_id
