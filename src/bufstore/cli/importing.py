"""`bufstore import`: conversations from a file, one checkpoint after every message, then a comparison of all of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import closing
from typing import NamedTuple

import click
import msgspec
from rich.console import Console
from rich.status import Status

from bufstore.cli.connect import Options, Target, connects
from bufstore.cli.database import count_transactions
from bufstore.cli.importer import Importer
from bufstore.cli.lines import Input, Line
from bufstore.cli.output import show
from bufstore.cli.running import EXIT_WRONG, Failure, run
from bufstore.cli.verify import Expected, Verdict, verify
from bufstore.cli.writing import flush_all
from bufstore.errors import FlushTimeout

_REPORTED = 20


class Report(msgspec.Struct, kw_only=True):
    """What an import did; the fields of ``--json``."""

    #: Threads of which at least one checkpoint was acknowledged.
    threads: int
    #: Checkpoints that were tried.
    checkpoints: int
    #: Checkpoints whose call returned.
    acknowledged: int
    #: Acknowledged checkpoints that the last flush has moved into Postgres, by its watermark.
    flushed: int
    lost: int
    mismatched: int
    #: Entries that went to quarantine meanwhile.
    quarantined: int
    bad_lines: int
    #: By the server's count; None if it lost count, which it does when it crashes.
    postgres_transactions: int | None
    append_p50_ms: float
    append_p99_ms: float
    #: From the start to the end of the last flush.
    seconds: float


class _Outcome(NamedTuple):
    report: Report
    verdict: Verdict
    incomplete: bool


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True))
@click.option("--overwrite", is_flag=True, help="Replace threads that exist, also earlier ones of the same file.")
@connects()
def import_(options: Options, file: str, overwrite: bool) -> None:
    """Import conversations from FILE ("-": standard input), JSON Lines, gzipped or not.

    Each line is one thread: an object with "thread_id" and "messages", a list of any JSON values; other fields are
    ignored. Every thread is written as an agent would: one checkpoint after every message (a thread without messages:
    one), each of which returns when the log has it durably. Then everything is flushed, Postgres is read back without
    the buffer, and every message of every acknowledged checkpoint is compared with the input.

    A bad line is reported by its number and skipped. So is one whose thread exists, in the store or earlier in the
    file, unless --overwrite; then, or when the input is damaged, the exit code is 1.

    "lost" counts acknowledged checkpoints whose message Postgres does not have; "mismatched" counts messages that
    Postgres has and that are not exactly the input's (also any beyond its end); one of either makes the exit code 1.
    "postgres_transactions" is the server's own count for the whole database, from before the store is opened until
    after the last flush. Do not write to the same threads meanwhile.
    """
    with closing(Input(file)) as source, options.target() as target:
        report, verdict, incomplete = run(_import(target, source, overwrite))
    show(report, as_json=options.as_json, title="import")
    for problem in verdict.problems:
        click.echo(problem, err=True)
    if incomplete or not verdict.ok:
        raise click.exceptions.Exit(EXIT_WRONG)


async def _import(target: Target, source: Input, overwrite: bool) -> _Outcome:
    began = time.perf_counter()
    before = await count_transactions(target)
    with _Progress() as progress:
        async with target.plain() as plain, target.buffered() as store:
            quarantined = await store.quarantined()
            importer = Importer(store, plain, overwrite=overwrite, report=progress.bad_line)
            progress.follow(importer)
            await importer.run(source.read())
            progress.say("flushing")
            try:
                await flush_all(store)
            except FlushTimeout as e:
                safe = f"{importer.writer.acknowledged} checkpoints are acknowledged and stay in the log"
                raise Failure(f"{safe}, but Postgres does not accept them: {e}") from None
            seconds = time.perf_counter() - began
            quarantined = await store.quarantined() - quarantined
        # All our sessions are closed now, which makes the server's count complete.
        transactions = await count_transactions(target) - before
        progress.say("comparing")
        async with target.plain() as plain:
            verdict = await verify(plain, _expected(source, importer))
    writer = importer.writer
    report = Report(
        threads=verdict.threads,
        checkpoints=writer.tried,
        acknowledged=writer.acknowledged,
        flushed=verdict.flushed,
        lost=verdict.lost,
        mismatched=verdict.mismatched,
        quarantined=quarantined,
        bad_lines=progress.bad_lines,
        postgres_transactions=transactions if transactions > 0 else None,
        append_p50_ms=writer.latencies.percentile_ms(50),
        append_p99_ms=writer.latencies.percentile_ms(99),
        seconds=round(seconds, 3),
    )
    return _Outcome(report, verdict, importer.incomplete)


async def _expected(source: Input, importer: Importer) -> AsyncIterator[Expected]:
    for line in source.read_again():
        if isinstance(line, Line) and (expected := importer.journal.find(line)) is not None:
            yield expected


class _Progress:
    """What is seen meanwhile, on standard error: the bad lines, and a status line if that is a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        self._status = Status(self, console=self._console)
        self._phase = "starting"
        self._importer: Importer | None = None
        self.bad_lines = 0

    def __enter__(self) -> _Progress:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
        if self.bad_lines > _REPORTED:
            self._console.print(f"... and {self.bad_lines - _REPORTED} more lines that were not imported")

    def __rich__(self) -> str:
        if self._importer is None:
            return self._phase
        return (
            f"{self._phase}: {self._importer.writer.acknowledged:,} checkpoints of {self._importer.threads:,} threads"
        )

    def follow(self, importer: Importer) -> None:
        """Show how far it is."""
        self._phase, self._importer = "importing", importer

    def say(self, phase: str) -> None:
        """Show what is going on now."""
        self._phase = phase

    def bad_line(self, number: int, reason: str) -> None:
        """Report a line that was not imported."""
        self.bad_lines += 1
        if self.bad_lines <= _REPORTED:
            self._console.print(f"line {number}: {reason}")
