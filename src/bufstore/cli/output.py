"""Reports on standard output: for people, or one JSON object."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_json(report: object) -> None:
    """Print the report as one line of JSON."""
    click.echo(msgspec.json.encode(report))


def show_fields(report: msgspec.Struct, title: str) -> None:
    """Print the report, a line for each field."""
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column()
    table.add_column(justify="right")
    for name, value in msgspec.structs.asdict(report).items():
        table.add_row(
            name.replace("_", " "), "unknown" if value is None else f"{value:,}" if _counts(value) else str(value)
        )
    Console().print(table)


def new_table(columns: Iterable[str], rows: Iterable[Iterable[object]], right: Collection[str] = ()) -> Table:
    """A table of what these values are as text; the columns in `right` are justified there."""
    table = Table(box=box.SIMPLE)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))  # no markup: a cause, say, may hold anything
    return table


def lasting(seconds: float) -> str:
    """A time in the largest unit that fits, roughly."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _counts(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
