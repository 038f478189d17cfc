"""The group of commands."""

from __future__ import annotations

import click

from bufstore.cli.demo.demo import demo
from bufstore.cli.doctor.doctor import doctor
from bufstore.cli.importing.import_ import import_
from bufstore.cli.operate.erase import erase
from bufstore.cli.operate.flush import flush
from bufstore.cli.operate.log import log
from bufstore.cli.operate.mailbox import mailbox
from bufstore.cli.operate.permissions import permissions
from bufstore.cli.operate.quarantine import quarantine
from bufstore.cli.operate.repair import repair
from bufstore.cli.operate.setup import setup
from bufstore.cli.operate.spark import spark
from bufstore.cli.operate.status import status
from bufstore.cli.operate.tokens import tokens
from bufstore.cli.operate.verify import verify
from bufstore.cli.running import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="bufstore")
def app() -> None:
    """A buffered write-ahead checkpoint store: NATS JetStream in front of Postgres.

    Exit codes: 0 all well; 1 something is lost, differs, was not imported, or is worth a look; 2 wrong usage or
    configuration, or a server that cannot be reached; 130 interrupted. A command that fails says why on standard error,
    and with --json also on standard output: {"code": …, "error": …, "message": …}.
    """


for command in (
    demo, import_, status, flush, erase, quarantine, verify, doctor, log, repair, spark, mailbox, tokens, setup,
    permissions,
):  # fmt: skip
    app.add_command(command)
