"""The group of commands."""

from __future__ import annotations

import click

from bufstore.cli.checking import verify
from bufstore.cli.demo import demo
from bufstore.cli.doctor import doctor
from bufstore.cli.erase import erase
from bufstore.cli.flush import flush
from bufstore.cli.importing import import_
from bufstore.cli.log import log
from bufstore.cli.permissions import permissions
from bufstore.cli.quarantine import quarantine
from bufstore.cli.repair import repair
from bufstore.cli.running import Commands
from bufstore.cli.setup import setup
from bufstore.cli.spark import spark
from bufstore.cli.status import status


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="bufstore")
def app() -> None:
    """A buffered write-ahead checkpoint store: NATS JetStream in front of Postgres.

    Exit codes: 0 all well; 1 something is lost, differs, was not imported, or is worth a look; 2 wrong usage or
    configuration, or a server that cannot be reached; 130 interrupted. A command that fails says why on standard error,
    and with --json also on standard output: {"code": …, "error": …, "message": …}.
    """


for command in (
    demo, import_, status, flush, erase, quarantine, verify, doctor, log, repair, spark, setup, permissions,
):  # fmt: skip
    app.add_command(command)
