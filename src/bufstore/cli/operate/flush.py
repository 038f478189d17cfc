"""`bufstore flush`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click
import msgspec

from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.inspection import inspecting
from bufstore.cli.running import Failure, Finite
from bufstore.errors import BufstoreError, FlushTimeout
from bufstore.tasks import end, set_within, spawn
from bufstore.types import check_id

_LOOK_EVERY_S = 0.25
#: The seconds that are left for the flush at least, even when opening has taken all of its time.
_LEAST_S = 0.1
#: How many seconds the stand-in flusher waits for Postgres when it opens, and for its last window when it closes: by
#: then the caller of the flush has waited long enough.
_STAND_IN_S = 1.0


class FlushReport(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore flush --json``."""

    #: The thread that was flushed; None: all threads.
    thread_id: str | None
    flushed: bool
    #: True when no flusher was alive, so this command flushed itself.
    flushed_here: bool
    seconds: float


@click.command()
@click.argument("thread", required=False)
@click.option("--all", "everything", is_flag=True, help="Flush all threads.")
@click.option(
    "--timeout",
    type=Finite(min=0.1),
    default=30.0,
    show_default=True,
    help="Seconds after which to give up. Statements that hang in Postgres then may take some seconds more to end.",
)
@connects()
def flush(options: Options, thread: str | None, everything: bool, timeout: float) -> None:
    """Move what is acknowledged now into Postgres: one THREAD, or --all.

    The flushers that are alive are asked to do it now. When there is none (left), this command is the flusher until
    it is done. Nothing is lost when it fails: what is not flushed stays in the log.
    """
    if (thread is None) is not everything:
        raise click.UsageError("Flush what? Give either a THREAD or --all.")
    options.answer(options.run(lambda target: _flush(target, thread, timeout)), _show)


async def _flush(target: Endpoints, thread: str | None, timeout_s: float) -> FlushReport:
    began = time.perf_counter()
    if thread is not None:
        check_id(thread, "thread_id")
    create = target.servers is not None  # with embedded servers, a log cannot be made in the wrong place
    try:
        async with (
            asyncio.timeout(timeout_s) as opening,
            target.opened(flusher=False, create=create) as store,
            standing_in(target) as stand_in,
        ):
            opening.reschedule(None)  # the flush keeps to the time itself, and says what it waited for
            left_s = max(timeout_s - (time.perf_counter() - began), _LEAST_S)
            if thread is None:
                await store.force_flush_all(timeout_s=left_s)
            else:
                await store.force_flush(thread, timeout_s=left_s)
            return FlushReport(
                thread_id=thread,
                flushed=True,
                flushed_here=stand_in.is_set(),
                seconds=round(time.perf_counter() - began, 3),
            )
    except TimeoutError:
        raise Failure(
            f"not flushed: NATS or Postgres did not answer within {timeout_s:g} s; what is acknowledged stays in the "
            "log; `bufstore status` shows what is away",
            FlushTimeout.__name__,
        ) from None


def _show(report: FlushReport) -> None:
    what = "everything" if report.thread_id is None else f"thread {report.thread_id!r}"
    how = ", by this command: no flusher was alive" if report.flushed_here else ""
    click.echo(f"{what} is flushed ({report.seconds:.2f} s{how})")


@asynccontextmanager
async def standing_in(target: Endpoints) -> AsyncIterator[asyncio.Event]:
    """Be a flusher inside the block as soon as no other is alive; the event is set from then on.

    A flusher that was killed counts as alive until its lease has run out, some seconds later. If the block ends with a
    FlushTimeout and nothing could be flushed here, raises Failure, which says why.
    """
    needed, opened, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with inspecting(target) as inspection:
            while await inspection.members():
                await set_within(over, _LOOK_EVERY_S)
        needed.set()
        async with target.opened(flush_timeout_s=_STAND_IN_S):
            opened.set()
            await over.wait()

    task = spawn(work())
    try:
        yield needed
    except FlushTimeout as e:
        if task.done() and isinstance(why := task.exception(), BufstoreError):
            raise Failure(f"{e}; this command cannot flush itself: {why}", FlushTimeout.__name__) from None
        raise
    finally:
        over.set()
        if not (opened.is_set() or task.done()):
            await end(task)  # what it waits for may be away for longer than the caller waits
        else:
            with contextlib.suppress(BufstoreError):  # the flush has already said what is wrong
                await task
