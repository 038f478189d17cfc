"""A process ends as it wants to, though event loops of its other threads are busy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bufstore.lasting_executor import LastingExecutor

#: A timer comes when Python has taken itself apart, and the C library takes a second longer than usual to end the
#: process. (Its `sleep` gets the exit code, which is 1.) A timer that comes before the interpreter's end is set again:
#: a machine may stand still for longer. What says that the end has come is registered first, so it runs last.
_SLOW_END = """
import asyncio, atexit, ctypes, sys
library = ctypes.CDLL(None)
assert library.on_exit(library.sleep, None) == 0
came = []
atexit.register(came.append, "the end")
async def start():
    def look():
        if came:
            print("too late")
        loop.call_later(0.5, look)
    loop = asyncio.get_running_loop()
    loop.call_later(0.5, look)
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
@pytest.mark.parametrize(
    "opening", [pytest.param(_SPARK, id="spark"), pytest.param(_BLOCKING, id="blocking", marks=pytest.mark.long)]
)
def test_a_busy_loop_of_another_thread_stands_still(opening: str) -> None:
    pytest.importorskip("uvloop", reason="only uvloop's loops end the process with SIGSEGV")
    assert _ended(f"{_SLOW_END}\n{opening}\nsys.exit(1)") == (1, "", "")


_CLOSING = """
from bufstore.loop_thread import LoopThread
async def lasting():
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(1)
class Store:
    async def aclose(self):
        self.task = asyncio.create_task(lasting())
        closing.set()
async def opened():
    return Store()
import threading
import uvloop
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
closing, store = threading.Event(), LoopThread(opened, call_timeout_s=5)
threading.Thread(target=store.close, daemon=True).start()
closing.wait()
import time
time.sleep(0.2)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's C library has on_exit")
def test_a_loop_that_is_being_closed_stands_still() -> None:
    pytest.importorskip("uvloop", reason="only uvloop's loops end the process with SIGSEGV")
    assert _ended(f"{_SLOW_END}\n{_CLOSING}\nsys.exit(1)") == (1, "", "")


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
atexit.register(use, "early")
async def opened():
    return bufstore.MemoryThreadStore()
stores = {"late": bufstore.BlockingThreadStore(opened), "early": bufstore.BlockingThreadStore(opened)}
"""
    code, out, err = _ended(program)
    assert (code, err) == (0, "")
    closed = "Closed('the interpreter is shutting down: use and close the store before that')"
    assert out.splitlines() == ["early None", f"late {closed}"]


@pytest.mark.parametrize(
    "call",
    [
        "from bufstore.loop_thread import LoopThread; call = LoopThread(opened, call_timeout_s=300)._call; wait = 300",
        "from bufstore.spark.process_loop import loop; call = lambda work, _: loop().run(work()); wait = None",
    ],
    ids=["blocking", "spark"],
)
def test_a_call_on_its_way_ends(call: str) -> None:
    """An app's handler may wait for a thread that makes it."""
    program = f"""
import asyncio, atexit, threading
def join():
    worker.join()
    print(*said)
atexit.register(join)
import bufstore
async def opened():
    return None
async def lasting():
    begun.set()
    await asyncio.sleep(3600)
def work():
    try:
        call(lasting, wait)
    except bufstore.Closed as e:
        said.append("Closed")
{call}
begun, said, worker = threading.Event(), [], threading.Thread(target=work, daemon=True)
worker.start()
begun.wait()
"""
    assert _ended(program) == (0, "Closed\n", "")


def test_host_names_are_looked_up_to_the_end() -> None:
    program = """
import atexit
import asyncio
import bufstore
from bufstore.loop_thread import LoopThread
async def opened():
    return None
async def found():
    return bool(await asyncio.get_running_loop().getaddrinfo("localhost", 1))
atexit.register(lambda: print(store._call(found, 30)))
store = LoopThread(opened, call_timeout_s=5)
"""
    assert _ended(program) == (0, "True\n", "")


def test_a_pool_that_was_shut_down_says_so_while_the_app_runs() -> None:
    pool = LastingExecutor(1)
    assert pool.submit(len, "abc").result() == 3
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(len, "abc")


def test_a_fork_waits_for_no_loop_of_its_parent() -> None:
    program = """
import os, sys, time, warnings
from bufstore import MemoryThreadStore
from bufstore.blocking import BlockingThreadStore
warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on, Python warns of forks beside threads
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
