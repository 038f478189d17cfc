"""`bufstore permissions`."""

from __future__ import annotations

from typing import Any

import click

from bufstore.cli.connect import BUCKET, STREAM
from bufstore.cli.output import show_json
from bufstore.cli.running import reporting_errors
from bufstore.config import LogConfig, NatsConfig
from bufstore.nats import permissions as nats


@click.command()
@click.argument("role", type=click.Choice([role.value for role in nats.Role]))
@STREAM
@BUCKET
@click.option("--subject", default="thread", show_default=True, help="First word of the log's subjects.")
@click.option("--lanes", type=int, default=1, show_default=True, help="LogConfig.lanes: the subjects of all of them.")
@click.option(
    "--replicas",
    type=int,
    default=1,
    show_default=True,
    help="LogConfig.replicas; with more than 1, an app needs more permissions.",
)
@click.option("--api-prefix", metavar="SUBJECT", help="Prefix of the JetStream API, if it is not $JS.API.")
@click.option("--json", "as_json", is_flag=True, help="Print the subjects as one JSON object.")
@reporting_errors
def permissions(role: str, api_prefix: str | None, as_json: bool, **log: Any) -> None:
    """Print what NATS must permit a user of this role, as a block for nats-server's configuration.

    app: writes and reads (BufferConfig.flusher False). flusher: flushes as well; a process with both is one. operator:
    these commands. With no more than this an app makes neither stream nor bucket: `bufstore setup` does, as operator.
    Asks no server. For Postgres see `bufstore setup --grant`.
    """
    found = nats.permissions(nats.Role(role), LogConfig(**log), NatsConfig(api_prefix=api_prefix).api)
    if as_json:
        show_json(found)
    else:
        click.echo(found.config())
