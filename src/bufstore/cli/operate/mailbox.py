"""`bufstore mailbox`: what waits in a mailbox, one thread of it, and what people may do to it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click
import msgspec

from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.output import lasting, say
from bufstore.cli.running import COUNT, Finite
from bufstore.errors import ConfigError
from bufstore.mailbox.counters import MailboxGauges
from bufstore.mailbox.model import Dispatch, Status
from bufstore.mailbox.nats import find_mailbox
from bufstore.mailbox.postgres import PostgresMailboxStore
from bufstore.mailbox.store import MailboxStore

_NAME = click.argument("name", default="")


class MailboxStatus(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore mailbox status --json``."""

    gauges: MailboxGauges
    #: How many dispatches have each status; None: not asked for.
    counts: dict[str, int] | None


class MailboxList(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore mailbox list --json``: the one that is asked for; the other is None."""

    #: Threads with something queued.
    threads: list[str] | None = None
    #: The dispatches of one thread.
    dispatches: list[Dispatch] | None = None


class Done(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore mailbox wake --json`` and ``purge``: how many threads or dispatches."""

    count: int


@asynccontextmanager
async def _opened(target: Endpoints, name: str) -> AsyncIterator[MailboxStore]:
    """Open the mailbox with its own settings: on NATS if it has a name. Raises ConfigError, LogUnavailable."""
    if not name and not target.postgres:
        raise ConfigError("a mailbox without a name is in Postgres: give --postgres (or BUFSTORE_POSTGRES)")
    if name and not target.nats_named:
        raise ConfigError("a mailbox with a name is on NATS: give --nats (or BUFSTORE_NATS)")
    store: MailboxStore
    if name:
        store = await find_mailbox(target.nats, name)
    elif not await target.has_tables("mailbox", target.schema):
        raise ConfigError(f"there is no mailbox in schema {target.schema!r} of this database")
    else:
        store = PostgresMailboxStore(target.postgres, schema=target.schema, pool_size=1)
    async with store:
        yield store


@click.group("mailbox")
def mailbox() -> None:
    """A mailbox (bufstore.mailbox): what waits in it, and since when.

    NAME is that of its bucket on NATS; without it, the mailbox is in the --schema of Postgres.
    """


@mailbox.command("status")
@_NAME
@click.option("--count", is_flag=True, help="Also count dispatches by status; the cost grows with what is kept.")
@connects(postgres_needed=False, nats_needed=False)
def status(options: Options, name: str, count: bool) -> None:
    """Show what waits, and for how long."""

    async def look(target: Endpoints) -> MailboxStatus:
        async with _opened(target, name) as store:
            counts = {s.value: n for s, n in (await store.count_by_status()).items()} if count else None
            return MailboxStatus(gauges=await store.gauges(), counts=counts)

    options.answer(options.run(look), _show_status)


def _show_status(found: MailboxStatus) -> None:
    g = found.gauges
    click.echo(f"oldest in a queue: {_age(g.oldest_queued_s)}; longest-expired lease: {_age(g.oldest_lease_over_s)}")
    again = f"({g.signals_again} of them redelivered)"
    out = "" if g.signals_out is None else f", held by workers or delayed: {g.signals_out} {again}"
    click.echo(f"signals waiting: {g.signals_waiting}{out}")
    if g.bytes is not None:
        click.echo(f"stored: {g.bytes} bytes of {g.bytes_max}")
    for name, count in (found.counts or {}).items():
        click.echo(f"{name}: {count}")


def _age(seconds: float | None) -> str:
    return "none" if seconds is None else lasting(seconds)


@mailbox.command("list")
@_NAME
@click.option("--thread", metavar="ID", help="The dispatches of this thread. Default: threads with something queued.")
@click.option("--status", "only", type=click.Choice([s.value for s in Status]), multiple=True, help="Only these.")
@click.option("--limit", type=COUNT, default=100, show_default=True)
@connects(postgres_needed=False, nats_needed=False)
def list_(options: Options, name: str, thread: str | None, only: tuple[str, ...], limit: int) -> None:
    """List threads, or the dispatches of one, in the order of claims."""
    if only and thread is None:
        raise click.UsageError("--status is for the dispatches of a thread: give --thread, too.")

    async def look(target: Endpoints) -> MailboxList:
        async with _opened(target, name) as store:
            if thread is None:
                return MailboxList(threads=await store.queued_thread_ids(limit=limit))
            statuses = {Status(s) for s in only} or None
            return MailboxList(dispatches=await store.list_dispatches(thread, statuses, limit=limit))

    options.answer(options.run(look), _show_list)


def _show_list(found: MailboxList) -> None:
    for thread_id in found.threads or ():
        say(thread_id)
    for each in found.dispatches or ():
        holder = f", {each.claimed_by!r} since {_when(each.claimed_at_ms)}" if each.claimed_by else ""
        error = f", {each.last_error}" if each.last_error else ""
        say(
            f"{each.dispatch_id}  {each.status.value}{holder}, since {_when(each.created_at_ms)}, "
            f"attempt {each.attempts + 1} of {each.max_attempts}{error}"
        )


def _when(ms: int | None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime((ms or 0) / 1000))


@mailbox.command("wake")
@_NAME
@click.option("--thread", "threads", metavar="ID", multiple=True, help="These threads. Default: some that have work.")
@click.option("--limit", type=COUNT, default=100, show_default=True)
@connects(postgres_needed=False, nats_needed=False)
def wake(options: Options, name: str, threads: tuple[str, ...], limit: int) -> None:
    """Signal threads, so that a worker looks at them. A needless signal does no harm."""

    async def signal(target: Endpoints) -> Done:
        async with _opened(target, name) as store:
            wanted = threads or await store.queued_thread_ids(limit=limit)
            for thread_id in wanted:
                await store.wake(thread_id)
            return Done(count=len(wanted))

    options.answer(options.run(signal), lambda done: click.echo(f"{done.count} threads signalled"))


@mailbox.command("purge")
@_NAME
@click.option(
    "--older-than",
    type=Finite(min=0),
    metavar="SECONDS",
    required=True,
    help="Remove dispatches that finished at least this long ago.",
)
@connects(postgres_needed=False, nats_needed=False)
def purge(options: Options, name: str, older_than: float) -> None:
    """Remove finished dispatches, the oldest first."""

    async def remove(target: Endpoints) -> Done:
        async with _opened(target, name) as store:
            before, count = max(0, store.backend.now_ms() - round(1000 * older_than)), 0
            while part := await store.purge_finished(before):
                count += part
            return Done(count=count)

    options.answer(options.run(remove), lambda done: click.echo(f"{done.count} dispatches removed"))
