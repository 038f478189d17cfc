"""`bufstore demo`: agents write, Postgres stops in the middle and comes back, and every message is compared."""

from __future__ import annotations

import secrets

import click

from bufstore.cli.connect import Options, connects
from bufstore.cli.demonstration import Demonstration, Plan
from bufstore.cli.output import show
from bufstore.cli.running import EXIT_WRONG, Finite, run
from bufstore.cli.view import new_view


@click.command()
@click.option("--seconds", type=Finite(min=1), default=15.0, show_default=True, help="How long agents write.")
@click.option(
    "--writers", type=click.IntRange(1, 2000), default=200, show_default=True, help="Agents at the same time."
)
@click.option(
    "--outage",
    type=Finite(min=0),
    default=5.0,
    show_default=True,
    help="How many seconds of these Postgres is stopped (embedded servers only).",
)
@click.option(
    "--think-ms",
    type=Finite(min=0),
    default=100.0,
    show_default=True,
    help="How long an agent thinks before a message, on average.",
)
@click.option("--seed", type=int, help="Of the generated conversations. Default: another one each time.")
@connects(embedded_by_default=True)
def demo(options: Options, seconds: float, writers: int, outage: float, think_ms: float, seed: int | None) -> None:
    """Show what the buffer does, on embedded servers unless others are named.

    Many agents hold generated conversations with tools and save a checkpoint after every message. In the middle
    Postgres is stopped for some seconds; the agents do not notice. At the end everything is flushed, Postgres is read
    back without the buffer, and every message of every thread is compared. Exit code 1 if anything is lost, differs,
    or was refused.
    """
    if outage > seconds / 2:
        raise click.UsageError("--outage must be at most half of --seconds.")
    plan = Plan(
        seconds=seconds,
        writers=writers,
        outage=outage,
        think_s=think_ms / 1000,
        seed=seed if seed is not None else secrets.randbits(32),
    )
    with options.target() as target:
        report, problems = run(Demonstration(target, plan, new_view()).run())
    show(report, as_json=options.as_json, title="What happened")
    for problem in problems:
        click.echo(problem, err=True)
    if not report.verified:
        raise click.exceptions.Exit(EXIT_WRONG)
    if not options.as_json:
        click.echo(
            f"Verified: all {report.messages:,} messages of all {report.threads:,} threads are in Postgres, exactly."
        )
