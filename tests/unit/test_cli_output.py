"""The command line prints foreign values as they are, without anything that a terminal obeys."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from bufstore.cli.app import app
from bufstore.cli.importing.import_ import _Progress
from bufstore.cli.operate.quarantine import ShownEntry, _show_entry
from bufstore.cli.output import new_console, new_table, say, show_fields
from bufstore.cli.running import Failure, reporting_errors
from bufstore.errors import StoreUnavailable
from bufstore.printable import printable

#: Text that rich would take for markup or an emoji.
MARKUP = "[INST] hi [/INST] see [docs], [red] and [1] :warning:"
#: Text that sets a terminal's title, clears it, and changes the direction of writing.
OBEYED = "a\x1b]0;mine\x07b\x1b[2Jc\x9b1md\u202ee\nf\tg\r"


class Report(msgspec.Struct):
    """Values of all kinds."""

    text: str
    count: int
    nothing: None = None
    ok: bool = True


def test_fields_show_values_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_fields(Report(text=MARKUP, count=12345), "report of [red]")
    shown = capsys.readouterr().out
    assert "report of [red]" in shown
    assert [line.split(maxsplit=1)[1].strip() for line in shown.splitlines() if line.strip()][1:] == [
        MARKUP, "12,345", "unknown", "True",
    ]  # fmt: skip


def test_a_short_value_stands_beside_its_name_however_long_another_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the id of an entry in quarantine stood at the end of hundreds of blanks, and lines were wrapped."""
    show_fields(Report(text="x" * 500, count=12345), "entry 7")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "12,345" in line]
    assert line.index("12,345") < 20


def test_tables_and_lines_show_values_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    new_console().print(new_table(("id", "cause"), [("x[/y]", MARKUP)]))
    new_console().print(MARKUP)
    say(MARKUP)
    shown = capsys.readouterr().out
    assert "x[/y]" in shown
    assert shown.count(MARKUP) == 3


def test_nothing_that_is_piped_is_folded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    thread_id = "a long id with spaces " * 20 + "end"
    new_console().print(new_table(("thread", "cause"), [(thread_id, "why " * 100)]))
    new_console().print(f"found {thread_id}")
    show_fields(Report(text=thread_id, count=1), "report")
    assert capsys.readouterr().out.count(thread_id) == 3
    new_console(sentences=True).print(Text(thread_id))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_a_terminal_gets_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say(OBEYED)
    new_console().print(new_table(("id",), [(OBEYED,)]))
    show_fields(Report(text=OBEYED, count=1), "report")
    shown = capsys.readouterr().out
    escaped = r"a\x1b]0;mine\x07b\x1b[2Jc\x9b1md\u202ee\nf\tg\r"
    assert shown.count(escaped) == 3
    assert all(c.isprintable() for c in shown.replace("\n", ""))


@given(st.text(st.characters()), st.text(st.characters(exclude_categories=("C", "Z"))))
def test_what_is_printable_stays_and_all_else_is_escaped(text: str, plain: str) -> None:
    assert printable(text).isprintable()
    printable(text).encode()  # lone surrogates cannot be encoded
    assert printable(text + plain) == printable(text) + plain


@pytest.mark.parametrize(
    ("fields", "left_out"),
    [
        ({"keeps": 0, "messages": ["m"]}, {"operation"}),
        ({"operation": {"kind": "put"}}, {"keeps", "messages", "run"}),
        ({}, {"operation"}),
    ],
)
def test_an_entry_is_shown_without_the_fields_of_other_logs(
    fields: dict[str, Any], left_out: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    entry: dict[str, Any] = {"id": 7, "thread_id": "t", "cause": "c", "parked_at": datetime.now(UTC), "body": b"x"}
    _show_entry(ShownEntry(**entry, **fields))
    shown = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()}
    every = {"keeps", "messages", "run", "operation"}
    assert every - shown == left_out


def test_ids_are_shown_as_commands_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: commas stood in the id of an entry, which then no command took."""
    entry: dict[str, Any] = {"thread_id": "t", "cause": "c", "parked_at": datetime.now(UTC), "body": b"x"}
    _show_entry(ShownEntry(id=12345678, entry_id=87654321, keeps=1234, **entry))
    shown = capsys.readouterr().out.split()
    assert {"12345678", "87654321", "1,234"} <= set(shown)


def test_a_line_that_is_not_imported_is_named_by_its_own_id(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: an id like :bug: was shown as the picture of a beetle."""
    _Progress().bad_line(1, "thread ':bug:' exists")
    assert "':bug:'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mailbox", "list", "--status", "queued"], "give --thread, too"),
        (["setup", "--own-store", "--max-bytes", "5000000"], "takes only --lanes"),
        (["setup", "--own-store", "--sql", "--archive"], "takes only --lanes"),
    ],
)
def test_an_option_without_effect_is_refused(arguments: list[str], said: str) -> None:
    """Regression: it was dropped without a word."""
    addresses = {"BUFSTORE_POSTGRES": "postgresql://127.0.0.1:1/x", "BUFSTORE_NATS": "nats://127.0.0.1:1"}
    ran = CliRunner(env=addresses).invoke(app, arguments)
    assert (ran.exit_code, said in " ".join(ran.output.split())) == (2, True), ran.output


def test_an_encoding_that_lacks_a_character_ends_no_command() -> None:
    """Regression: with an output in Latin-1, whatever had to be said with "→" or in Japanese was a traceback."""
    command = [sys.executable, "-m", "bufstore", "quarantine", "discard", "--help"]  # says ID…
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    ran = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (ran.returncode, b"ID\\u2026" in ran.stdout) == (0, True), ran.stderr


def test_an_error_has_nothing_that_a_terminal_obeys() -> None:
    """Regression: an id that Postgres quotes in an error could set the terminal's title and clear it."""

    @reporting_errors
    def command() -> None:
        raise StoreUnavailable(f"refused: {OBEYED}")

    with pytest.raises(Failure) as caught:
        command()
    assert caught.value.message.isprintable()
    assert "refused: a" in caught.value.message
