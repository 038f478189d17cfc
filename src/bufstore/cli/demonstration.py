"""What `demo` does, apart from what is seen of it (`bufstore.cli.view`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from bufstore.cli.connect import Target
from bufstore.cli.conversations import conversation
from bufstore.cli.database import count_transactions
from bufstore.cli.verify import Expected, Verdict, verify
from bufstore.cli.view import Sample, View
from bufstore.cli.writing import ConversationWriter, Written, flush_all
from bufstore.errors import BufstoreError
from bufstore.threads.buffered import BufferedThreadStore

if TYPE_CHECKING:
    from bufstore.embedded import Servers

_SAMPLE_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to show."""

    seconds: float
    writers: int
    outage: float
    think_s: float
    seed: int


class Report(msgspec.Struct, kw_only=True):
    """The end of the demo; the fields of ``--json``."""

    threads: int
    messages: int
    acknowledged: int
    #: Conversations that could not be written to their end.
    refused: int
    appends_per_s: float
    append_p50_ms: float
    append_p99_ms: float
    #: How long Postgres was away, how many checkpoints were accepted meanwhile, how many it was behind at most, and
    #: how long it then took to catch up (None: no outage, or not before the end).
    outage_s: float
    accepted_during_outage: int
    lag_max: int
    catch_up_s: float | None
    #: By the server's count; None if it lost count, which it does when it crashes.
    postgres_transactions: int | None
    checkpoints_per_transaction: float | None
    flushed: int
    quarantined: int
    lost: int
    mismatched: int
    seconds: float
    #: Every message of every thread was compared, and all is well.
    verified: bool


@dataclass
class _Outage:
    """Of Postgres: what is measured around it."""

    down_at: float | None = None
    up_at: float | None = None
    caught_up_at: float | None = None
    accepted: int = 0
    lag_before: int = 0
    lag_max: int = 0

    def see(self, lag: int) -> None:
        self.lag_max = max(self.lag_max, lag)
        if self.down_at is None:
            self.lag_before = max(self.lag_before, lag)
        elif self.up_at is not None and self.caught_up_at is None and lag <= self.lag_before:
            self.caught_up_at = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.up_at - self.down_at if self.up_at is not None and self.down_at is not None else 0.0


