"""A store belongs to the event loop that opened it: calls on other loops are refused, and break nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from bufstore import BufferedThreadStore, ConfigError, MemoryThreadStore, PostgresThreadStore
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore
from bufstore.langgraph import saver as saver_module
from bufstore.memory import MemoryNats
from bufstore.tokens import Locks
from helpers import Soft, elsewhere, interrupted_at, run_of
from langgraph_savers import checkpoint, config


async def test_a_store() -> None:
    async with await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats()) as store:
        await store.checkpoint("t", [1], run_of("t"))
        for call in (
            lambda: store.load_messages("t"),
            lambda: store.checkpoint("new", [1], run_of("new")),
            lambda: store.checkpoint_append("t", [2], run_of("t")),
            lambda: store.append_messages("t", [2]),
            lambda: store.force_flush("t"),
            store.force_flush_all,
        ):
            await elsewhere(call)
        await store.checkpoint_append("t", [2], run_of("t"))
        assert await store.load_messages("t") == [1, 2]
        assert await store.load_messages("new") is None
        await store.force_flush_all()


async def test_a_saver() -> None:
    saver = await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats())
    made: Any = checkpoint({}, {})
    for call in (
        lambda: saver.aget_tuple(config("t")),
        lambda: saver.aput(config("t"), made, {}, {}),
        saver.force_flush,
        saver.aclose,
    ):
        await elsewhere(call)
    at = await saver.aput(config("t"), made, {}, {})
    found = await saver.aget_tuple(config("t"))
    assert found is not None
    assert found.config == at
    await saver.aclose()
    await asyncio.to_thread(asyncio.run, saver.aclose())


@pytest.mark.timeout(30)
def test_a_blocking_call_of_a_saver_whose_loop_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "_START_S", 0.2)
    loop = asyncio.new_event_loop()
    saver = loop.run_until_complete(AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats()))
    with pytest.raises(ConfigError, match="does not run"):
        saver.get_tuple(config("t"))
    with ThreadPoolExecutor() as thread:  # the loop runs by now, or will soon
        assert loop.run_until_complete(loop.run_in_executor(thread, saver.get_tuple, config("t"))) is None
        stopped = thread.submit(saver._wait, lambda: _never(loop))
        loop.run_forever()
        with pytest.raises(ConfigError, match="event loop stopped during the call"):
            stopped.result()
    loop.run_until_complete(saver.aclose())
    loop.close()
    with pytest.raises(ConfigError, match="does not run"):
        saver.get_tuple(config("t"))


async def _never(loop: asyncio.AbstractEventLoop) -> None:
    loop.stop()
    await asyncio.Event().wait()


@pytest.mark.timeout(30)
def test_a_blocking_call_during_which_the_program_ends_is_no_success() -> None:
    """`asyncio.run` cancels the call; LangGraph's executor reports nothing of a bare CancelledError."""

    async def main() -> Future[None]:
        saver = await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats())
        begun = asyncio.Event()

        async def never() -> None:
            begun.set()
            await asyncio.Event().wait()

        called = thread.submit(saver._wait, never)
        await begun.wait()
        await saver.aclose()
        return called

    with ThreadPoolExecutor() as thread, pytest.raises(ConfigError, match="event loop stopped during the call"):
        asyncio.run(main()).result()


@pytest.mark.parametrize("error", [Soft, TimeoutError])
def test_a_signal_handlers_error_at_any_moment_of_a_savers_call_stops_nobody_else(error: type[Exception]) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def there(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    saver = there(AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats()))
    moment = 1
    while interrupted_at(moment, lambda: saver.get_tuple(config("t")), error):
        assert there(saver.aget_tuple(config("t"))) is None
        moment += 1
    assert moment > 10
    there(saver.aclose())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.mark.parametrize(
    "open_",
    [
        lambda: BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats()),
        lambda: AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats()),
        lambda: PostgresThreadStore("postgresql://127.0.0.1:1/x").open(),
        lambda: Locks.open("nats://127.0.0.1:1"),
    ],
)
def test_what_is_opened_on_another_loop_than_asyncios_says_so(open_: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """For example on trio."""
    with pytest.raises(ConfigError, match="no asyncio event loop"):
        open_().send(None)
