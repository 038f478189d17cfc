"""Reports on standard output: for people, or one JSON object."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bufstore.printable import printable

#: The width of a console, in columns, that folds none of our lines.
_UNFOLDED = 1 << 20


def show_json(report: object) -> None:
    """Print the report as one line of JSON."""
    click.echo(msgspec.json.encode(report))


def show_fields(report: msgspec.Struct, title: str, *, without: Collection[str] = ()) -> None:
    """Print the report, one line for each field that is not in `without`. An id is shown as a command takes it."""
    fields = ((name, value) for name, value in msgspec.structs.asdict(report).items() if name not in without)
    rows = ((name.replace("_", " "), _shown(value, counts=name.rpartition("_")[2] != "id")) for name, value in fields)
    table = new_table(("", "value"), rows)
    table.show_header, table.title, table.title_justify = False, title, "left"
    new_console().print(table)


def new_table(columns: Iterable[str], rows: Iterable[Iterable[object]], right: Collection[str] = ()) -> Table:
    """Return a table of these values as text; the columns in `right` are right-justified."""
    table = Table(box=box.SIMPLE)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(value))) for value in row))
    return table


def new_console(*, sentences: bool = False) -> Console:
    """Return a console on standard output that shows text as it is: ids and causes may look like markup or an emoji.

    Piped text is not folded, so that a search finds an id in one line. `sentences`: the text is for people to read, and
    is folded wherever it goes.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not (sentences or console.is_terminal):
        console.width = _UNFOLDED
    return console


def say(line: str) -> None:
    """Print a line for people."""
    click.echo(printable(line))


def lasting(seconds: float) -> str:
    """Return a duration as text: roughly, in the largest unit that fits."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _shown(value: object, *, counts: bool) -> str:
    if value is None:
        return "unknown"
    counts = counts and isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:,}" if counts else str(value)
