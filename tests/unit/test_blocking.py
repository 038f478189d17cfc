"""The blocking facade, over the store in memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from bufstore import (
    BlockingBufferedStore,
    BlockingThreadStore,
    BufferedThreadStore,
    CallTimeout,
    Closed,
    ConfigError,
    MemoryThreadStore,
    NotFound,
    Run,
    ThreadRunStore,
    VersionConflict,
    loop_thread,
)
from bufstore.blocking import BlockingBulkWriter, BlockingQuarantine
from bufstore.buffer.operate.quarantine import Quarantine
from bufstore.loop_thread import Call, LoopThread
from bufstore.memory import MemoryNats
from bufstore.tasks import StrayCancelledError, see_error
from bufstore.threads.bulk import BulkCheckpoint, BulkWriter
from helpers import Soft, eventually, interrupted_at


class Slow(MemoryThreadStore):
    """A store whose reads take long, and that counts cancelled reads and closes."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = 0
        self.begun = 0
        self.cancelled = 0

    async def load_messages(self, thread_id: str) -> list[Any] | None:
        self.begun += 1
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return None

    async def aclose(self) -> None:
        self.closed += 1


def facade(store: MemoryThreadStore, **options: Any) -> BlockingThreadStore:
    async def open_store() -> MemoryThreadStore:
        asyncio.get_running_loop()
        return store

    return BlockingThreadStore(open_store, **options)


def public(kind: type[Any]) -> set[str]:
    return {name for name, what in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_it_has_every_method() -> None:
    assert public(BlockingThreadStore) == public(ThreadRunStore) - {"aclose"} | {"close"}
    assert public(BlockingBufferedStore) == {
        name for name in public(BufferedThreadStore) - {"aclose"} | {"close"} if name != "open"
    }


def test_the_parts_have_every_method() -> None:
    assert public(BlockingQuarantine) == public(Quarantine)
    assert public(BlockingBulkWriter) == public(BulkWriter)


def test_the_quarantine_and_bulk_writes_of_a_blocking_store() -> None:
    open_store = partial(BufferedThreadStore.open, MemoryThreadStore(), nats=MemoryNats())
    with BlockingBufferedStore(open_store) as store:
        run = Run(run_id="r", thread_id="t")
        store.bulk.learn_new(["t"])
        store.bulk.claim([run])
        series = store.bulk.write("t", [BulkCheckpoint([1], run, True), BulkCheckpoint([2], run, False)])
        assert (len(series.receipts), series.error) == (2, None)
        assert store.load_messages("t") == [1, 2]
        assert (store.quarantine.count(), list(store.quarantine.page())) == (0, [])
        with pytest.raises(NotFound):
            store.quarantine.show(1)
        assert list(store.quarantine.replay_thread("t")) == []
    with pytest.raises(Closed):
        store.quarantine.count()


def test_calls_return_and_raise_what_the_store_does() -> None:
    with facade(MemoryThreadStore()) as store:
        run = Run(run_id="r", thread_id="t")
        assert store.checkpoint("t", [1], run, idempotency_key="k").version == 1
        assert store.load_messages("t") == [1]
        with pytest.raises(VersionConflict):
            store.checkpoint_append("t", [2], run, expected_version=7)
        with pytest.raises(TypeError):
            store.load_messages()  # type: ignore[call-arg]
    with pytest.raises(Closed):
        store.load_messages("t")
    store.close()


def test_many_threads_call_at_once() -> None:
    with facade(MemoryThreadStore()) as store, ThreadPoolExecutor(16) as threads:
        run = Run(run_id="r", thread_id="t")
        receipts = list(threads.map(lambda n: store.checkpoint_append("t", [{"id": str(n)}], run), range(200)))
        assert sorted(r.version for r in receipts) == list(range(1, 201))


async def test_calls_of_another_loop_take_no_thread_of_it_and_end_with_their_callers() -> None:
    """They waited in threads of the caller's executor, which a cancel did not free: nor did it end the calls."""
    slow = Slow()
    store = await asyncio.to_thread(facade, slow)
    try:
        calls = [asyncio.create_task(store._call_elsewhere(lambda: slow.load_messages("t"), 60)) for _ in range(200)]
        assert await store._call_elsewhere(lambda: slow.load_thread("t"), 60) is None

        async def begun(number: int) -> bool:
            return slow.begun == number

        await eventually(lambda: begun(200))
        async with asyncio.timeout(10):
            await asyncio.to_thread(int)
        for call in calls:
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(e) for e in ended} == {asyncio.CancelledError}

        async def cancelled() -> bool:
            return slow.cancelled == len(calls)

        await eventually(cancelled)
        with pytest.raises(VersionConflict):
            await store._call_elsewhere(lambda: slow.append_messages("t", [1], expected_version=7), 60)
        with pytest.raises(CallTimeout):
            await store._call_elsewhere(lambda: slow.load_messages("t"), 0.05)

        async def goes_on() -> None:
            """Calls again after a cancel that it has swallowed."""
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await store._call_elsewhere(lambda: slow.load_messages("t"), 60)

        last = asyncio.create_task(goes_on())
        await asyncio.sleep(0)
        last.cancel()
        await eventually(lambda: begun(202))  # with the one that ran out of time
        assert await store._call_elsewhere(lambda: slow.load_thread("t"), 60) is None
    finally:
        await asyncio.to_thread(store.close)
    with pytest.raises(Closed):
        await last
    with pytest.raises(Closed):
        await store._call_elsewhere(lambda: slow.load_thread("t"), 60)


