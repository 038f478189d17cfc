"""A forked command does and says what a started one does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from command_line import COMMAND, ENVIRONMENT
from forked_command import run
from thorough import seldom


@pytest.mark.parametrize(
    "arguments", [["flush"], *seldom(["--version"], ["status", "--nothing"], ["status", "--help"], ["flush", "--json"])]
)
def test_it_says_and_ends_with_what_a_started_one_does(arguments: list[str]) -> None:
    started = subprocess.run([*COMMAND, *arguments], input=b"", capture_output=True, env=ENVIRONMENT, timeout=60)
    forked = run(arguments, stdin=b"", env=ENVIRONMENT, timeout_s=60)
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_it_has_the_environment_and_the_folder_of_its_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").write_bytes(b"{}\n")
    found = [
        run(["import", name, *option], stdin=b"", env=ENVIRONMENT | more, timeout_s=60)
        for name, option, more in (
            ("here", [], {"BUFSTORE_NATS": "", "BUFSTORE_STREAM": "no name"}),
            ("elsewhere", ["--embedded"], {}),
        )
    ]
    assert [r.returncode for r in found] == [2, 2]
    assert b"LogConfig.stream" in found[0].stderr, found[0]
    assert b"elsewhere" in found[1].stderr, found[1]


def test_one_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    kill, killed = os.kill, list[int]()
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number) or kill(pid, number))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = ENVIRONMENT | {"BUFSTORE_NATS": f"nats://127.0.0.1:{silent.getsockname()[1]}", "BUFSTORE_POSTGRES": "x"}
        before = {p.pid for p in psutil.Process().children(recursive=True)}
        with pytest.raises(subprocess.TimeoutExpired):
            run(["status"], stdin=b"", env=env, timeout_s=1)
    assert signal.SIGKILL in killed
    # Of this process's own children one may be new, too: the one that forks commands.
    own = {p.pid for p in psutil.Process().children()}
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before | own]
    assert not psutil.wait_procs(left, timeout=10)[1]
