"""`bufstore import`: conversations from a file, one checkpoint after every message, then a comparison of all of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import closing

import click
import msgspec
from rich.console import Console
from rich.status import Status
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.conversations.comparison import Comparison, Expected, compare
from bufstore.cli.conversations.concurrency import MemoryBudget, each, read_ahead
from bufstore.cli.conversations.transactions import count_transactions
from bufstore.cli.conversations.writer import ConversationWriter, flush_all
from bufstore.cli.importing.journal import Journal
from bufstore.cli.importing.lines import BadLine, Input, Line
from bufstore.cli.running import EXIT_WRONG, Failure
from bufstore.errors import FlushTimeout, StoreUnavailable
from bufstore.log_lines import LogLines
from bufstore.printable import printable
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.postgres.store import PostgresThreadStore

_log = LogLines(__name__)

_REPORTED = 20
#: How many threads are written at the same time.
_AT_ONCE = 64
#: How many lines, and how many bytes of lines, are in memory at the same time.
_LINES_HELD = 256
_BYTES_HELD = 64 << 20
#: How many threads one statement looks up in Postgres.
_LOOKED_UP = 128
#: How many seconds to wait for a Postgres that is away.
_PATIENCE_S = 60.0


class ImportReport(msgspec.Struct, kw_only=True):
    """What an import did; the fields of ``--json``."""

    #: Threads of which at least one checkpoint was acknowledged.
    threads: int
    #: Checkpoints that were tried.
    checkpoints: int
    #: Checkpoints whose call returned.
    acknowledged: int
    #: Acknowledged checkpoints that Postgres has applied after the last flush, by the threads' watermarks.
    flushed: int
    lost: int
    mismatched: int
    #: Entries that went to quarantine during the import.
    quarantined: int
    bad_lines: int
    #: The server's own count; None if the server lost count, which it does when it crashes.
    postgres_transactions: int | None
    append_p50_ms: float
    append_p99_ms: float
    #: The time from the start to the end of the last flush.
    seconds: float


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True))
@click.option("--overwrite", is_flag=True, help="Replace threads that exist, also earlier ones of the same file.")
@connects()
def import_(options: Options, file: str, overwrite: bool) -> None:
    """Import conversations from FILE ("-": standard input), JSON Lines, gzipped or not.

    Each line is one thread: an object with "thread_id" and "messages", a list of any JSON values; other fields are
    ignored. Every thread is written as an agent would: one checkpoint after every message (a thread without messages:
    one), each of which returns when the log has it durably. Each gives all messages so far, so the time for a thread
    grows with the square of their number. Then everything is flushed, Postgres is read back without the buffer, and
    every message of every acknowledged checkpoint is compared with the input.

    A bad line is reported by its number and skipped. So is one whose thread exists, in the store or earlier in the
    file, unless --overwrite. When a line was skipped, or the input is damaged, the exit code is 1. An import that was
    interrupted leaves a part of some threads: they are reported with the number of their messages; run it again with
    --overwrite.

    "lost" counts acknowledged checkpoints whose message Postgres does not have; "mismatched" counts messages that
    Postgres has and that are not exactly the input's (also any beyond its end); one of either makes the exit code 1.
    "postgres_transactions" is the server's own count for the whole database, from before the store is opened until
    after the last flush. Do not write to the same threads meanwhile.
    """
    with closing(Input(file)) as source:
        report, comparison = options.run(lambda target: _import(target, source, overwrite))
    wrong = report.bad_lines or not comparison.ok
    options.answer(report, "import", problems=comparison.problems, code=EXIT_WRONG if wrong else 0)


async def _import(target: Endpoints, source: Input, overwrite: bool) -> tuple[ImportReport, Comparison]:
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
            comparison = await compare(plain, _expected(source, importer))
    writer = importer.writer
    report = ImportReport(
        threads=comparison.threads,
        checkpoints=writer.tried,
        acknowledged=writer.acknowledged,
        flushed=comparison.flushed,
        lost=comparison.lost,
        mismatched=comparison.mismatched,
        quarantined=quarantined,
        bad_lines=progress.bad_lines,
        postgres_transactions=transactions if transactions > 0 else None,
        append_p50_ms=writer.latencies.percentile_ms(50),
        append_p99_ms=writer.latencies.percentile_ms(99),
        seconds=round(seconds, 3),
    )
    return report, comparison


async def _expected(source: Input, importer: Importer) -> AsyncIterator[Expected]:
    for line in source.read_again():
        if isinstance(line, Line) and (expected := importer.journal.find(line)) is not None:
            yield expected


class _Progress:
    """What an import shows on standard error: the bad lines, and a status line if that is a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
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
        """Show how far the importer is."""
        self._phase, self._importer = "importing", importer

    def say(self, phase: str) -> None:
        """Show what is going on now."""
        self._phase = phase

    def bad_line(self, number: int, reason: str) -> None:
        """Report a line that was not imported."""
        self.bad_lines += 1
        if self.bad_lines <= _REPORTED:
            self._console.print(f"line {number}: {printable(reason)}")