class Demonstration:
    """One demo."""

    def __init__(self, target: Target, plan: Plan, view: View) -> None:
        self._target = target
        self._plan = plan
        self._view = view
        self._phase = "starting"
        self._indexes = itertools.count()
        self._written: dict[int, Written] = {}
        self._outage = _Outage()

    async def run(self) -> tuple[Report, list[str]]:
        """The report, and what is wrong, in words."""
        began = time.perf_counter()
        before = await count_transactions(self._target)
        with self._view:
            async with self._target.buffered() as store:
                await flush_all(store)  # what others left in the log is not ours to count
                quarantined = await store.quarantined()
                writer = ConversationWriter(store)
                writing_s = await self._watched(store, writer)
                quarantined = await store.quarantined() - quarantined
            transactions = await count_transactions(self._target) - before
            async with self._target.plain() as plain:
                verdict = await verify(plain, self._expected())
        report = self._report(writer, verdict, transactions, quarantined, writing_s, time.perf_counter() - began)
        return report, verdict.problems

    async def _watched(self, store: BufferedThreadStore, writer: ConversationWriter) -> float:
        """Write and flush while the view is kept up to date; how long the writing took."""
        over = asyncio.Event()
        watching = asyncio.create_task(self._watch(store, writer, over))
        try:
            began = time.perf_counter()
            await self._write(writer)
            writing_s = time.perf_counter() - began
            self._phase = "flushing the rest"
            await flush_all(store)
        finally:
            over.set()
            await watching
        return writing_s

    async def _write(self, writer: ConversationWriter) -> None:
        self._phase = "agents write"
        until = asyncio.get_running_loop().time() + self._plan.seconds
        async with asyncio.TaskGroup() as group:
            if self._target.servers is not None and self._plan.outage:
                group.create_task(self._stop_postgres(self._target.servers, writer))
            for number in range(self._plan.writers):
                group.create_task(self._agent(number, writer, until))

    async def _agent(self, number: int, writer: ConversationWriter, until: float) -> None:
        """Hold one conversation after the other; the last one is finished."""
        loop = asyncio.get_running_loop()
        rng = random.Random(f"{self._plan.seed}/agent/{number}")  # noqa: S311 - nothing secret

        async def think() -> None:
            await asyncio.sleep(rng.expovariate(1 / self._plan.think_s) if self._plan.think_s else 0)

        while loop.time() < until:
            index = next(self._indexes)
            thread_id, messages = conversation(self._plan.seed, index)
            self._written[index] = await writer.write(thread_id, messages, think=think)

    async def _stop_postgres(self, servers: Servers, writer: ConversationWriter) -> None:
        outage = self._outage
        await asyncio.sleep((self._plan.seconds - self._plan.outage) * 0.4)
        self._phase = "Postgres stops"
        await asyncio.to_thread(servers.postgres.stop)
        outage.down_at, accepted = time.perf_counter(), writer.acknowledged
        self._phase = "Postgres is down"
        await asyncio.sleep(self._plan.outage)
        outage.accepted = writer.acknowledged - accepted
        outage.up_at = time.perf_counter()
        self._phase = "Postgres starts"
        await asyncio.to_thread(servers.postgres.start)
        self._phase = "agents write"

    async def _watch(self, store: BufferedThreadStore, writer: ConversationWriter, over: asyncio.Event) -> None:
        began = last_at = time.perf_counter()
        last = 0
        start = (await store.statistics()).flusher
        entries, transactions = start.entries, start.transactions
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SAMPLE_S):
                    await over.wait()
            with contextlib.suppress(BufstoreError):
                state = (await store.statistics()).flusher
                now, flushed, commits = time.perf_counter(), state.entries - entries, state.transactions - transactions
                sample = Sample(
                    elapsed_s=now - began,
                    phase=self._phase,
                    acknowledged=writer.acknowledged,
                    appends_per_s=(writer.acknowledged - last) / (now - last_at),
                    lag=max(0, writer.acknowledged - flushed),
                    transactions=commits,
                    coalescing=flushed / commits if commits else 0.0,
                    p50_ms=writer.latencies.percentile_ms(50),
                    p99_ms=writer.latencies.percentile_ms(99),
                )
                last, last_at = writer.acknowledged, now
                self._outage.see(sample.lag)
                self._view.update(sample)

    async def _expected(self) -> AsyncIterator[Expected]:
        for index, written in self._written.items():
            thread_id, messages = conversation(self._plan.seed, index)
            yield Expected(thread_id, messages, written.acknowledged, written.thread_seq)

    def _report(
        self,
        writer: ConversationWriter,
        verdict: Verdict,
        transactions: int,
        quarantined: int,
        writing_s: float,
        seconds: float,
    ) -> Report:
        outage = self._outage
        refused = sum(written.refused is not None for written in self._written.values())
        catch_up = outage.caught_up_at - outage.up_at if outage.caught_up_at and outage.up_at else None
        all_flushed = verdict.flushed == writer.acknowledged
        return Report(
            threads=verdict.threads,
            messages=verdict.compared,
            acknowledged=writer.acknowledged,
            refused=refused,
            appends_per_s=round(writer.acknowledged / writing_s, 1),
            append_p50_ms=writer.latencies.percentile_ms(50),
            append_p99_ms=writer.latencies.percentile_ms(99),
            outage_s=round(outage.seconds, 2),
            accepted_during_outage=outage.accepted,
            lag_max=outage.lag_max,
            catch_up_s=round(catch_up, 2) if catch_up is not None else None,
            postgres_transactions=transactions if transactions > 0 else None,
            checkpoints_per_transaction=round(verdict.flushed / transactions, 1) if transactions > 0 else None,
            flushed=verdict.flushed,
            quarantined=quarantined,
            lost=verdict.lost,
            mismatched=verdict.mismatched,
            seconds=round(seconds, 1),
            verified=verdict.ok and all_flushed and not refused and not quarantined,
        )
