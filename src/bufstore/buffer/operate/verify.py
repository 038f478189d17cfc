"""The self-check: log, shared state and Postgres against each other, on a live system, in bounded memory.

Whatever moves during a look is looked at again; only what stays wrong is a finding. Within one look, values that only
grow are read in an order in which being late does no harm: the cursor before what waits, this before the watermarks,
these before the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Versions
from bufstore.buffer.entry import assemble, entry_id
from bufstore.buffer.operate.audit import Finding, ThreadFacts, Verification, thread_findings
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import Cursor
from bufstore.errors import MalformedEntry

_CHUNK = 500
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
        """Look at everything. Raises LogUnavailable, StoreUnavailable."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(self._partition(p) for p in range(self._subjects.partitions)))
        for partition in range(self._subjects.partitions):
            await self._threads_of(partition)
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
        term = (await self._ledger.cursors()).get(partition, Cursor(partition, 0, 0, 0)).term
        acked = await self._log.acked(partition, term)
        cursor = (await self._ledger.cursors()).get(partition, Cursor(partition, 0, 0, 0))
        end = await self._log.end(_TIMEOUT_S)
        if acked is not None and acked > cursor.seq and await self._holds(partition, cursor.seq, acked):
            found.append(("ack <= cursor", f"acknowledged up to {acked}, the cursor stands at {cursor.seq}"))
        if told > cursor.seq:
            found.append(("progress <= cursor", f"told to be flushed up to {told}, the cursor stands at {cursor.seq}"))
        if cursor.seq > end:
            found.append(("cursor <= log", f"the cursor stands at {cursor.seq}, the log ends at {end}"))
        elif cursor.id and cursor.seq >= self._log.generation_start:
            message = await self._log.identity(cursor.seq)
            if message is None or entry_id(message) != cursor.id:
                found.append(("cursor entry", f"position {cursor.seq} does not hold the entry at the cursor"))
        return found

    async def _holds(self, partition: int, above: int, up_to: int) -> bool:
        """Whether the partition has a message there: the server moves a floor past messages of other partitions."""
        first = await self._log.after(self._subjects.of_partition(partition), above, _TIMEOUT_S, limit=1)
        return bool(first) and first[0].seq <= up_to

    # --- threads ----------------------------------------------------------------------------------------------

    async def _threads_of(self, partition: int) -> None:
        offset = 0
        while subjects := await self._log.subjects(self._subjects.of_partition(partition), offset):
            offset += len(subjects)
            for i in range(0, len(subjects), _CHUNK):
                threads = [t for s in subjects[i : i + _CHUNK] if (t := self._thread_of(s)) is not None]
                await self._chunk(partition, threads)

    async def _threads_that_wait(self) -> None:
        """Those of which the log has nothing any more; the others were looked at."""
        after = ""
        while found := await self._ledger.waiting.threads(after, _CHUNK):
            after = found[-1]
            last = await self._log.last([self._subjects.of(t) for t in found], _TIMEOUT_S)
            for thread_id in found:
                if self._subjects.of(thread_id) not in last:
                    await self._chunk(self._subjects.partition(thread_id), [thread_id])

    def _thread_of(self, subject: str) -> str | None:
        try:
            return self._subjects.thread_id(subject)
        except MalformedEntry:
            return None  # of no thread: its entries are parked one by one

    async def _chunk(self, partition: int, threads: Sequence[str]) -> None:
        facts = await self._facts(partition, threads)
        self._threads += len(facts)
        for f in facts:
            unflushed = {item.seq for item in (*f.waiting, *f.tail) if item.seq > f.watermark.flushed_seq}
            self._unflushed_threads += bool(unflushed)
            self._unflushed_entries += len(unflushed)
            if not thread_findings(f):
                continue
            thread_id = f.thread_id

            async def look(thread_id: str = thread_id) -> list[tuple[str, str]]:
                again = await self._facts(partition, [thread_id])
                return thread_findings(again[0]) if again else []

            self._find(partition, await _lasting(look), thread_id)

    async def _facts(self, partition: int, threads: Sequence[str]) -> list[ThreadFacts]:
        if not threads:
            return []
        cursor = (await self._ledger.cursors()).get(partition, Cursor(partition, 0, 0, 0)).seq
        watermarks = await self._ledger.watermarks(threads)
        waiting = {t: await self._ledger.waiting.of_thread(t) for t, (w, _) in watermarks.items() if w.waits_to}
        if waiting:
            watermarks = await self._ledger.watermarks(threads)
        versions = await self._versions(threads) if self._versions is not None else {}
        last = await self._log.last([self._subjects.of(t) for t in threads], _TIMEOUT_S)
        parked = await self._ledger.parked.present([m.seq for m in last.values()])
        facts = []
        for thread_id in threads:
            message = last.get(self._subjects.of(thread_id))
            if message is None and not waiting.get(thread_id):
                continue  # purged since
            watermark, given_up = watermarks.get(thread_id, (Watermark(), 0))
            messages = []
            if message is not None and message.seq > watermark.flushed_seq:
                messages = await self._log.after(message.subject, watermark.flushed_seq, _TIMEOUT_S)
            facts.append(
                ThreadFacts(
                    thread_id=thread_id,
                    watermark=watermark,
                    given_up=given_up,
                    last=message,
                    tail=assemble(messages, thread_id),
                    waiting=waiting.get(thread_id, ()),
                    parked=parked,
                    cursor=cursor,
                    versions=versions.get(thread_id),
                )
            )
        return facts


async def _lasting(look: Callable[[], Awaitable[list[tuple[str, str]]]]) -> list[tuple[str, str]]:
    """What `look` finds by the same rule every time that it looks."""
    found = await look()
    for attempt in range(1, _LOOKS):
        if not found:
            break
        await asyncio.sleep(_PAUSE_S * attempt)
        again = await look()
        rules = {rule for rule, _ in found}
        found = [(rule, detail) for rule, detail in again if rule in rules]
    return found