def test_calls_are_bounded_in_time() -> None:
    slow = Slow()
    with facade(slow, call_timeout_s=60) as store:
        store._timeout_s = 0.1
        began = time.monotonic()
        with pytest.raises(CallTimeout):
            store.load_messages("t")
        assert time.monotonic() - began < 15, "half of what the read takes"
        store._timeout_s = 60.0
        assert store.load_thread("t") is None
        assert slow.cancelled == 1
    assert slow.closed == 1


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), None, "5", True])
def test_a_time_for_calls_that_is_none_is_refused_before_anything_is_opened(wrong: Any) -> None:
    async def open_store() -> MemoryThreadStore:
        pytest.fail("it is opened")

    with pytest.raises(ConfigError, match=r"call_timeout_s must be a number above 0"):
        BlockingThreadStore(open_store, call_timeout_s=wrong)


@pytest.mark.parametrize("call_timeout_s", [1e12, float("inf")])
def test_a_time_for_calls_may_be_without_end(call_timeout_s: float) -> None:
    with facade(MemoryThreadStore(), call_timeout_s=call_timeout_s) as store:
        assert store.load_thread("t") is None


def test_a_flush_has_the_time_it_was_given() -> None:
    lasts_s = 0.3

    class Lasting(BufferedThreadStore):
        async def force_flush_all(self, *, timeout_s: float | None = None) -> None:
            await asyncio.sleep(lasts_s)

    open_store = partial(Lasting.open, MemoryThreadStore(), nats=MemoryNats())
    with BlockingBufferedStore(open_store, call_timeout_s=60) as store:
        store._timeout_s = 0.2
        for given_s in (60, 1e11, float("inf")):
            store.force_flush_all(timeout_s=given_s)
        lasts_s = 3600.0
        with pytest.raises(CallTimeout):
            store.force_flush_all(timeout_s=0.01)
        store._timeout_s = 60.0


def test_close_ends_the_calls_on_their_way() -> None:
    store = facade(Slow())
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(store.load_messages, "t") for _ in range(4)]
        time.sleep(0.1)
        store.close()
        for call in calls:
            with pytest.raises(Closed):
                call.result(5)
    assert not any(t.name == "bufstore-blocking" for t in threading.enumerate())


def test_an_open_that_fails_leaves_no_thread() -> None:
    async def refuse() -> MemoryThreadStore:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        BlockingThreadStore(refuse)
    assert not any(t.name == "bufstore-blocking" for t in threading.enumerate())