class Importer:
    """Writes the threads of an input. `report` gets each line that is not imported, and why."""

    def __init__(
        self,
        store: BufferedThreadStore,
        plain: PostgresThreadStore,
        *,
        overwrite: bool,
        report: Callable[[int, str], None],
    ) -> None:
        self._store = store
        self._plain = plain
        self._overwrite = overwrite
        self._report = report
        self._memory = MemoryBudget(_LINES_HELD, _BYTES_HELD)
        #: For each thread that is being written, its later lines, in order.
        self._following: dict[str, deque[Line]] = {}
        self.writer = ConversationWriter(store)
        self.journal = Journal()
        self.threads = 0

    async def run(self, lines: Iterable[Line | BadLine]) -> None:
        """Write all threads. Returns when every checkpoint is acknowledged or reported."""
        if not self._overwrite:
            # After this flush, Postgres alone can tell which threads there were before.
            await self._store.force_flush_all()
        await each(self._admitted(lines), self._write, at_once=_AT_ONCE)

    async def _admitted(self, lines: Iterable[Line | BadLine]) -> AsyncIterator[Line]:
        """Yield the lines to write. A line whose thread is being written is not yielded: `_write` writes it next."""
        async for batch in read_ahead(lines, self._memory, lambda line: line.size, _LOOKED_UP):
            taken = await self._taken(batch)
            for line in batch:
                reason = self._why_not(line, taken)
                if isinstance(line, BadLine) or reason:
                    self._report(line.number, reason)
                    await self._memory.give_back(line.size)
                elif line.thread_id in self._following:
                    self._following[line.thread_id].append(line)
                else:
                    self._following[line.thread_id] = deque()
                    yield line

    async def _taken(self, batch: Iterable[Line | BadLine]) -> Mapping[str, int]:
        ids = [line.thread_id for line in batch if isinstance(line, Line)]
        return await _existing(self._plain, ids) if ids and not self._overwrite else {}

    def _why_not(self, line: Line | BadLine, taken: Mapping[str, int]) -> str:
        if isinstance(line, BadLine):
            return line.reason
        first = self.journal.begin(line.thread_id)
        if self._overwrite or (first and line.thread_id not in taken):
            return ""
        where = "is already in an earlier line"
        if first:  # an import that was interrupted leaves a part of some threads
            found, given = taken[line.thread_id], len(line.messages)
            where = "exists" if found == given else f"exists with {found} messages, and the line has {given}"
        return f"thread {line.thread_id!r} {where} (--overwrite replaces it)"

    async def _write(self, line: Line) -> None:
        """Write a line, then the lines that follow on the same thread."""
        following = self._following[line.thread_id]
        while True:
            written = await self.writer.write(line.thread_id, line.messages)
            self.journal.end(line, written)
            self.threads += 1
            if written.refused is not None:
                self._report(line.number, f"refused after {written.acknowledged} checkpoints: {written.refused}")
            _log.info(
                "line %d: thread %r, %d checkpoints acknowledged", line.number, line.thread_id, written.acknowledged,
                extra={"action": "thread_imported"},
            )  # fmt: skip
            await self._memory.give_back(line.size)
            if not following:
                break
            line = following.popleft()
        del self._following[line.thread_id]


async def _existing(store: PostgresThreadStore, thread_ids: Sequence[str]) -> Mapping[str, int]:
    """Return how many messages Postgres has of those of `thread_ids` that it has, by one statement.

    Waits for a while if Postgres is away.
    """
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(StoreUnavailable),
        wait=wait_random_exponential(multiplier=0.1, max=2),
        stop=stop_after_delay(_PATIENCE_S),
        reraise=True,
    )
    return await retrying(store.versions, thread_ids)
