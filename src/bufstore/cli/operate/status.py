"""`bufstore status`."""

from __future__ import annotations

import click
from rich.filesize import decimal

from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.inspection import BufferStatus, inspecting
from bufstore.cli.output import lasting, new_console, new_table
from bufstore.cli.running import EXIT_UNUSABLE, EXIT_WRONG
from bufstore.printable import printable


@click.command()
@connects()
def status(options: Options) -> None:
    """Show how far the log is flushed, how full it is, the live flushers, what waits, and what is in quarantine.

    It only looks: it flushes nothing, and is not one of the flushers. Lag is counted in entries of the log that
    the cursor of their partition has not passed. Exit code 1 when something is wrong (nothing can be written or is
    flushed, say), 2 when there is no log, or NATS or Postgres does not answer; with Postgres away, the log's side is
    shown all the same.
    """
    found = options.run(_look)
    code = 0 if found.ok else EXIT_UNUSABLE if found.postgres_trouble else EXIT_WRONG
    options.answer(found, _show, code=code)


async def _look(target: Endpoints) -> BufferStatus:
    if target.servers is not None:
        # With embedded servers, a log cannot be made in the wrong place, and nobody needs to know that there was none.
        async with target.buffered(flusher=False):
            pass
    async with inspecting(target) as inspection:
        return await inspection.status()


def _show(found: BufferStatus) -> None:
    console = new_console()
    used = f"{decimal(found.log_bytes)} of {decimal(found.log_bytes_max)}"
    console.print(f"log {found.stream}: {used} ({found.log_bytes / found.log_bytes_max:.1%})")
    if found.lanes > 1:
        console.print(f"lane {found.lane} of {found.lanes}: each has a stream of its own (--stream)")
    full = "" if found.log_full_in_s is None else f", full in {lasting(found.log_full_in_s)} at this rate"
    console.print(f"not flushed: about {decimal(found.log_bytes_unflushed)}{full}")
    for what, trouble in (
        ("checkpoints", found.write_trouble),
        ("reads", found.read_trouble),
        ("flushing", found.flush_trouble),
    ):
        console.print(f"{what}: {printable(trouble) or 'ok'}")
    if found.log_trouble not in found.write_trouble:
        console.print(f"the log: {printable(found.log_trouble)}")
    console.print(f"Postgres: {printable(found.postgres_trouble) or 'ok'}")
    console.print(f"flushers: {', '.join(found.members) or 'none alive'}")
    console.print(f"waiting entries: {_shown(found.waiting)}")
    console.print(f"quarantined entries: {_shown(found.quarantined)}")
    if found.group_entries is not None and found.group_bytes is not None:
        console.print(f"the last groups: {found.group_entries:g} entries, {decimal(int(found.group_bytes))} each")
    numbers = ("partition", "end", "flushed to", "lag", "term")
    rows = ((p.partition, p.end, p.cursor, p.lag, p.term, p.owner or "-") for p in found.partitions)
    console.print(new_table((*numbers, "owner"), (map(_shown, row) for row in rows), right=numbers))


def _shown(value: object) -> str:
    return "unknown" if value is None else str(value)
