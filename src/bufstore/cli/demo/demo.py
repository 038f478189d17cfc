"""`bufstore demo`: agents write, Postgres stops in the middle and comes back, and every message is compared."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click
import msgspec

from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.conversations.comparison import Comparison, Expected, compare
from bufstore.cli.conversations.generated import conversation
from bufstore.cli.conversations.transactions import count_transactions
from bufstore.cli.conversations.writer import ConversationWriter, Written, flush_all
from bufstore.cli.demo.view import Sample, View, new_view
from bufstore.cli.running import EXIT_WRONG, Finite
from bufstore.errors import BufstoreError
from bufstore.tasks import set_within, spawn
from bufstore.threads.buffered import BufferedThreadStore

if TYPE_CHECKING:
    from bufstore.embedded import Servers

_SAMPLE_S = 0.25


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """The options of a demo."""

    seconds: float
    writers: int
    outage: float
    think_s: float
    seed: int


class DemoReport(msgspec.Struct, kw_only=True):
    """The result of the demo; the fields of ``--json``."""

    threads: int
    messages: int
    acknowledged: int
    #: Conversations that could not be written to their end.
    refused: int
    appends_per_s: float
    append_p50_ms: float
    append_p99_ms: float
    #: How long Postgres was away, how many checkpoints were accepted meanwhile, how many Postgres was behind at most,
    #: and how long it then took to catch up (None: there was no outage, or Postgres did not catch up before the end).
    outage_s: float
    accepted_during_outage: int
    lag_max: int
    catch_up_s: float | None
    #: The server's own count; None if the server lost count, which it does when it crashes.
    postgres_transactions: int | None
    checkpoints_per_transaction: float | None
    flushed: int
    quarantined: int
    lost: int
    mismatched: int
    seconds: float
    #: True when every message of every thread was compared, and all is well.
    verified: bool


@click.command()
@click.option("--seconds", type=Finite(min=1), default=15.0, show_default=True, help="How long agents write.")
@click.option(
    "--writers", type=click.IntRange(1, 2000), default=200, show_default=True, help="Agents at the same time."
)
@click.option(
    "--outage",
    type=Finite(min=0),
    default=5.0,
    show_default=True,
    help="Seconds during which Postgres is stopped (embedded servers only).",
)
@click.option(
    "--think-ms",
    type=Finite(min=0),
    default=100.0,
    show_default=True,
    help="How long an agent thinks before a message, on average.",
)
@click.option("--seed", type=int, help="Seed of the generated conversations. Default: a new one each time.")
@connects(embedded_by_default=True)
def demo(options: Options, seconds: float, writers: int, outage: float, think_ms: float, seed: int | None) -> None:
    """Show what the buffer does, on embedded servers unless others are named.

    Many agents hold generated conversations with tools and save a checkpoint after every message. In the middle
    Postgres is stopped for some seconds; the agents do not notice. At the end everything is flushed, Postgres is read
    back without the buffer, and every message of every thread is compared. Exit code 1 if anything is lost, differs,
    or was refused.
    """
    if outage > seconds / 2:
        raise click.UsageError("--outage must be at most half of --seconds.")
    plan = DemoPlan(
        seconds=seconds,
        writers=writers,
        outage=outage,
        think_s=think_ms / 1000,
        seed=seed if seed is not None else secrets.randbits(32),
    )
    report, problems = options.run(lambda target: Demonstration(target, plan, new_view()).run())
    options.answer(report, "What happened", problems=problems, code=0 if report.verified else EXIT_WRONG)
    if not options.as_json:
        click.echo(
            f"Verified: all {report.messages:,} messages of all {report.threads:,} threads are in Postgres, exactly."
        )


@dataclass
class _Outage:
    """What is measured around the outage of Postgres."""

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

    def __init__(self, target: Endpoints, plan: DemoPlan, view: View) -> None:
        self._target = target
        self._plan = plan
        self._view = view
        self._phase = "starting"
        self._indexes = itertools.count()
        self._written: dict[int, Written] = {}
        self._outage = _Outage()

    async def run(self) -> tuple[DemoReport, list[str]]:
        """Run the demo; return the report, and the problems in words."""
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
                comparison = await compare(plain, self._expected())
        report = self._report(writer, comparison, transactions, quarantined, writing_s, time.perf_counter() - began)
        return report, comparison.problems

    async def _watched(self, store: BufferedThreadStore, writer: ConversationWriter) -> float:
        """Write and flush while the view is kept up to date; return how many seconds the writing took."""
        over = asyncio.Event()
        watching = spawn(self._watch(store, writer, over))
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
        """Hold one conversation after the other until the time is up, and finish the last one."""
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
            await set_within(over, _SAMPLE_S)
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
        comparison: Comparison,
        transactions: int,
        quarantined: int,
        writing_s: float,
        seconds: float,
    ) -> DemoReport:
        outage = self._outage
        refused = sum(written.refused is not None for written in self._written.values())
        catch_up = outage.caught_up_at - outage.up_at if outage.caught_up_at and outage.up_at else None
        all_flushed = comparison.flushed == writer.acknowledged
        return DemoReport(
            threads=comparison.threads,
            messages=comparison.compared,
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
            checkpoints_per_transaction=round(comparison.flushed / transactions, 1) if transactions > 0 else None,
            flushed=comparison.flushed,
            quarantined=quarantined,
            lost=comparison.lost,
            mismatched=comparison.mismatched,
            seconds=round(seconds, 1),
            verified=comparison.ok and all_flushed and not refused and not quarantined,
        )
