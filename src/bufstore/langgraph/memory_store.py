"""LangGraph's tables in memory, for tests that need no Postgres."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from bufstore.buffer.domain import Backing
from bufstore.buffer.target import Kind
from bufstore.config import BufferConfig, LogConfig
from bufstore.langgraph.domain import DOMAIN, Tail, stored_tail
from bufstore.langgraph.folded import Folded
from bufstore.langgraph.history import History, check_history, thin
from bufstore.langgraph.model import (
    TASKS,
    BlobKey,
    CheckpointKey,
    CheckpointRow,
    LangGraphChange,
    Tables,
    takes_sends,
    versions_of,
)
from bufstore.langgraph.outlines import outline_of
from bufstore.langgraph.protocol import Cursor, Outline, Part, Query
from bufstore.memory.ledger import MemoryLedger


class MemoryCheckpointStore:
    """A `CheckpointStore` in memory: LangGraph's tables, which are lost when the process ends.

    With a `bufstore.memory.MemoryNats` they make a buffered saver that needs no server, for an app's unit tests.
    """

    def __init__(self, *, history: History = "all") -> None:
        """`history`: how much of a thread's history is written (docs/LANGGRAPH.md, Growth)."""
        self.history = check_history(history)
        self._threads: dict[str, Tables] = {}
        self._ledger = MemoryLedger(self)
        #: This store as the buffers of the other lanes see it.
        self._lanes: dict[int, MemoryCheckpointStore] = {}

    def of_lane(self, log: LogConfig) -> MemoryCheckpointStore:
        if not log.lane:
            return self
        if log.lane not in self._lanes:
            lane = self._lanes[log.lane] = MemoryCheckpointStore(history=self.history)
            lane._threads = self._threads
        return self._lanes[log.lane]

    def behind(self, config: BufferConfig) -> tuple[MemoryLedger, Backing[Tail]]:
        return self._ledger, Backing(Kind(DOMAIN, "memory"), self)

    async def apply(self, connection: Any, batch: Sequence[LangGraphChange]) -> None:
        """See `bufstore.buffer.domain.Applies`."""
        for change in batch:
            tables = self._threads.setdefault(change.thread_id, Tables())
            if self.history == "all":
                for _, operation in change.operations:
                    tables.apply(operation)
            else:
                folded = Folded(change.thread_id, (operation for _, operation in change.operations))
                thin(folded, self.history)
                self._threads[change.thread_id] = folded.written(tables)

    async def state(self, thread_id: str) -> Tail:
        """See `bufstore.buffer.domain.StateReader`."""
        tables = self._threads.get(thread_id, Tables())
        there = bool(tables.checkpoints or tables.writes)
        return stored_tail(await self._ledger.watermark(thread_id), there=there)

    async def answers(self) -> None:
        """Return at once: memory always answers."""

    async def latest(self, thread_id: str, ns: str, namespaces_max: int) -> Part:
        all_, found = self._threads.get(thread_id, Tables()), Tables()
        row = all_.latest(ns)
        first = row.id if row is not None else ""
        found.add(writes=(w for key, w in all_.writes.items() if key[0] == ns and key[1] >= first))
        if row is not None:
            _add(found, all_, row)
        namespaces = frozenset(name for name, _ in all_.checkpoints)
        known = namespaces if len(namespaces) <= namespaces_max else None
        return Part(await self._ledger.watermark(thread_id), found, known)

    async def one(self, thread_id: str, ns: str, checkpoint_id: str) -> Part:
        all_, found = self._threads.get(thread_id, Tables()), Tables()
        found.add(writes=all_.writes_of(ns, checkpoint_id))
        row = all_.checkpoints.get((ns, checkpoint_id))
        if row is not None:
            _add(found, all_, row)
        return Part(await self._ledger.watermark(thread_id), found)

    async def ancestors(self, thread_id: str, ns: str, at: str, channels: Sequence[str], limit: int) -> Part:
        all_, found = self._threads.get(thread_id, Tables()), Tables()
        next_: str | None = at
        while next_ is not None and limit and (row := all_.checkpoints.get((ns, next_))) is not None:
            found.add(
                [row],
                (all_.blobs[key] for key in versions_of(row) if key in all_.blobs and key[1] in channels),
                (write for write in all_.writes_of(ns, row.id) if write.channel in channels),
            )
            next_, limit = row.parent, limit - 1
        return Part(await self._ledger.watermark(thread_id), found)

    async def rows(self, thread_id: str, blobs: Sequence[BlobKey], writes_of: Sequence[CheckpointKey]) -> Part:
        all_, found = self._threads.get(thread_id, Tables()), Tables()
        found.add(
            blobs=[all_.blobs[key] for key in blobs if key in all_.blobs],
            writes=(w for key, w in all_.writes.items() if key[:2] in writes_of),
        )
        return Part(await self._ledger.watermark(thread_id), found)

    async def page(self, query: Query, after: Cursor | None, limit: int) -> list[tuple[str, Tables]]:
        found = sorted(
            ((row.id, thread_id, row.ns) for thread_id, row in self._matching(query)),
            reverse=True,
        )
        pages = []
        for id_, thread_id, ns in [cursor for cursor in found if after is None or cursor < after][:limit]:
            all_, tables = self._threads[thread_id], Tables()
            _add(tables, all_, all_.checkpoints[ns, id_])
            pages.append((thread_id, tables))
        return pages

    async def outlines(self, thread_id: str) -> list[Outline]:
        tables = self._threads.get(thread_id, Tables())
        sending = {key[:2] for key, write in tables.writes.items() if write.channel == TASKS}
        return [
            outline_of(row, tables.blobs.keys(), parent_sends=(row.ns, row.parent) in sending)
            for row in tables.checkpoints.values()
        ]

    async def now(self) -> datetime:
        return datetime.now(UTC)

    async def idle(self, before: str) -> list[str]:
        last = {t: max((outline.ts for outline in await self.outlines(t)), default="") for t in self._threads}
        return sorted(thread_id for thread_id, ts in last.items() if "" < ts < before)

    async def of_runs(self, run_ids: Sequence[str]) -> list[tuple[str, str, str]]:
        return [
            (thread_id, row.ns, row.id)
            for thread_id, row in self._matching(Query())
            if json.loads(row.metadata).get("run_id") in run_ids
        ]

    def _matching(self, query: Query) -> Iterator[tuple[str, CheckpointRow]]:
        wanted = json.loads(query.metadata) if query.metadata is not None else None
        for thread_id, tables in self._threads.items():
            for row in tables.checkpoints.values():
                if (
                    query.thread_id in (None, thread_id)
                    and query.ns in (None, row.ns)
                    and query.checkpoint_id in (None, row.id)
                    and (query.before is None or row.id < query.before)
                    and (wanted is None or _contains(json.loads(row.metadata), wanted))
                ):
                    yield thread_id, row


def _add(found: Tables, all_: Tables, row: CheckpointRow) -> None:
    found.add(
        [row],
        (all_.blobs[key] for key in versions_of(row) if key in all_.blobs),
        all_.writes_of(row.ns, row.id),
    )
    if takes_sends(row) and row.parent is not None:
        found.add(writes=(w for w in all_.writes_of(row.ns, row.parent) if w.channel == TASKS))


def _contains(value: Any, wanted: Any) -> bool:
    """Whether `value` contains `wanted` as a jsonb contains another one."""
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(k in value and _contains(value[k], w) for k, w in wanted.items())
    if isinstance(wanted, list):
        return isinstance(value, list) and all(_any_contains(value, w) for w in wanted)
    return bool(value == wanted and isinstance(value, bool) is isinstance(wanted, bool))


def _any_contains(values: Iterable[Any], wanted: Any) -> bool:
    return any(_contains(value, wanted) for value in values)
