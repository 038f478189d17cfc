"""`bufstore erase`."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.operate.flush import standing_in
from bufstore.cli.output import say
from bufstore.cli.running import EXIT_WRONG
from bufstore.errors import BufstoreError
from bufstore.tasks import together
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.erasing import Erasure
from bufstore.threads.lineage import Children
from bufstore.types import check_id


class FailedErasure(msgspec.Struct, kw_only=True):
    """A thread that is not erased, or only in part."""

    thread_id: str
    #: The name of the error (`bufstore.errors`).
    error: str
    message: str


class EraseReport(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore erase --json``."""

    erased: list[Erasure]
    failed: list[FailedErasure]


@click.command()
@click.argument("threads", metavar="THREAD...", nargs=-1, required=True)
@click.option(
    "--children",
    type=click.Choice([c.value for c in Children]),
    default=Children.REJECT.value,
    show_default=True,
    help="What happens to child threads: they prevent it, lose their parent, or are erased too.",
)
@connects()
def erase(options: Options, threads: tuple[str, ...], children: str) -> None:
    """Delete each THREAD and remove its content from the log and from quarantine.

    Takes as long as Postgres may need the entries again (failover_window_s, a minute by default). Archives are not
    touched: the report says whether they may hold the content. Exit code 1 if something may be left, or nothing
    was found, or a thread failed; the others are erased all the same.
    """
    report = options.run(lambda target: _erase(target, threads, Children(children)))
    wrong = report.failed or any(e.archived_below or e.written_again or not e.found for e in report.erased)
    options.answer(report, _show, code=EXIT_WRONG if wrong else 0)


async def _erase(target: Endpoints, threads: Sequence[str], children: Children) -> EraseReport:
    wanted = [check_id(thread_id, "thread_id") for thread_id in dict.fromkeys(threads)]

    async def erased(store: BufferedThreadStore, thread_id: str) -> Erasure | FailedErasure:
        try:
            return await store.erase(thread_id, children=children)
        except BufstoreError as e:
            return FailedErasure(thread_id=thread_id, error=type(e).__name__, message=str(e))

    async with target.buffered(flusher=False, create=False) as store, standing_in(target):
        found = await together(erased(store, thread_id) for thread_id in wanted)
    return EraseReport(
        erased=[e for e in found if isinstance(e, Erasure)],
        failed=[e for e in found if isinstance(e, FailedErasure)],
    )


def _show(report: EraseReport) -> None:
    for erasure in report.erased:
        click.echo(_said(erasure))
    for failed in report.failed:
        say(f"{failed.thread_id!r}: not erased, or only in part; repeat it once this is settled: {failed.message}")


def _said(erasure: Erasure) -> str:
    name = repr(erasure.thread_ids[0])
    if not erasure.found:
        return f"{name}: nothing found to erase"
    others = len(erasure.thread_ids) - 1
    lines = [
        f"{name}{f' and {others} descendants' if others else ''}: erased; {erasure.log_messages} messages of the log, "
        f"{erasure.quarantined} entries in quarantine, {erasure.set_aside} rows set aside by pipelines"
    ]
    if erasure.archived_below:
        lines.append(f"  archives of the log below position {erasure.archived_below} may hold its content")
    if erasure.written_again:
        lines.append(f"  written again meanwhile: {', '.join(map(repr, erasure.written_again))}")
    return "\n".join(lines)
