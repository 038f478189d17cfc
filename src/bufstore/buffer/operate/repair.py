"""The repair for a log and a Postgres that no longer agree: saves what the log has, begins a new generation.

Theory of operation. However the two came apart (the log lost its end, is gone, or is an older copy; Postgres is an
older copy, or went back further than the log reaches), the repair is the same. The stream is taken out of service. Its
entries that Postgres lacks are applied if they fit and parked if not (`bufstore.buffer.operate.salvage`), in one
transaction per thread, after the thread's waiting entries. Then the epoch in Postgres goes up and the stream is
removed. The next start creates the new generation, whose positions are above everything that any process or watermark
remembers. A repair takes the partitions as a flusher does, and each of its steps succeeds only while nobody else has
taken them: of two repairs, the one that began first ends with an error.

Rule: nothing of the stream is removed before all of it is in Postgres. Every step may be repeated, so an interrupted
repair is run again.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

import msgspec

from bufstore.buffer.chain import Plan, Watermark, plan
from bufstore.buffer.domain import Inapplicable
from bufstore.buffer.entry import Item, Malformed, entry_id, id_of, items_of
from bufstore.buffer.flush.lease import living
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.operate.salvage import known_up_to, plan_salvage
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import Cursor, Decision, FlushFailed, NotOwner, need_all
from bufstore.buffer.read.with_waiting import watermark_with_waiting
from bufstore.errors import ConfigError, StoreMisconfigured, StoreUnavailable
from bufstore.jetstream.messages import StoredMessage

_CHUNK = 500
_CHUNK_BYTES = 16 << 20
#: Threads are divided into this many slices; a share of as many slices as fit into memory is salvaged at a time.
_SLICES = 1 << 10
_SHARE_BYTES = 128 << 20
#: How many bytes of memory an entry takes in addition to its body.
_ENTRY_BYTES = 500
_OWNER = "repair"


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """What a repair would do, or has done."""

    #: Why log and Postgres do not agree; None: they do, and there is nothing to repair.
    reason: str | None
    #: False: nothing was changed; the numbers say what a repair would do.
    done: bool = False
    #: How many threads have entries above what log and Postgres certainly have in common.
    threads: int = 0
    #: How many of the log's entries Postgres lacks and accepts.
    applied: int = 0
    #: How many of the log's entries fit nowhere, or may be applied already: they go to quarantine.
    parked: int = 0
    #: The epoch of the generation that the next start creates; None if there is nothing to repair.
    epoch: int | None = None
    #: The position from which on the log, which is to be archived (`LogConfig.archive`), is not; None: all of it is.
    unarchived_from: int | None = None


#: Deals with a thread's entries (None: entries of no thread), given what log and Postgres have in common, and the
#: positions whose entries are in quarantine.
_Settle = Callable[[str | None, Sequence[Item], int, set[int]], Awaitable[None]]
#: Decides which entries take effect on a watermark and which are parked, given the ids that the store refuses, with
#: the causes.
_Planning = Callable[[Watermark, Sequence[Item], Mapping[int, str]], Plan]


class Repair:
    """One look at a log, and one repair of it."""

    def __init__(self, parts: AnyParts, reason: str | None) -> None:
        """`reason`: why log and Postgres do not fit together."""
        self._log, self._shared, self._ledger = parts.log, parts.shared, parts.ledger
        self._coalesce = parts.domain.coalesce
        self._subjects = parts.subjects
        self._reason = reason
        self._threads = 0
        self._applied = 0
        self._parked = 0
        #: The cursors of the partitions as this repair took them.
        self._held: Sequence[Cursor] = ()

    async def look(self) -> Repaired:
        """Return what a repair would do; change nothing. Raises Unavailable errors."""
        if self._reason is None:
            return Repaired(reason=None)
        if await self._log.epoch(checked=False) is not None:
            await self._salvage(self._only_plan, await self._common())
        return await self._report(done=False)

    async def carry_out(self) -> Repaired:
        """Repair. Raises ConfigError while flushers or another repair are alive.

        After an Unavailable error, repair again.
        """
        if self._reason is None:
            return Repaired(reason=None)
        alive = await living(self._shared)
        if alive:
            raise ConfigError(
                f"{len(alive)} instances still flush, or were killed some seconds ago: stop all of them, then repair"
            )
        # From here on no flusher commits any more, whatever it believes.
        partitions = set(await self._ledger.cursors())
        if await self._log.epoch(checked=False) is not None:  # only an existing log says how many partitions it has
            partitions |= set(range(self._subjects.partitions))
        self._held = await self._ledger.take(sorted(partitions), _OWNER)
        if len(self._held) < len(partitions):
            raise StoreUnavailable(
                "another session holds rows of buffer_partitions: is an instance still flushing? Stop it, then repair"
            )
        if await self._log.epoch(checked=False) is not None:
            common = await self._log.withdraw(await self._common())
            await self._salvage(self._settle, common)
        report = await self._report(done=True)
        assert report.epoch is not None
        await self._check_held()
        await self._ledger.set_epoch(report.epoch)
        # Progress reports may be ahead of a Postgres that went back.
        await self._shared.report({c.partition: c.seq for c in self._held})
        await self._check_held()
        await self._log.remove()
        return report

    async def _check_held(self) -> None:
        """Make sure that nobody else has taken the partitions: otherwise the log may be a new one, with new entries."""
        await self._flush([], lambda _: Decision())

    async def _report(self, *, done: bool) -> Repaired:
        epochs = (await self._log.epoch(checked=False), await self._ledger.epoch())
        return Repaired(
            reason=self._reason,
            done=done,
            threads=self._threads,
            applied=self._applied,
            parked=self._parked,
            epoch=max(e for e in (*epochs, 0) if e is not None) + 1,
            unarchived_from=await self._unarchived_from() if epochs[0] is not None else None,
        )

    async def _unarchived_from(self) -> int | None:
        (first, end), archived = await self._log.bounds(), await self._ledger.archived()
        # A log that need not be archived (`LogConfig.archive`) may be all the same.
        is_archived = self._log.windows.archives or archived
        return max(first, archived) if is_archived and archived <= end else None

    # --- what the log still has -------------------------------------------------------------------------------

    async def _salvage(self, settle: _Settle, common: Sequence[int]) -> None:
        for share in await self._shares(common):
            await self._salvage_share(share, settle, common)

    async def _above(self, common: Sequence[int]) -> AsyncIterator[tuple[int, StoredMessage]]:
        """Yield the entries above what log and Postgres have in common, with their partitions."""
        async for partition, message in self._log.scan(min(common)):
            if message.seq > common[partition]:
                yield partition, message

    async def _shares(self, common: Sequence[int]) -> list[set[int]]:
        """Divide the threads, which are judged whole, into shares of slices. Each share fits into memory."""
        sizes = [0] * _SLICES
        async for _, message in self._above(common):
            sizes[_slice(message.subject)] += _ENTRY_BYTES + len(message.body)
        shares, room = list[set[int]](), 0
        for number, size in enumerate(sizes):
            if not shares or size > room:
                shares.append(set())
                room = _SHARE_BYTES
            shares[-1].add(number)
            room -= size
        return shares

    async def _salvage_share(self, share: set[int], settle: _Settle, common: Sequence[int]) -> None:
        found: dict[str, tuple[int, list[StoredMessage]]] = {}
        async for partition, message in self._above(common):
            if _slice(message.subject) in share:
                found.setdefault(message.subject, (partition, []))[1].append(message)
        threads = {thread_id: s for s in found if (thread_id := self._subjects.thread_of(s)) is not None}
        self._threads += len(threads)
        for some in _chunks(list(threads)):
            watermarks = await self._watermarks(some)
            for thread_id in some:
                partition, messages = found.pop(threads[thread_id])
                watermark = watermarks.get(thread_id, Watermark())
                last = entry_id(messages[-1])  # 0 if it cannot be read; `applied_id` is 0, too, if nothing is applied
                if last and last == watermark.applied_id:
                    continue  # all of the thread is in Postgres
                items = items_of(messages, thread_id)
                await settle(thread_id, items, common[partition], await self._settled(items))
        for partition, messages in found.values():
            items = [Malformed(m.subject, m.seq, (m,), "it belongs to no thread", None) for m in messages]
            await settle(None, items, common[partition], await self._settled(items))

    async def _common(self) -> list[int]:
        """Return for each partition the position up to which the log is certainly the one that Postgres knows."""
        known = [0] * self._subjects.partitions
        for cursor in (await self._ledger.cursors()).values():
            if cursor.id and cursor.partition < len(known):
                message = await self._log.identity(cursor.seq)
                known[cursor.partition] = cursor.seq if message is not None and entry_id(message) == cursor.id else 0
        some: list[tuple[int, str, StoredMessage]] = []
        size = 0
        async for partition, message in self._log.scan():
            thread_id = self._subjects.thread_of(message.subject)
            if thread_id is not None and message.seq > known[partition]:
                some.append((partition, thread_id, message))
                size += len(message.body)
            if len(some) >= _CHUNK or size >= _CHUNK_BYTES:
                await self._raise(known, some)
                some, size = [], 0
        await self._raise(known, some)
        return known

    async def _raise(self, known: list[int], entries: Sequence[tuple[int, str, StoredMessage]]) -> None:
        """Raise the partitions' positions in `known` to their last entries that Postgres has certainly applied."""
        if entries:
            watermarks = await self._watermarks(sorted({thread_id for _, thread_id, _ in entries}))
            for partition, thread_id, message in entries:
                if thread_id in watermarks:
                    up_to = known_up_to(watermarks[thread_id], items_of([message], thread_id))
                    known[partition] = max(known[partition], up_to)

    async def _watermarks(self, threads: Sequence[str]) -> dict[str, Watermark]:
        """Return the watermarks that the threads will have once their waiting entries, safe in Postgres, are flushed.

        Threads that Postgres does not know are left out.
        """
        return {
            thread_id: await self._with_waiting(thread_id) if row.waits_to else row
            for thread_id, (row, _) in (await self._ledger.watermarks(threads)).items()
        }

    async def _with_waiting(self, thread_id: str) -> Watermark:
        return await watermark_with_waiting(self._ledger, self._coalesce, thread_id)

    async def _settled(self, items: Sequence[Item]) -> set[int]:
        """Return the positions whose entries are in quarantine. Raises ConfigError when another entry is there."""
        present = await self._ledger.parked.present([i.seq for i in items])
        for item in items:
            found = await self._ledger.parked.entry(item.seq) if item.seq in present else None
            if found is not None and id_of(found.item) != id_of(item):
                raise ConfigError(
                    f"quarantine holds another entry with position {item.seq}: replay or discard it, then repair"
                )
        return present

    # --- one thread -------------------------------------------------------------------------------------------

    async def _only_plan(self, thread_id: str | None, items: Sequence[Item], common: int, settled: set[int]) -> None:
        watermark = await self._with_waiting(thread_id) if thread_id is not None else Watermark()
        self._count(plan_salvage(watermark, items, common=common, settled=settled))

    async def _settle(self, thread_id: str | None, items: Sequence[Item], common: int, settled: set[int]) -> None:
        """Apply or park the thread's waiting entries, then these items."""
        waiting = await self._ledger.waiting.of_thread(thread_id) if thread_id is not None else []
        if waiting:
            await self._settled(waiting)
            await self._in_parts(thread_id, waiting, _plan_waiting, leave=True)

        among = items

        def salvaging(watermark: Watermark, items: Sequence[Item], poison: Mapping[int, str]) -> Plan:
            return plan_salvage(watermark, items, common=common, settled=settled, poison=poison, among=among)

        await self._in_parts(thread_id, items, salvaging, leave=False)

    async def _in_parts(
        self, thread_id: str | None, items: Sequence[Item], planning: _Planning, *, leave: bool
    ) -> None:
        """Commit the items in one transaction; if the store refuses one, one by one. `leave`: they no longer wait."""
        try:
            await self._commit(thread_id, items, planning, leave=leave, poison={})
        except _Refused:
            for item in items:
                try:
                    await self._commit(thread_id, [item], planning, leave=leave, poison={})
                except _Refused as e:
                    await self._commit(thread_id, [item], planning, leave=leave, poison={id_of(item): str(e)})

    async def _commit(
        self,
        thread_id: str | None,
        items: Sequence[Item],
        planning: _Planning,
        *,
        leave: bool,
        poison: Mapping[int, str],
    ) -> None:
        found: list[Plan] = []
        names = [thread_id] if thread_id is not None else []

        def decide(watermarks: Mapping[str, Watermark]) -> Decision:
            need_all(names, watermarks)
            watermark = watermarks[thread_id] if thread_id is not None else Watermark()
            planned = planning(watermark, items, poison)
            found[:] = [planned]
            if thread_id is None:
                return Decision(parked=planned.park)
            batch = [self._coalesce(thread_id, watermark.version, planned.apply)] if planned.apply else []
            after = msgspec.structs.replace(planned.watermark, gone=batch[0].gone) if batch else planned.watermark
            left = {thread_id: items[-1].seq} if leave else {}
            return Decision(batch=batch, watermarks={thread_id: after}, parked=planned.park, left=left)

        await self._flush(names, decide)
        if not leave:
            self._count(found[0])

    async def _flush(self, names: Sequence[str], decide: Callable[[Mapping[str, Watermark]], Decision]) -> None:
        try:
            await self._ledger.flush(self._held, names, decide)
        except Inapplicable as e:
            raise _Refused(str(e)) from e
        except NotOwner as e:
            raise ConfigError(
                f"another repair or an instance has begun meanwhile ({e}): look at the log again, "
                "and repair only if it is still refused"
            ) from e
        except FlushFailed as e:
            if e.verdict in (Verdict.POISON, Verdict.SUSPECT):
                raise _Refused(str(e)) from e
            if e.verdict.needs_operator:
                raise StoreMisconfigured(str(e)) from e
            raise StoreUnavailable(str(e)) from e

    def _count(self, found: Plan) -> None:
        self._applied += len(found.apply)
        self._parked += len(found.park)


def _plan_waiting(watermark: Watermark, items: Sequence[Item], poison: Mapping[int, str]) -> Plan:
    """Plan the waiting entries as a flush does."""
    return plan(watermark, items, complete=True, poison=poison)


class _Refused(Exception):
    """The store refuses one of the entries, on whatever base."""


def _slice(subject: str) -> int:
    return zlib.crc32(subject.encode()) % _SLICES


def _chunks(threads: Sequence[str]) -> Iterator[Sequence[str]]:
    return (threads[i : i + _CHUNK] for i in range(0, len(threads), _CHUNK))
