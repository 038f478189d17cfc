"""How a command ends: by Ctrl-C, when nobody reads what it prints, and when it was given no streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

import bufstore.cli
from bufstore.cli.operate.permissions import permissions
from bufstore.cli.running import Commands, Failure, Problem, reporting_errors


def command(error: BaseException) -> click.Group:
    """Return an app with a command that raises the error."""

    @reporting_errors
    def work(as_json: bool) -> None:
        raise error

    option = click.Option(["--json", "as_json"], is_flag=True)
    return Commands(commands=[click.Command("work", callback=work, params=[option])])


def test_ctrl_c_is_said_in_json_too() -> None:
    result = CliRunner().invoke(command(KeyboardInterrupt()), ["work", "--json"])
    assert msgspec.json.decode(result.stdout, type=Problem) == Problem(
        code=130, error="Interrupted", message="interrupted"
    )
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_ctrl_c_while_the_modules_are_loaded_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bufstore.cli, "_main", interrupted)
    with pytest.raises(SystemExit) as ended:
        bufstore.cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    """It was told as one, with the exit code for servers that do not answer."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bufstore", "permissions", "app"], stdout=writer, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
    with pytest.raises(BrokenPipeError):
        command(BrokenPipeError()).main(["work"], standalone_mode=False)


def test_a_failure_that_cannot_be_printed_as_json_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(click, "echo", full)
    with pytest.raises(Failure, match="why"):
        command(Failure("why")).main(["work", "--json"], standalone_mode=False)


def test_permissions_that_cannot_be_written_are_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(click, "echo", full)
    with pytest.raises(Failure, match="no space left"):
        permissions.main(["app"], standalone_mode=False)


def test_no_socket_gets_the_number_of_a_standard_stream_that_was_closed(tmp_path: Path) -> None:
    """uvloop aborts the process when it closes one."""
    code = (
        "import socket, sys; from bufstore import cli; cli._have_standard_streams(); "
        "made = socket.socket().fileno(); print(1); print(2, file=sys.stderr); sys.stdin.read(); "
        "open(sys.argv[1], 'w').write(str(made))"
    )
    found = tmp_path / "number"
    shell = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", code, str(found)]
    assert subprocess.run(shell, timeout=60).returncode == 0
    assert int(found.read_text()) > 2
