"""`bufstore log`: its entries, the settings that it records, and changing these while processes run."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from bufstore.buffer.windows import Windows
from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.operate.log_entries import entries
from bufstore.cli.output import show_fields
from bufstore.cli.running import Finite
from bufstore.errors import NoLog
from bufstore.nats.change_log import change_log


class LogSettings(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore log … --json``."""

    stream: str
    bucket: str
    #: The kind of store that the log is flushed into, and the id of its database.
    store: str
    database: str
    failover_window_s: float
    archive: bool
    #: The values to which these two change; None: no change is under way.
    next_failover_window_s: float | None
    next_archive: bool | None


@click.group("log")
def log() -> None:
    """The log's entries, and the settings that it records.

    These are where it is flushed to, its failover window, and whether it is archived. Flushers and writers go by it.
    `set` begins a change, `settle` ends it once every process has been restarted with the new LogConfig; in between
    both configurations may open the log, and nothing is at risk.
    """


log.add_command(entries)


@log.command("show")
@connects()
def show_(options: Options) -> None:
    """Show the settings that the log records."""
    _change(options)


@log.command("set")
@click.option("--failover-window", type=Finite(min=0.001), metavar="SECONDS", help="The new failover_window_s.")
@click.option("--archive/--no-archive", default=None, help="Whether entries stay in the log until they are archived.")
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


def _change(options: Options, **change: Any) -> Windows:
    """Change the log, and show what it says then."""

    async def change_and_look(target: Endpoints) -> tuple[Windows, LogSettings]:
        # First: it says whether the stream is the log that the command names, and nothing may be changed otherwise.
        found = await target.find_log()
        if found is None:
            raise NoLog(target.stream)
        config, named = found
        windows = await change_log(nats=target.nats, stream=target.stream, **change)
        return windows, LogSettings(
            stream=target.stream,
            bucket=config.bucket,
            store=named.store,
            database=named.id,
            **msgspec.structs.asdict(windows),
        )

    windows, settings = options.run(change_and_look)
    options.answer(settings, _show_settings)
    return windows


def _show_settings(settings: LogSettings) -> None:
    changing = settings.next_failover_window_s is not None
    next_ = () if changing else ("next_failover_window_s", "next_archive")
    show_fields(settings, "log, changing" if changing else "log", without=next_)
