"""A process ends as it wants to, though event loops of its other threads are busy."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A timer comes when Python has taken itself apart, and the C library takes a second longer than usual to end the
#: process. (Its `sleep` gets the exit code, which is 1.)
_SLOW_END = """
import asyncio, ctypes, sys
library = ctypes.CDLL(None)
assert library.on_exit(library.sleep, None) == 0
async def start():
    return asyncio.get_running_loop().call_later(0.5, print, "too late")
"""
_SPARK = "from bufstore.spark.process_loop import loop; loop().run(start())"
_BLOCKING = """
import uvloop
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
from bufstore.loop_thread import LoopThread
store = LoopThread(start, call_timeout_s=5)
"""


def _ended(program: str) -> tuple[int, str, str]:
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    return found.returncode, found.stdout, found.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's C library has on_exit")
@pytest.mark.parametrize("opening", [_SPARK, _BLOCKING], ids=["spark", "blocking"])
def test_a_busy_loop_of_another_thread_stands_still(opening: str) -> None:
    pytest.importorskip("uvloop", reason="only uvloop's loops end the process with SIGSEGV")
    assert _ended(f"{_SLOW_END}\n{opening}\nsys.exit(1)") == (1, "", "")


def test_what_an_app_registers_after_its_imports_uses_its_store() -> None:
    """What was registered before bufstore was imported comes too late; it is told at once."""
    program = """
import atexit
def use(name):
    store = stores[name]
    try:
        print(name, store.load_thread("t"))
    except bufstore.BufstoreError as e:
        print(name, repr(e))
    store.close()
atexit.register(use, "late")
import bufstore
from bufstore.blocking import BlockingThreadStore
async def opened():
    return bufstore.MemoryThreadStore()
atexit.register(use, "early")
stores = {"late": BlockingThreadStore(opened), "early": BlockingThreadStore(opened)}
"""
    code, out, err = _ended(program)
    assert (code, err) == (0, "")
    closed = "Closed('the interpreter ends: call the store, and close it, before that')"
    assert out.splitlines() == ["early None", f"late {closed}"]


def test_a_fork_waits_for_no_loop_of_its_parent() -> None:
    program = """
import os, sys, time
from bufstore import MemoryThreadStore
from bufstore.blocking import BlockingThreadStore
async def opened():
    return MemoryThreadStore()
store = BlockingThreadStore(opened)
if os.fork() == 0:
    sys.exit(3)
_, status = os.wait()
print(os.waitstatus_to_exitcode(status), store.load_thread("t"))
store.close()
"""
    assert _ended(program) == (0, "3 None\n", "")
