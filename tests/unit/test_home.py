"""What is used only by the process and on the loop that opened it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import asyncio, ctypes, os, socket, threading
from bufstore.home import Home, owned_here

async def opens():
    Home()

def opens_its_own():
    # In a thread: from 3.14 on the child's own is in the parent's loop, because nobody tells Python of the fork.
    thread = threading.Thread(target=lambda: asyncio.new_event_loop().run_until_complete(opens()))
    thread.start()
    thread.join()

async def main():
    home, (ours, theirs) = Home(), socket.socketpair()
    theirs.settimeout(10)
    owned_here(ours)
    child = {fork}()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        home.check()
        ours.send(b"the parent's")
        assert theirs.recv(100) == b"the parent's"
        return
    said = ""
    try:
        {first}
        ours.send(b"the child's")
    except BaseException as e:
        said = type(e).__name__
    try:
        home.check()
    except BaseException as e:
        said += " " + str(e)
    os._exit(said != "{expected} a store cannot be used after a fork: open one in each process")

asyncio.run(main())
"""


@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"])
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("home.check()", "ConfigError"),
        # The child opens something of its own.
        ("opens_its_own()", "BrokenPipeError"),
        ("owned_here(theirs)", "BrokenPipeError"),
        ("home.left", "BrokenPipeError"),
    ],
)
def test_a_fork_is_noticed_though_nobody_tells_python_of_it(fork: str, first: str, expected: str) -> None:
    """Regression: uWSGI forks in C, so both of its workers used the connections of the process that had opened them."""
    script = _SCRIPT.format(fork=fork, first=first, expected=expected)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr.decode()
