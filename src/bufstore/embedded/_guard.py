"""Keeps a server from outliving the process that owns it, and ends whole process trees.

Run as a script this is the guard: a small process between the owner and one server. It starts the server
as its child and then waits on standard input, a pipe whose other end only the owner holds. When the owner
closes the pipe, or dies in any way at all, the guard sees the end of the file and stops the server.
A pipe works on every Unix; a parent-death signal is Linux-only and tied to the forking thread.

The script imports nothing else from this project, so that it starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STOP_SECONDS = 8.0  # how long a server may take to stop gracefully before it is killed
KILL_SECONDS = 10.0  # how long the system may take to carry out SIGKILL or SIGSTOP


def find_process(pid: int) -> Any | None:
    """The psutil process of a pid, or None if there is none. Raises ImportError without psutil."""
    psutil = importlib.import_module("psutil")
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def alive(process: Any) -> bool:
    """Whether the process still runs. A zombie does not: its files, ports and memory are released."""
    return _status(process) not in ("zombie", "dead", "gone")


def _status(process: Any) -> str:
    psutil = importlib.import_module("psutil")
    try:
        return str(process.status()) if process.is_running() else "gone"
    except psutil.NoSuchProcess:
        return "gone"


def send(process: Any, number: int) -> None:
    """Send the process a signal, if it is still there."""
    psutil = importlib.import_module("psutil")
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)  # psutil refuses if the pid has meanwhile gone to another process


def tree(process: Any) -> list[Any]:
    """The process and everything below it, the process itself first."""
    psutil = importlib.import_module("psutil")
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition holds; return False if it does not hold within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def freeze(process: Any) -> list[Any]:
    """Suspend a whole tree and return its members once all of them stand still."""

    def still(one: Any) -> bool:
        return _status(one) in ("stopped", "zombie", "dead", "gone")

    # The parent comes first: once it stands still, it cannot start a child behind our back.
    send(process, signal.SIGSTOP)
    wait_until(lambda: still(process), KILL_SECONDS)
    members = tree(process)
    for member in members[1:]:
        send(member, signal.SIGSTOP)
    wait_until(lambda: all(still(member) for member in members), KILL_SECONDS)
    return members


def thaw(process: Any) -> None:
    """Resume a whole tree, the parent last, so that it finds its children running."""
    for member in reversed(tree(process)):
        send(member, signal.SIGCONT)


def kill(process: Any) -> bool:
    """End a whole tree with SIGKILL; return False if a member is still there after `KILL_SECONDS`."""
    members = freeze(process)
    for member in members:
        send(member, signal.SIGKILL)
    return wait_until(lambda: not any(alive(member) for member in members), KILL_SECONDS)


def end(process: Any, number: int) -> bool:
    """Stop a whole tree with this signal to its parent, or with SIGKILL if that takes too long."""
    thaw(process)  # a paused server would not see the signal
    send(process, number)
    return wait_until(lambda: not alive(process), STOP_SECONDS) or kill(process)


def _wait_for_owner(asked: threading.Event) -> None:
    if sys.stdin.buffer.read() == b"stop\n":
        asked.set()
    # The signal goes to the main thread in particular: it interrupts only the wait of the thread that gets it.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder.parent / "lock").unlink(missing_ok=True)
        folder.parent.rmdir()  # succeeds when no other server's folder is left in it


def main(folder: Path) -> None:
    """Run one server until it exits or the owner is gone. The first line of input says what to run."""
    order = json.loads(sys.stdin.buffer.readline())
    who: dict[str, Any] = {}
    if order["user"] is not None:
        who = {"user": order["user"][0], "group": order["user"][1], "extra_groups": []}
    server = subprocess.Popen(  # noqa: S603 - the owner's order, no shell
        order["argv"],
        cwd=folder,
        env=order["env"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),  # the server's log
        stderr=sys.stderr.fileno(),
        umask=0o077,
        **who,
    )
    asked = threading.Event()
    listener = threading.Thread(target=_wait_for_owner, args=(asked,), daemon=True)
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        record = {"server": [server.pid, order["argv"]], "guard": [os.getpid(), order["guard"]]}
        (folder / "run.new").write_text(json.dumps(record))
        (folder / "run.new").replace(folder / "run.json")
        sys.stdout.write(f"{server.pid}\n")
        sys.stdout.flush()
        listener.start()
        server.wait()
    except BrokenPipeError:  # the owner died before it read the pid
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # also the SIGTERM that the thread may yet send
        process = find_process(server.pid) if server.poll() is None else None
        if process is not None:
            end(process, order["signal"])
        server.poll()
        if order["temporary"] and listener.ident is not None:
            listener.join()  # while the owner lives, it may restart a server that died by itself
        if order["temporary"] and not asked.is_set():
            _remove(folder)
        os._exit(0)  # the thread may hold standard input in a read, which an ordinary exit would wait for


if __name__ == "__main__":
    main(Path(sys.argv[1]))
