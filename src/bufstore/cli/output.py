"""Reports on standard output: for people, or one JSON object."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Columns in which no line of ours is folded.
_UNFOLDED = 1 << 20


def show_json(report: object) -> None:
    """Print the report as one line of JSON."""
    click.echo(msgspec.json.encode(report))


def show_fields(report: msgspec.Struct, title: str, *, without: Collection[str] = ()) -> None:
    """Print the report, a line for each field but those in `without`."""
    fields = ((name, value) for name, value in msgspec.structs.asdict(report).items() if name not in without)
    table = new_table(("", "value"), ((name.replace("_", " "), _shown(value)) for name, value in fields), ("value",))
    table.show_header, table.title, table.title_justify = False, title, "left"
    new_console().print(table)


def new_table(columns: Iterable[str], rows: Iterable[Iterable[object]], right: Collection[str] = ()) -> Table:
    """A table of what these values are as text; the columns in `right` are justified there."""
    table = Table(box=box.SIMPLE)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(value))) for value in row))
    return table


def new_console(*, sentences: bool = False) -> Console:
    """Standard output for text that is shown as it is: ids and causes may hold what looks like markup or an emoji.

    What is piped is not folded, so that an id stands in one line whoever looks for it; `sentences`: it is for people
    to read, wherever it goes.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not (sentences or console.is_terminal):
        console.width = _UNFOLDED
    return console


def say(line: str) -> None:
    """Print a line for people."""
    click.echo(printable(line))


def printable(text: str) -> str:
    """The text in one line, with escapes for what a terminal would obey or not show: control characters above all."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def lasting(seconds: float) -> str:
    """A time in the largest unit that fits, roughly."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _shown(value: object) -> str:
    if value is None:
        return "unknown"
    counts = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:,}" if counts else str(value)