def test_an_open_that_is_given_up_may_need_the_other_tasks_to_end() -> None:
    """Regression: they were cancelled beside it, and it waited for them until the loop gave up, five seconds later."""
    asked, ended = asyncio.Event(), list[str]()

    async def answers() -> None:
        await asked.wait()
        ended.append("asked")
        asked.clear()

    async def open_store() -> None:
        answering = asyncio.create_task(answers())
        try:
            await asyncio.Event().wait()
        finally:
            asked.set()
            await answering
            ended.append("opened")

    with pytest.raises(CallTimeout):
        LoopThread(open_store, call_timeout_s=0.1)
    assert ended == ["asked", "opened"]


def test_a_call_that_does_not_end_leaves_the_others_time_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "_ENDS_S", 0.1)
    let_go, ended = asyncio.Event(), list[str]()

    async def cleans() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.append("cleaned")
            let_go.set()

    async def open_store() -> None:
        beside = asyncio.create_task(cleans())
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()
        await asyncio.wait([beside])

    with pytest.raises(CallTimeout):
        LoopThread(open_store, call_timeout_s=1)  # it waits as long for its thread
    assert ended == ["cleaned"]


def test_it_does_not_wait_for_itself() -> None:
    class Recursive(MemoryThreadStore):
        async def load_thread(self, thread_id: str) -> Any:
            return blocking.load_messages(thread_id)

    with facade(Recursive()) as blocking, pytest.raises(ConfigError):
        blocking.load_thread("t")


def in_a_call(store: BlockingThreadStore, handler: Callable[[], None]) -> None:
    """Run `handler` as a signal handler that interrupts its thread while a call holds its lock."""
    begin = Call.begin

    def interrupted(call: Call[Any]) -> None:
        begin(call)
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(Call, "begin", begin)
            handler()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Call, "begin", interrupted)
        store.load_thread("t")


