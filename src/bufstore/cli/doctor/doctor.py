"""`bufstore doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource
from rich.table import Table
from rich.text import Text

from bufstore.cli.connect import FILE, Endpoints, Options, connects
from bufstore.cli.doctor.diagnosis import Diagnosis, Level, diagnosis
from bufstore.cli.doctor.disk_sync import check_sync
from bufstore.cli.doctor.mailbox import check_mailbox
from bufstore.cli.doctor.nats import check_nats
from bufstore.cli.doctor.postgres import check_postgres
from bufstore.cli.doctor.tokens import check_tokens
from bufstore.cli.output import new_console
from bufstore.nats.permissions import Role
from bufstore.printable import printable

_COLOURS = {Level.OK: "green", Level.UNKNOWN: "yellow", Level.WARNING: "yellow", Level.BAD: "bold red"}


@click.command()
@click.option(
    "--nats-sys",
    metavar="URL",
    envvar="BUFSTORE_NATS_SYS",
    show_envvar=True,
    help="NATS with a user of the system account, to see how the servers sync.",
)
@click.option(
    "--nats-sys-creds",
    metavar="FILE",
    envvar="BUFSTORE_NATS_SYS_CREDS",
    show_envvar=True,
    type=FILE,
    help="Credentials file of that user, if the URL does not have its login.",
)
@click.option(
    "--nats-monitor",
    metavar="URL",
    envvar="BUFSTORE_NATS_MONITOR",
    show_envvar=True,
    help="The monitoring port of NATS, to see the same.",
)
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    default=Role.OPERATOR.value,
    show_default=True,
    help="The role whose permissions the NATS user needs (`bufstore permissions`).",
)
@click.option("--tokens", metavar="NAME", multiple=True, help="Also look at the exclusive work and the locks NAME.")
@click.option("--mailbox", metavar="NAME", multiple=True, help="Also look at the mailbox in the bucket NAME.")
@connects()
def doctor(
    options: Options,
    role: str,
    nats_sys: str | None,
    nats_sys_creds: Path | None,
    nats_monitor: str | None,
    tokens: tuple[str, ...],
    mailbox: tuple[str, ...],
) -> None:
    """Look at the servers: versions, permissions, settings, durability, headroom. Changes nothing.

    Exit codes: 0 all fine; 1 it works, but something is worth a look or could not be found out; 2 it cannot work.
    """
    source = click.get_current_context().get_parameter_source("nats_sys_creds")
    if nats_sys is None and source is ParameterSource.COMMANDLINE:
        raise click.UsageError("--nats-sys-creds goes with --nats-sys, the URL.")
    found = options.run(
        lambda target: _look(target, Role(role), nats_sys, nats_sys_creds, nats_monitor, tokens, mailbox)
    )
    options.answer(found, _show, code=found.code)


async def _look(
    target: Endpoints,
    role: Role,
    nats_sys: str | None,
    nats_sys_creds: Path | None,
    nats_monitor: str | None,
    tokens: Sequence[str],
    mailboxes: Sequence[str],
) -> Diagnosis:
    nats, log = await check_nats(target, role)
    known = target.servers.nats.sync_interval if target.servers is not None else None
    replicas = log.config.replicas if log is not None else 1
    tls = target.nats.tls_context
    sync = await check_sync(nats_sys, nats_monitor, tls, known, replicas, sys_credentials=nats_sys_creds)
    of_tokens = [check for name in tokens for check in await check_tokens(target, name)]
    of_mailboxes = [check for name in mailboxes for check in await check_mailbox(target, name)]
    return diagnosis([*nats, *sync, *await check_postgres(target, log), *of_tokens, *of_mailboxes])


def _show(found: Diagnosis) -> None:
    console = new_console(sentences=True)
    for part in dict.fromkeys(c.part for c in found.checks):
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for c in found.checks:
            if c.part == part:
                # The advice goes below the finding: two columns of sentences do not fit into 80 characters.
                found_ = printable(c.found)
                said = Text(f"{found_}\n→ {c.advice}" if c.advice else found_)
                table.add_row(Text(f"  {c.level.value}", style=_COLOURS[c.level]), c.what, said)
        console.print(part, style="bold")
        console.print(table)
    console.print(("all is fine", "it works; see the warnings", "it cannot work like this")[found.code])
