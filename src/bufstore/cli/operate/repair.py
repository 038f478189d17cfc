"""`bufstore repair`."""

from __future__ import annotations

import shlex

import click

from bufstore.buffer.operate.repair import Repaired
from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.running import EXIT_WRONG
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import ConfigDrift, ConfigError
from bufstore.threads.repairing import repair_buffer, repairing


@click.command()
@click.option("--apply", "apply", is_flag=True, help="Do it. Without this option, nothing is changed.")
@click.option(
    "--lane",
    type=click.IntRange(min=0),
    help="If the stream is gone and there are several lanes: the number of its lane.",
)
@connects()
def repair(options: Options, apply: bool, lane: int | None) -> None:
    """After LogRolledBack: say why log and Postgres do not agree, and what can be saved.

    With --apply (stop all instances first): what the log has and Postgres lacks is applied, or goes
    to quarantine if it fits nowhere; then the stream is removed, and the next start makes a new one.
    Exit code 1 without --apply when there is something to repair.
    """
    found, how = options.run(lambda target: _repair(target, apply, lane))
    code = EXIT_WRONG if found.reason is not None and not found.done else 0
    options.answer(found, lambda found: click.echo("\n".join(_lines(found, how))), code=code)


async def _repair(target: Endpoints, apply: bool, lane: int | None) -> tuple[Repaired, str]:
    """Return what was found, and the command or call that mends it."""
    log, how = await target.find_log(), _command(target, lane)
    if log is None:
        config = await target.lost_log(lane, applies=apply)
        named = await target.noted(config, applies=apply)
    else:
        config, named = log
        if lane not in (None, config.lane):
            raise ConfigError(
                f"--lane {lane} is for a stream that is gone, but {target.stream!r} is there, and is lane "
                f"{config.lane} of {config.lanes}: name the stream of lane {lane} with --stream"
            )
        try:
            target.check_ours(log)
        except ConfigDrift as e:
            if apply:
                raise
            how = f"bufstore.repair(…, apply=True) in a process that has the store, because {e}"
    repairs = repairing(BufferConfig.fitting(config))
    return await repair_buffer(target.buffer_of(named, repairs), apply=apply), how


def _command(target: Endpoints, lane: int | None) -> str:
    """Return the command that repairs the same log."""
    usual = LogConfig()
    words = ["bufstore", "repair"]
    words += ["--stream", target.stream] if target.stream != usual.stream else []
    words += ["--bucket", target.bucket] if target.bucket != usual.bucket else []
    words += ["--schema", target.schema] if target.schema != "bufstore" else []
    words += ["--lane", f"{lane}"] if lane is not None else []
    return shlex.join([*words, "--apply"])


def _lines(found: Repaired, how: str) -> list[str]:
    if found.reason is None:
        return ["log and Postgres agree: there is nothing to repair"]
    lines = [f"found: {found.reason}"]
    if found.done:
        lines.append(f"applied {found.applied} entries of {found.threads} threads that the log shows")
        lines.append(f"parked {found.parked} entries that fit nowhere, or may be applied already" + _look(found))
        lines.append(f"the stream is removed; the next start creates generation {found.epoch}")
    else:
        unknown = found.applied + found.parked
        lines.append(f"the log shows {found.threads} threads; {unknown} entries are not known to be in Postgres:")
        lines.append(f"  {found.applied} would be applied")
        lines.append(f"  {found.parked} fit nowhere, or may be applied already, and would go to quarantine")
        lines.append(f"then the stream would be removed, and the next start would create generation {found.epoch}")
        if found.unarchived_from is not None:
            lines.append(f"no archive has the log from position {found.unarchived_from} on, and none can get it then:")
            lines.append("  run `bufstore spark archive` first")
        lines.append("nothing was changed; stop all instances, then: " + how)
    return lines


def _look(found: Repaired) -> str:
    if not found.parked:
        return ""
    return ": make the log (`bufstore setup` with what your LogConfig says), then see `bufstore quarantine list`"
