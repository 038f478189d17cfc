"""`bufstore spark quarantine`: rows that could not become checkpoints, and what to do with them. Needs no Spark."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import click
import msgspec

from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.output import new_console, new_table, say
from bufstore.cli.running import EXIT_WRONG, POSITION
from bufstore.errors import ConfigError, NotFound
from bufstore.spark.sink.parked_rows import ParkedRow, ParkedRows, RowReplay

_SHOWN = 200


class RowPage(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore spark quarantine list --json``."""

    #: Rows that are set aside, of all threads.
    total: int
    rows: list[ParkedRow]


class RowReplayReport(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore spark quarantine replay --json``."""

    written: int
    #: The rows that stay, and why.
    left: list[RowReplay]


class RowDiscardReport(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore spark quarantine discard --json``."""

    discarded: int
    #: How many rows are not (or no longer) there.
    missing: int


@click.group()
def quarantine() -> None:
    """Rows that a sink with bad_rows="quarantine" has set aside: list, replay or discard them."""


@quarantine.command("list")
@click.option("--thread", metavar="THREAD", help="Only rows of this thread.")
@click.option("--app", metavar="APP_ID", help="Only rows of this sink.")
@click.option("--after", type=POSITION, default=0, metavar="ID", help="Only rows after this one: the next page.")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=100, show_default=True, help="How many at most.")
@connects(nats_needed=False)
def list_(options: Options, thread: str | None, app: str | None, after: int, limit: int) -> None:
    """Show what waits, oldest first."""

    async def look(target: Endpoints) -> RowPage:
        async with _parked(target) as parked:
            found = await parked.page(thread_id=thread, app_id=app, after=after, limit=limit)
            return RowPage(total=await parked.count(), rows=found)

    options.answer(options.run(look), _show_page)


@quarantine.command("replay")
@click.argument("ids", metavar="[ID]…", type=POSITION, nargs=-1)
@click.option("--thread", metavar="THREAD", help="All rows of this thread.")
@click.option("--all", "everything", is_flag=True, help="All rows.")
@click.option("--row", metavar="JSON", help="Write this row in the place of the one ID.")
@connects()
def replay(options: Options, ids: Sequence[int], thread: str | None, everything: bool, row: str | None) -> None:
    """Write rows after what their threads hold now: IDs, those of a THREAD, or --all.

    Each is written once and then removed; safe to do again. A row that is refused stays, with its new cause: correct it
    with --row. Exit code 1 when something stays.
    """
    if [bool(ids), thread is not None, everything].count(True) != 1:
        raise click.UsageError("Replay what? Give IDs, --thread, or --all.")
    if row is not None and len(ids) != 1:
        raise click.UsageError("--row replaces one row: give the ID of that row.")

    async def work(target: Endpoints) -> list[RowReplay]:
        async with _parked(target) as parked:
            if row is not None:
                await parked.correct(ids[0], row)
            threads = [thread] if thread is not None else await parked.threads_of(ids) if ids else [""]
            if not threads:
                raise NotFound("none of these rows is in spark_quarantine")
            done: list[RowReplay] = []
            async with target.buffered(flusher=False, create=False) as store:
                while threads:
                    for thread_id in threads:
                        done += await parked.replay(store, thread_id, ids or None)
                    # The empty id, which stands for a missing one, comes before all others.
                    threads = await parked.threads(threads[-1]) if everything else []
            return done

    done = options.run(work)
    left = [one for one in done if one.refused is not None]
    report = RowReplayReport(written=len(done) - len(left), left=left)
    options.answer(report, _show_replay, code=EXIT_WRONG if left else 0)


@quarantine.command("discard")
@click.argument("ids", metavar="ID…", type=POSITION, nargs=-1, required=True)
@connects(nats_needed=False)
def discard(options: Options, ids: Sequence[int]) -> None:
    """Delete rows for good. Exit code 1 when one of them is not there."""

    async def work(target: Endpoints) -> int:
        async with _parked(target) as parked:
            return await parked.discard(ids)

    count = options.run(work)
    report = RowDiscardReport(discarded=count, missing=len(set(ids)) - count)
    said = f"{count} rows discarded" + (f", {report.missing} not found" if report.missing else "")
    options.answer(report, lambda _: click.echo(said), code=EXIT_WRONG if report.missing else 0)


@asynccontextmanager
async def _parked(target: Endpoints) -> AsyncIterator[ParkedRows]:
    async with ParkedRows(target.postgres, target.schema) as parked:
        if not await parked.there():
            raise ConfigError(f"no Spark sink of this release has written into schema {target.schema!r} yet")
        yield parked


def _show_page(page: RowPage) -> None:
    console = new_console()
    console.print(f"{page.total} rows in spark_quarantine, {len(page.rows)} shown")
    if page.rows:
        rows = [
            (r.id, r.app_id, r.batch_id, r.thread_id, f"{r.parked_at.astimezone():%Y-%m-%d %H:%M:%S}",
             r.row[:_SHOWN], r.cause)
            for r in page.rows
        ]  # fmt: skip
        columns = ("ID", "app id", "batch", "thread", "set aside at", "row", "cause")
        console.print(new_table(columns, rows, right=("ID", "batch")))


def _show_replay(report: RowReplayReport) -> None:
    click.echo(f"{report.written} rows written, {len(report.left)} stay")
    for one in report.left:
        say(f"  {one.id} of thread {one.thread_id or '-'}: {one.refused}")
