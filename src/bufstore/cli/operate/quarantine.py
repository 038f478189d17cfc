"""`bufstore quarantine`: what could not be applied, and what to do with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import click
import msgspec

from bufstore.buffer.entry import Malformed
from bufstore.buffer.operate.quarantine import Quarantine, replaying
from bufstore.buffer.operate.replay import Outcome, ParkedEntry, Replayed
from bufstore.buffer.ports.ledger import ParkedInfo
from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.inspection import inspecting
from bufstore.cli.operate.content import content_of
from bufstore.cli.output import new_console, new_table, say, show_fields
from bufstore.cli.running import COUNT, EXIT_WRONG, POSITION
from bufstore.errors import BufstoreError, NotFound, StoreMisconfigured, StoreUnavailable

_PAGE = 1000
_BYTES_SHOWN = 400
#: The errors that mean that Postgres is away, or that only one thread cannot be locked.
_OF_ONE = (StoreUnavailable, StoreMisconfigured)


class QuarantinePage(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore quarantine list --json``."""

    #: Entries in quarantine, of all threads.
    total: int
    entries: list[ParkedInfo]


class ShownEntry(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore quarantine show --json``."""

    id: int
    thread_id: str | None
    entry_id: int | None = None
    prev_id: int | None = None
    cause: str
    parked_at: datetime
    #: How many of its predecessor's messages the entry keeps, and the messages that follow them; None: undecodable, or
    #: an entry of LangGraph's checkpoints.
    keeps: int | None = None
    messages: list[Any] | None = None
    run: Any = None
    #: What an entry of LangGraph's checkpoints does; None: another entry.
    operation: dict[str, Any] | None = None
    #: The beginning of the bytes that are kept, as text; with --json all of them, in base64.
    body: str | bytes


class ReplayReport(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore quarantine replay --json``."""

    applied: int
    superseded: int
    waits: int
    undecodable: int
    refused: int
    #: The entries that were not applied, and why.
    left: list[Replayed]


class DiscardReport(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore quarantine discard --json``."""

    discarded: int
    #: How many entries are not (or no longer) in quarantine.
    missing: int
    #: The entries that could not be deleted now, and why.
    left: list[Replayed]


@click.group()
def quarantine() -> None:
    """Entries that could not be applied: list, show, replay or discard them.

    An entry's ID is its position in the log.
    """


@quarantine.command("list")
@click.option("--thread", metavar="THREAD", help="Only entries of this thread.")
@click.option("--after", type=POSITION, default=0, metavar="ID", help="Only entries after this one: the next page.")
@click.option("--limit", type=COUNT, default=100, show_default=True, help="How many entries at most.")
@connects()
def list_(options: Options, thread: str | None, after: int, limit: int) -> None:
    """Show what waits, oldest first."""

    async def look(target: Endpoints) -> QuarantinePage:
        async with _quarantine(target) as it:
            return QuarantinePage(
                total=await it.count(), entries=list(await it.page(thread_id=thread, after=after, limit=limit))
            )

    options.answer(options.run(look), _show_page)


@quarantine.command("show")
@click.argument("id_", metavar="ID", type=POSITION)
@connects()
def show_(options: Options, id_: int) -> None:
    """Show one entry, whole."""

    async def look(target: Endpoints) -> ParkedEntry:
        async with _quarantine(target) as it:
            return await it.show(id_)

    options.answer(_shown(options.run(look)), _show_entry)


@quarantine.command("replay")
@click.argument("what", metavar="[ID|THREAD]", required=False)
@click.option("--thread", metavar="THREAD", help="The thread, if its id is a number.")
@click.option("--all", "everything", is_flag=True, help="Replay all threads.")
@connects()
def replay(options: Options, what: str | None, thread: str | None, everything: bool) -> None:
    """Apply parked entries: one ID with what was parked behind it, a THREAD, or --all.

    Skips an entry if its thread has moved on without it, or if nothing tells whether it is applied already; applies the
    rest in the log's order, exactly once. Safe to run beside flushers, and to repeat. Exit code 1 when something stays
    in quarantine.
    """
    if [what is not None, thread is not None, everything].count(True) != 1:
        raise click.UsageError("Replay what? Give an ID, a THREAD, or --all.")
    id_ = POSITION(what) if what is not None and what.isascii() and what.isdecimal() else None
    name = thread if thread is not None else what if id_ is None else None

    async def work(target: Endpoints) -> Sequence[Replayed]:
        async with _quarantine(target, applies=True) as it:
            if id_ is not None:
                entry = await it.show(id_)
                return await replayed(it, entry.thread_id, id_) if entry.thread_id else list(await it.replay(id_))
            if name is not None:
                return await replayed(it, name) or _nothing(name)
            done: list[Replayed] = []
            after = ""
            while threads := await it.threads(after=after):
                for thread_id in threads:
                    done += await replayed(it, thread_id, one_of_many=True)
                after = threads[-1]
            return [*done, *await _nameless(it)]

    done = options.run(work)
    counts = Counter(o.outcome for o in done)
    left = [o for o in done if o.outcome is not Outcome.APPLIED]
    report = ReplayReport(**{o.value: counts[o] for o in Outcome}, left=left)
    options.answer(report, _show_replay, code=EXIT_WRONG if left else 0)


@quarantine.command("discard")
@click.argument("ids", metavar="ID…", type=POSITION, nargs=-1, required=True)
@connects()
def discard(options: Options, ids: Sequence[int]) -> None:
    """Delete entries for good. A thread with no entry left in quarantine continues from what Postgres holds.

    Exit code 1 when one of them is not in quarantine, or stays there.
    """

    async def work(target: Endpoints) -> DiscardReport:
        async with _quarantine(target) as it:
            wanted, count, left = dict.fromkeys(ids), 0, list[Replayed]()
            for id_ in wanted:
                try:
                    count += await it.discard([id_])
                except _OF_ONE as e:
                    left += _staying(await it.page(after=id_ - 1, limit=1), e)
            return DiscardReport(discarded=count, missing=len(wanted) - count - len(left), left=left)

    report = options.run(work)
    options.answer(report, _show_discard, code=EXIT_WRONG if report.missing or report.left else 0)


async def replayed(it: Quarantine, thread_id: str, start: int = 0, *, one_of_many: bool = False) -> Sequence[Replayed]:
    """Replay the thread's entries from position `start` on, as far as possible, and return what became of each.

    An error of the thread alone (another session holds its row, say) is raised if nothing was done before it, and the
    thread is not `one_of_many`. Raises StoreUnavailable, StoreMisconfigured when Postgres answers nobody.
    """
    done: list[Replayed] = []
    try:
        async for outcomes in replaying(it, thread_id, start):
            done += outcomes
    except _OF_ONE as e:
        if not (done or one_of_many):
            raise
        after = done[-1].seq if done else start - 1
        while page := await it.page(thread_id=thread_id, after=after, limit=_PAGE):
            done += _staying(page, e)
            after = page[-1].seq
    return done


def _staying(entries: Sequence[ParkedInfo], error: BufstoreError) -> list[Replayed]:
    reason = f"its thread cannot be locked (does another session hold its row?): {error}"
    return [Replayed(seq=e.seq, thread_id=e.thread_id, outcome=Outcome.WAITS, reason=reason) for e in entries]


@asynccontextmanager
async def _quarantine(target: Endpoints, *, applies: bool = False) -> AsyncIterator[Quarantine]:
    async with inspecting(target, applies=applies) as inspection:
        yield inspection.quarantine


def _nothing(thread_id: str) -> list[Replayed]:
    raise NotFound(f"quarantine has no entry of thread {thread_id!r}")


async def _nameless(it: Quarantine) -> list[Replayed]:
    """Return the entries whose thread is unknown. They cannot be replayed, and the command must say so."""
    found: list[Replayed] = []
    after = 0
    while page := await it.page(after=after, limit=_PAGE):
        found += [
            Replayed(seq=e.seq, thread_id=None, outcome=Outcome.UNDECODABLE, reason=e.cause)
            for e in page
            if e.thread_id is None
        ]
        after = page[-1].seq
    return found


def _show_page(page: QuarantinePage) -> None:
    console = new_console()
    console.print(f"{page.total} entries in quarantine, {len(page.entries)} shown")
    rows = [
        (e.seq, e.thread_id or "-", f"{e.parked_at.astimezone():%Y-%m-%d %H:%M:%S}", e.bytes, _state(e), e.cause)
        for e in page.entries
    ]
    if rows:
        columns = ("ID", "thread", "parked at", "bytes", "state", "cause")
        console.print(new_table(columns, rows, right=("ID", "bytes")))


def _state(entry: ParkedInfo) -> str:
    return "superseded" if entry.superseded else "waits" if entry.entry_id is not None else "undecodable"


def _show_entry(shown: ShownEntry) -> None:
    body = shown.body if isinstance(shown.body, bytes) else shown.body.encode()
    shown.body = repr(body[:_BYTES_SHOWN]) + (f" … {len(body)} bytes" if len(body) > _BYTES_SHOWN else "")
    # Fields of the other kind of log are not unknown, but do not exist.
    other = ("operation",) if shown.operation is None else ("keeps", "messages", "run")
    show_fields(shown, f"entry {shown.id}", without=other)


def _show_replay(report: ReplayReport) -> None:
    click.echo(f"{report.applied} entries applied, {len(report.left)} stay in quarantine")
    _show_left(report.left)


def _show_discard(report: DiscardReport) -> None:
    missing = f", {report.missing} not found" if report.missing else ""
    click.echo(f"{report.discarded} entries discarded{missing}" + (f", {len(report.left)} stay" if report.left else ""))
    _show_left(report.left)


def _show_left(left: Sequence[Replayed]) -> None:
    for o in left:
        say(f"  {o.seq} of thread {o.thread_id or '-'}: {o.outcome.value}: {o.reason}")


def _shown(entry: ParkedEntry) -> ShownEntry:
    item = entry.item
    if isinstance(item, Malformed):
        kept: dict[str, Any] = {"body": b"".join(m.body for m in item.messages)}
    else:
        e = item.entry
        kept = {"entry_id": e.id, "prev_id": e.prev_id, "body": e.payload, **content_of(e.payload)}
    return ShownEntry(id=entry.seq, thread_id=entry.thread_id, cause=entry.cause, parked_at=entry.parked_at, **kept)
