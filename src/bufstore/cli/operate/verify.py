"""`bufstore verify`."""

from __future__ import annotations

import click
import msgspec

from bufstore.buffer.operate.audit import Verification
from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.inspection import inspecting
from bufstore.cli.output import new_console, new_table
from bufstore.cli.running import EXIT_WRONG


@click.command()
@connects()
def verify(options: Options) -> None:
    """Check log, shared state and Postgres against each other, while they work.

    Reads every thread that the log shows and changes nothing. What it finds is damage, or a bug of
    bufstore's: exit code 1.
    """
    found = options.run(_look)
    report = {"ok": found.ok, **msgspec.structs.asdict(found)}
    options.answer(report, lambda _: _show(found), code=0 if found.ok else EXIT_WRONG)


async def _look(target: Endpoints) -> Verification:
    async with inspecting(target) as inspection:
        return await inspection.verify()


def _show(found: Verification) -> None:
    console = new_console()
    console.print(
        f"{found.threads} threads in {found.partitions} partitions, {found.unflushed_entries} entries of "
        f"{found.unflushed_threads} threads not flushed yet ({found.waiting} of them wait for their turn), "
        f"{found.quarantined} in quarantine, "
        f"{len(found.members)} flushers alive ({found.seconds:.2f} s)"
    )
    console.print("no rule is broken" if found.ok else f"{found.wrong} rules are broken:")
    if found.ok:
        return
    rows = ((f.rule, "-" if f.partition is None else f.partition, f.thread_id or "-", f.detail) for f in found.findings)
    console.print(new_table(("rule", "partition", "thread", "found"), rows))
