"""The self-check: compares log, shared state and Postgres on a live system, in bounded memory.

Whatever seems wrong may have moved during the look, so it is looked at again; only what stays wrong is a finding.
Within one look, values that only grow are read in an order in which being late does no harm: the cursor before the
waiting entries, these before the watermarks, and the watermarks before the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Versions
from bufstore.buffer.entry import entry_id, items_of
from bufstore.buffer.operate.audit import Finding, ThreadFacts, Verification, thread_findings
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import Cursor
from bufstore.buffer.ports.log import Floor
from bufstore.jetstream.messages import StoredMessage

_CHUNK = 500
_CHUNK_ENTRIES = 5000
#: For this many threads, the check remembers where their watermarks must turn up; for further ones it asks at once.
_EXPECTED_MAX = 100_000
_FINDINGS_MAX = 100
_LOOKS = 4
_PAUSE_S = 0.1
_TIMEOUT_S = 30.0


class Verifier:
    """One self-check."""

    def __init__(self, parts: AnyParts, versions: Versions | None = None) -> None:
        self._log, self._shared = parts.log, parts.shared
        self._ledger, self._subjects = parts.ledger, parts.subjects
        self._versions = versions
        self._findings: list[Finding] = []
        self._wrong = 0
        self._threads = 0
        self._unflushed_threads = 0
        self._unflushed_entries = 0

    async def run(self) -> Verification:
        """Check everything. Raises LogUnavailable, StoreUnavailable."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(self._partition(p) for p in range(self._subjects.partitions)))
        await self._threads_of_log()
        await self._threads_that_wait()
        return Verification(
            partitions=self._subjects.partitions,
            threads=self._threads,
            unflushed_threads=self._unflushed_threads,
            unflushed_entries=self._unflushed_entries,
            waiting=(await self._ledger.waiting.totals()).entries,
            quarantined=await self._ledger.quarantined(),
            members=sorted(await self._shared.members()),
            wrong=self._wrong,
            findings=tuple(self._findings),
            seconds=round(loop.time() - began, 3),
        )

    def _find(self, partition: int, found: Sequence[tuple[str, str]], thread_id: str | None = None) -> None:
        self._wrong += len(found)
        for rule, detail in found[: max(0, _FINDINGS_MAX - len(self._findings))]:
            self._findings.append(Finding(rule=rule, detail=detail, partition=partition, thread_id=thread_id))

    # --- partitions -------------------------------------------------------------------------------------------

    async def _partition(self, partition: int) -> None:
        async def look() -> list[tuple[str, str]]:
            return await self._partition_findings(partition)

        self._find(partition, await _lasting(look))

    async def _partition_findings(self, partition: int) -> list[tuple[str, str]]:
        found = []
        told = (await self._shared.progress()).get(partition, 0)
        settled = (await self._shared.floors()).get(partition, Floor(0, 0)).settled
        if settled < self._log.generation_start:
            settled = 0  # reported before a repair
        erased = await self._log.erased()
        cursor = (await self._ledger.cursors()).get(partition, Cursor(partition, 0, 0, 0))
        end = await self._log.end(_TIMEOUT_S)
        for rule, what, seq in (
            ("progress <= cursor", "reported as flushed", told),
            ("settled <= cursor", "reported as settled", settled),
            ("erased <= cursor", "erased", erased),
        ):
            if seq > cursor.seq and (what != "reported as settled" or await self._holds(partition, cursor.seq, seq)):
                found.append((rule, f"{what} up to {seq}, the cursor stands at {cursor.seq}"))
        if cursor.seq > end:
            found.append(("cursor <= log", f"the cursor stands at {cursor.seq}, the log ends at {end}"))
        elif cursor.id and cursor.seq >= self._log.generation_start:
            message = await self._log.identity(cursor.seq)
            if message is None or entry_id(message) != cursor.id:
                found.append(("cursor entry", f"position {cursor.seq} does not hold the entry at the cursor"))
        return found

    async def _holds(self, partition: int, above: int, below: int) -> bool:
        """Return whether the partition has an entry between the two positions; if not, everything there is settled."""
        async for _, message in self._log.scan(above, partitions=[partition]):
            return message.seq < below
        return False

    # --- threads ----------------------------------------------------------------------------------------------

    async def _threads_of_log(self) -> None:
        """Read the log once, and check each thread at its last entry.

        For a thread with entries above the log's floor, the place of the last entry is known beforehand. Below the
        floor everything is flushed, so the last entry of a thread is the one at its watermark, and must turn up.
        """
        await self._log.partition_ends()  # so that the last entries are known
        end = await self._log.end(_TIMEOUT_S)
        #: The watermarks' positions of threads below the floor whose entries there have not turned up yet.
        expected: dict[str, int] = {}
        async for seen in self._chunks(end):
            for thread_id in seen:
                expected.pop(thread_id, None)
            for f in await self._facts(seen):
                if f.above_floor or f.last is None or f.watermark.flushed_seq <= f.last.seq:
                    await self._judge(f)
                elif len(expected) < _EXPECTED_MAX:
                    expected[f.thread_id] = f.watermark.flushed_seq
                else:
                    await self._expect(f.thread_id)
        for thread_id in expected:
            await self._expect(thread_id)

    async def _chunks(self, end: int) -> AsyncIterator[dict[str, StoredMessage]]:
        """Yield the threads of the log's entries up to a position, some at a time, each with its last entry so far."""
        seen: dict[str, StoredMessage] = {}
        entries = 0
        async for _, message in self._log.scan(last_up_to=end):
            if message.seq > end:
                break
            thread_id = self._subjects.thread_of(message.subject)
            if thread_id is None:
                continue  # the message is of no thread, and is parked alone
            seen[thread_id] = message
            entries += 1
            if len(seen) >= _CHUNK or entries >= _CHUNK_ENTRIES:
                yield seen
                seen, entries = {}, 0
        if seen:
            yield seen

    async def _threads_that_wait(self) -> None:
        """Check the waiting threads of which the log has nothing left; the others were checked with the log."""
        after = ""
        while found := await self._ledger.waiting.threads(after, _CHUNK):
            after = found[-1]
            last = await self._log.last([self._subjects.of(t) for t in found])
            for thread_id in found:
                if self._subjects.of(thread_id) not in last and not await self._stands(thread_id):
                    for f in await self._facts({thread_id: None}):
                        await self._judge(f)

    async def _stands(self, thread_id: str) -> bool:
        """Return whether the thread's last waiting entry is in the log; True if no entry waits any more."""
        items = await self._ledger.waiting.of_thread(thread_id)
        return not items or await self._log.identity(items[-1].seq) is not None

    async def _judge(self, f: ThreadFacts) -> None:
        self._threads += 1
        if thread_findings(f):
            f = await self._again(f)
        unflushed = {item.seq for item in (*f.waiting, *f.tail) if item.seq > f.watermark.flushed_seq}
        self._unflushed_threads += bool(unflushed)
        self._unflushed_entries += len(unflushed)
        if not thread_findings(f):
            return

        async def look() -> list[tuple[str, str]]:
            return thread_findings(await self._again(f))

        self._find(self._subjects.partition(f.thread_id), await _lasting(look), f.thread_id)

    async def _again(self, f: ThreadFacts) -> ThreadFacts:
        """Read the thread's facts anew: meanwhile the log may have purged its last entry, and Postgres forgotten it."""
        last = f.last if f.last is not None and await self._log.identity(f.last.seq) is not None else None
        return (await self._facts({f.thread_id: last}))[0]

    async def _expect(self, thread_id: str) -> None:
        """Check that the thread's watermark stands at one of its entries, unless that entry has left the log since."""
        subject = self._subjects.of(thread_id)

        async def look() -> list[tuple[str, str]]:
            watermark, _ = (await self._ledger.watermarks([thread_id])).get(thread_id, (Watermark(), 0))
            at = watermark.flushed_seq
            message = await self._log.identity(at)
            first, _ = await self._log.bounds()
            if (message is not None and message.subject == subject) or at < max(first, await self._log.erased()):
                return []
            return [("watermark <= log", f"flushed up to {at}, where the log has no entry of the thread")]

        self._threads += 1
        self._find(self._subjects.partition(thread_id), await _lasting(look), thread_id)

    async def _facts(self, seen: Mapping[str, StoredMessage | None]) -> list[ThreadFacts]:
        """Read all facts of these threads. `seen`: an entry for each thread that has nothing above the log's floor."""
        if not seen:
            return []
        cursors = await self._ledger.cursors()
        watermarks = await self._ledger.watermarks(list(seen))
        waiting = {t: await self._ledger.waiting.of_thread(t) for t, (w, _) in watermarks.items() if w.waits_to}
        if waiting:
            watermarks = await self._ledger.watermarks(list(seen))
        versions = await self._versions(list(seen)) if self._versions is not None else {}
        last = await self._log.last([self._subjects.of(t) for t in seen])
        parked = await self._ledger.parked.present([m.seq for m in (*last.values(), *seen.values()) if m is not None])
        facts = []
        for thread_id, at in seen.items():
            known = last.get(self._subjects.of(thread_id))
            message = known or at
            watermark, given_up = watermarks.get(thread_id, (Watermark(), 0))
            tail = [at] if known is None and at is not None and at.seq > watermark.flushed_seq else []
            if known is not None and known.seq > watermark.flushed_seq:
                tail = await self._log.after(known.subject, watermark.flushed_seq)
            partition = self._subjects.partition(thread_id)
            facts.append(
                ThreadFacts(
                    thread_id=thread_id,
                    watermark=watermark,
                    given_up=given_up,
                    last=message,
                    above_floor=known is not None,
                    tail=items_of(tail, thread_id),
                    waiting=waiting.get(thread_id, ()),
                    parked=parked,
                    cursor=cursors.get(partition, Cursor(partition, 0, 0, 0)).seq,
                    versions=versions.get(thread_id),
                )
            )
        return facts


async def _lasting(look: Callable[[], Awaitable[list[tuple[str, str]]]]) -> list[tuple[str, str]]:
    """Return what `look` finds by the same rule each time, of several times."""
    found = await look()
    for attempt in range(1, _LOOKS):
        if not found:
            break
        await asyncio.sleep(_PAUSE_S * attempt)
        again = await look()
        rules = {rule for rule, _ in found}
        found = [(rule, detail) for rule, detail in again if rule in rules]
    return found