@pytest.mark.parametrize("error", [Soft, TimeoutError])
def test_a_signal_handlers_error_at_any_moment_of_a_call_stops_nobody_else(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with facade(MemoryThreadStore(), call_timeout_s=30) as store, ThreadPoolExecutor(1) as other:

        def fail() -> None:
            with contextlib.suppress(TypeError):
                store.load_messages()  # type: ignore[call-arg]

        moment = 1
        while interrupted_at(moment, fail, error):
            assert other.submit(store.load_thread, "t").result() is None
            moment += 1
        assert moment > 10
    gc.collect()
    assert [r.getMessage() for r in caplog.records] == [], "of a call that was given up nobody takes the error"


def test_a_call_that_comes_as_the_loop_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would begin on a loop that does not end it."""
    with facade(MemoryThreadStore()) as store:
        with monkeypatch.context() as ending:
            ending.setattr(store, "_serves", False)
            with pytest.raises(Closed):
                store.load_thread("t")
        assert store.load_thread("t") is None


def test_of_two_threads_that_close_a_store_one_does() -> None:
    closing, go_on = threading.Event(), threading.Event()
    closed = []

    class Slow(MemoryThreadStore):
        async def aclose(self) -> None:
            closed.append(self)
            closing.set()
            await asyncio.to_thread(go_on.wait, 10)

    store = facade(Slow())
    with ThreadPoolExecutor(1) as other:
        first = other.submit(store.close)
        assert closing.wait(10)
        store.close()
        go_on.set()
        first.result(10)
    assert len(closed) == 1


def test_a_signal_handler_may_close_the_store_in_the_middle_of_a_call() -> None:
    store = facade(MemoryThreadStore(), call_timeout_s=10)
    ended: list[BaseException] = []

    def call() -> None:
        try:
            in_a_call(store, store.close)
        except BaseException as e:
            ended.append(e)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(5)
    assert [type(e) for e in ended] in ([], [Closed])
    assert not caller.is_alive()
    assert not any(t.name == "bufstore-blocking" for t in threading.enumerate())


def test_a_call_that_ends_just_when_its_caller_gives_up_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            found = super().get(block, 10)
            if timeout:
                self.put(found)
                raise queue.Empty
            return found

    monkeypatch.setattr(queue, "SimpleQueue", Late)
    with facade(MemoryThreadStore(), call_timeout_s=0.05) as store:
        assert store.load_thread("t") is None


def test_a_loop_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> Any:
        raise OSError("too many open files")

    monkeypatch.setattr(asyncio, "new_event_loop", none_left)
    with pytest.raises(OSError, match="too many"):
        facade(MemoryThreadStore())


def test_what_wants_to_end_the_process_ends_one_call() -> None:
    """Regression: SystemExit ended the loop; its caller and all others waited for all of their time."""

    async def refuse() -> MemoryThreadStore:
        sys.exit("no DSN")

    with pytest.raises(SystemExit, match="no DSN"):
        BlockingThreadStore(refuse)

    class Exits(MemoryThreadStore):
        async def load_run(self, run_id: str) -> Any:
            raise SystemExit(3)

    with facade(Exits()) as store:
        with pytest.raises(SystemExit):
            store.load_run("r")
        assert store.load_messages("t") is None


def test_a_call_whose_loop_has_died_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it waited for as long as a call may take."""
    monkeypatch.setattr(loop_thread, "_LOOKS_S", 0.01)

    async def exits() -> None:
        raise SystemExit

    class Dies(MemoryThreadStore):
        async def load_thread(self, thread_id: str) -> Any:
            asyncio.create_task(exits()).add_done_callback(see_error)
            await asyncio.Event().wait()

    store = facade(Dies(), call_timeout_s=20)
    with pytest.raises(Closed):
        store.load_thread("t")
    with pytest.raises(Closed):
        store.close()


def test_a_loop_beside_another_in_one_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """gevent makes threads out of greenlets of one thread. Regression: the error said that the store was closed."""

    def run_forever(self: asyncio.AbstractEventLoop) -> None:
        raise RuntimeError("another loop is running")

    monkeypatch.setattr(asyncio.BaseEventLoop, "run_forever", run_forever)
    with pytest.raises(ConfigError, match="another loop is running"):
        facade(MemoryThreadStore())


def test_a_time_limit_while_the_thread_begins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the thread and its event loop stayed for good."""
    wait = threading.Event.wait

    def interrupted(self: threading.Event, timeout: float | None = None) -> bool:
        monkeypatch.setattr(threading.Event, "wait", wait)
        wait(self, timeout)
        raise Soft

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(Soft):
        facade(MemoryThreadStore())
    for thread in threading.enumerate():
        if thread.name == "bufstore-blocking":
            thread.join(10)
            assert not thread.is_alive()


def test_what_an_apps_store_has_cancelled_itself_is_no_close() -> None:
    """Regression: the error said that the store was closed before the call ended."""

    class Resets(MemoryThreadStore):
        async def load_messages(self, thread_id: str) -> list[Any] | None:
            answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            answer.cancel()
            return await answer

    with facade(Resets()) as store, pytest.raises(StrayCancelledError):
        store.load_messages("t")


def test_the_loop_closes_not_itself() -> None:
    class Closing(MemoryThreadStore):
        async def query_runs(self, *_: Any, **__: Any) -> Any:
            blocking.close()

    with facade(Closing()) as blocking:
        with pytest.raises(ConfigError):
            blocking.query_runs("t")
        assert blocking.load_thread("t") is None


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_is_told_that_the_store_is_its_parents() -> None:
    with facade(MemoryThreadStore()) as store:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                store.load_thread("t")
            except ConfigError as e:
                os.write(writer, str(e).encode())
            store.close()
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as told:
            assert b"in each process" in told.read()
        assert os.waitpid(child, 0)[1] == 0
        assert store.load_thread("t") is None


def test_an_interpreter_that_ends_waits_for_no_close() -> None:
    """For example when an app's object closes its store in `__del__`, and lives until the interpreter ends."""
    program = """
from bufstore import MemoryThreadStore
from bufstore.blocking import BlockingThreadStore
async def opened():
    return MemoryThreadStore()
class App:
    def __init__(self):
        self.store, self.me = BlockingThreadStore(opened), self
    def __del__(self):
        self.store.close()
        print("closed")
app = App()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert (ended.stdout, ended.stderr) == ("closed\n", "")
