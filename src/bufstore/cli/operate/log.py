"""`bufstore log`: its entries, what it says of itself, and changing that while processes run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import click
import msgspec

from bufstore.buffer.prepare import adopt as adopt_log
from bufstore.buffer.target import Kind
from bufstore.buffer.windows import Windows
from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.operate.log_entries import entries
from bufstore.cli.output import show_fields
from bufstore.cli.running import Finite
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import NoLog
from bufstore.nats.change_log import change_log
from bufstore.threads.behind import buffer_of
from bufstore.threads.protocol import DOMAIN

_TIMEOUT_S = 5.0


class LogSettings(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore log … --json``."""

    stream: str
    bucket: str
    #: The kind of store that the log is flushed into, and the id of its database; None: the log does not say.
    store: str | None
    database: str | None
    failover_window_s: float
    archive: bool
    #: The values to which these two change; None: no change is under way.
    next_failover_window_s: float | None
    next_archive: bool | None


@click.group("log")
def log() -> None:
    """The log's entries; and what it says of itself.

    That is where it is flushed to, its failover window, and whether it is archived. Flushers and writers go by it.
    `set` begins a change, `settle` ends it once every process has been restarted with the new LogConfig; in between
    both configurations may open the log, and nothing is at risk.
    """


log.add_command(entries)


@log.command("show")
@connects()
def show_(options: Options) -> None:
    """Show what the log says of itself."""
    _change(options)


@log.command("set")
@click.option("--failover-window", type=Finite(min=0.001), metavar="SECONDS", help="The new failover_window_s.")
@click.option("--archive/--no-archive", default=None, help="Whether nothing leaves the log before it is archived.")
@connects()
def set_(options: Options, failover_window: float | None, archive: bool | None) -> None:
    """Begin a change, or undo one that is under way by setting the present values.

    From now on flushers keep the larger window, and processes that start rely on the smaller.
    """
    if failover_window is None and archive is None:
        raise click.UsageError("Set what? Give --failover-window, --archive or --no-archive.")
    windows = _change(options, failover_window_s=failover_window, archive=archive)
    if windows.changing and not options.as_json:
        click.echo(
            "Restart every process with LogConfig("
            f"failover_window_s={windows.next_failover_window_s:g}, archive={windows.next_archive}), "
            "then: bufstore log settle"
        )


@log.command("settle")
@connects()
def settle(options: Options) -> None:
    """End a change, when every process that has the log open was started after it began."""
    _change(options, settle=True)


@log.command("adopt")
@click.option(
    "--store",
    default="bufstore.postgres",
    show_default=True,
    metavar="KIND",
    help="The kind of store that the log is flushed into: bufstore.postgres, 'app' for an app's own store, or the name "
    "that the store declares.",
)
@click.option(
    "--failover-window",
    "failover_window_s",
    type=Finite(min=0.001),
    metavar="SECONDS",
    help="LogConfig.failover_window_s of the app. [default: 60]",
)
@click.option("--archive", is_flag=True, default=None, help="LogConfig.archive of the app.")
@connects()
def adopt(options: Options, store: str, **windows: Any) -> None:
    """Make a log of an earlier release say that it is flushed into this Postgres and schema.

    An app that opens the log does this itself; the command is for logs that no app can open. A log that names another
    database is refused. If the log does not say its windows and bucket either, it says them from now on: give those of
    the app's LogConfig.
    """
    wanted = {name: value for name, value in windows.items() if value is not None}
    _answer(options, lambda target: _adopt(target, Kind(DOMAIN, store), wanted))


def _change(options: Options, **change: Any) -> Windows:
    return _answer(options, lambda target: change_log(nats=target.nats, stream=target.stream, **change))


async def _adopt(target: Endpoints, kind: Kind, windows: dict[str, Any]) -> Windows:
    found = await target.find_log()
    if found is None:
        raise NoLog(target.stream)
    fitting = BufferConfig.fitting(replace(found.config, **windows), flusher=False)
    store = target.plain(pool_size=1)
    async with buffer_of(store, target.nats, fitting, name=target.session, timeout_s=_TIMEOUT_S).connected() as buffer:
        await adopt_log(buffer.log, buffer.ledger, target.stream, kind)
        return buffer.log.windows


def _answer(options: Options, work: Callable[[Endpoints], Coroutine[Any, Any, Windows]]) -> Windows:
    """Do `work`, and show what the log says then."""

    async def work_and_look(target: Endpoints) -> tuple[Windows, LogSettings]:
        windows = await work(target)
        found = await target.find_log()
        config, named = found if found is not None else (LogConfig(stream=target.stream, bucket=target.bucket), None)
        return windows, LogSettings(
            stream=target.stream,
            bucket=config.bucket,
            store=named.store if named is not None else None,
            database=named.id if named is not None else None,
            **msgspec.structs.asdict(windows),
        )

    windows, settings = options.run(work_and_look)
    options.answer(settings, _show_settings)
    return windows


def _show_settings(settings: LogSettings) -> None:
    changing = settings.next_failover_window_s is not None
    next_ = () if changing else ("next_failover_window_s", "next_archive")
    show_fields(settings, "log, changing" if changing else "log", without=next_)
