"""Restores an archive into Postgres, thread by thread: writes what a flush would have made of its entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import Item
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.lanes import check_layout, layout_of, ledger_schema
from bufstore.buffer.ports.ledger import Decision, FlushFailed, need_all
from bufstore.buffer.target import Target, check_same
from bufstore.config import LogConfig
from bufstore.errors import ConfigError, StoreUnavailable
from bufstore.postgres.connection.migrate import has_schema, has_table
from bufstore.spark.config import Deployment
from bufstore.spark.log_archive.applicable import RestoreCounts, applicable, without_given_up

_TIMEOUT_S = 30.0
#: Verdicts on some of the entries: the others are restored. (A missing right or table concerns all of them.)
_OF_ENTRIES = (Verdict.POISON, Verdict.ISOLATE, Verdict.SUSPECT)
_SECOND = LogConfig(lanes=2, lane=1)


def _first_lane_first(schema: str) -> ConfigError:
    return ConfigError(
        f"the tables of schema {schema} do not say how many lanes the store has: restore the first lane's archive first"
    )


class _RollBack(Exception):
    """Ends the transaction of a dry run."""


class IntoPostgres:
    """Applies entries to one database, and to the ledger of their lane."""

    def __init__(self, deployment: Deployment, log: LogConfig, *, dry_run: bool) -> None:
        """`log`: the settings of the log that the entries are of, whether it exists or not."""
        self._deployment, self._log = deployment, log
        self._dry_run = dry_run
        self._stack = AsyncExitStack()
        #: In a dry run, the watermarks as they would be after the last transaction.
        self._would_be: Mapping[str, Watermark] = {}
        #: Threads of which Postgres refuses an entry for now: nothing behind it is restored.
        self._held = set[str]()

    async def __aenter__(self) -> IntoPostgres:
        self._store, self._ledger = await self._stack.enter_async_context(self._deployment.database(self._log))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def setup(self, epoch: int, named: Target | None) -> None:
        """Make the tables, and note the generation of the log they belong to, and which log, if there is one.

        `named`: the target that the log says it is flushed into. A database that is restored takes that one's place.
        """
        await self._check_lanes()
        await self._store.setup()
        await self._ledger.setup()
        check_layout(self._log, await self._ledger.layout())
        check_same(self._log.stream, named, await self._ledger.target())
        if self._dry_run:
            return
        if named is not None:
            await self._ledger.claim(epoch, named)
        else:
            await self._ledger.set_epoch(epoch)
        # The threads that come back are in this lane of so many: a log that is made later must agree.
        await self._ledger.set_layout(layout_of(self._log))

    async def _check_lanes(self) -> None:
        """Raise ConfigError when the store has other lanes than the archive, as far as Postgres knows.

        The log that would say so may be gone. Each lane's ledger has watermarks of its own, so an entry in the wrong
        one would be applied over what a thread has.
        """
        async with self._store.pool.lend(_TIMEOUT_S) as connection:
            schema = self._store.schema
            if self._log.lane and not await has_table(connection, schema, "buffer_log"):
                raise _first_lane_first(schema)
            if self._log.lanes == 1 and await has_schema(connection, ledger_schema(schema, _SECOND)):
                raise ConfigError(
                    f"the store of schema {schema} has several lanes, and the archive is of a log that has all "
                    "threads, or does not say which lane it is of: restore it into a schema of its own, or into the "
                    "logs (into='log')"
                )
        if self._log.lane:
            async with self._deployment.database(replace(self._log, lane=0)) as (_, ledger):
                noted = await ledger.layout()
            if noted is None:
                raise _first_lane_first(schema)
            check_layout(self._log, noted)

    async def apply(self, threads: Mapping[str, Sequence[Item]]) -> RestoreCounts:
        """Apply entries in one transaction. Returns the counts: threads; entries applied, present, refused, and why."""
        # Before they are divided: what tells that an entry was given up may come to stand in the other half.
        return await self._apply({t: without_given_up(Watermark(), items) for t, items in threads.items()})

    async def _apply(self, given: Mapping[str, Sequence[Item]]) -> RestoreCounts:
        threads = {t: items for t, items in given.items() if t not in self._held}
        held = RestoreCounts(threads=len(given) - len(threads))
        held.refused = sum(len(items) for t, items in given.items() if t in self._held)
        if threads:
            held.add(await self._apply_these(threads))
        return held

    async def _apply_these(self, threads: Mapping[str, Sequence[Item]]) -> RestoreCounts:
        counts = RestoreCounts()
        versions = await self._store.versions(list(threads))

        def decide(rows: Mapping[str, Watermark]) -> Decision:
            nonlocal counts
            need_all(threads, rows)
            decision, counts = decided({**rows, **self._would_be}, versions, threads)
            if self._dry_run:
                known = {t: w for t, w in self._would_be.items() if t in threads}
                self._would_be = {**known, **decision.watermarks}
                raise _RollBack
            return decision

        try:
            await self._ledger.flush([], sorted(threads), decide)
        except _RollBack:
            pass
        except FlushFailed as e:
            if e.verdict not in _OF_ENTRIES:
                raise StoreUnavailable(f"Postgres does not accept the restore now: {e}") from e
            return await self._apply_apart(threads, e)
        return counts

    async def _apply_apart(self, threads: Mapping[str, Sequence[Item]], refusal: FlushFailed) -> RestoreCounts:
        """Apply what Postgres refuses together in halves, down to the entry that it refuses, which is left out.

        So is what stands behind it in its thread, if the refusal may pass: a flush would let the thread wait, and
        another run tries all of it again. The earlier positions go first: of two entries that exclude each other, the
        later one was parked then.
        """
        positions = sorted(item.seq for items in threads.values() for item in items)
        if len(positions) == 1:
            (thread_id,) = threads
            if refusal.verdict is not Verdict.POISON:
                self._held.add(thread_id)
            reason = f"thread {thread_id!r}, position {positions[0]}: Postgres refuses it: {refusal}"
            return RestoreCounts(threads=1, refused=1, reasons=[reason])
        counts, middle = RestoreCounts(), positions[len(positions) // 2]
        for late in (False, True):
            half = {t: [item for item in items if (item.seq >= middle) is late] for t, items in threads.items()}
            counts.add(await self._apply({thread_id: items for thread_id, items in half.items() if items}))
        counts.threads = len(threads)
        return counts


def decided(
    rows: Mapping[str, Watermark], versions: Mapping[str, int], threads: Mapping[str, Sequence[Item]]
) -> tuple[Decision, RestoreCounts]:
    """Return what a restore writes of these entries; `rows` and `versions` are those of Postgres."""
    batch: list[Any] = []
    after: dict[str, Watermark] = {}
    counts = RestoreCounts(threads=len(threads))
    for thread_id, items in threads.items():
        row = rows[thread_id]
        found = applicable(thread_id, row, versions.get(thread_id, 0), items)
        if found.change is not None:
            batch.append(found.change)
            after[thread_id] = found.plan.watermark
        counts.add(
            RestoreCounts(
                applied=len(found.plan.apply),
                present=sum(item.seq <= row.flushed_seq for item in items),
                refused=found.refused,
                reasons=[found.reason] if found.reason else [],
            )
        )
    return Decision(batch=batch, watermarks=after), counts
