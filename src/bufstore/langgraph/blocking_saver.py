"""BufferedSaver: the same saver for code without an event loop."""

from __future__ import annotations

import builtins
import copy
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar, Unpack

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from bufstore.langgraph.history import History
from bufstore.langgraph.postgres.store import PostgresCheckpointStore
from bufstore.langgraph.protocol import CheckpointStore
from bufstore.langgraph.saver import AsyncBufferedSaver, SaverOptions
from bufstore.loop_thread import LoopThread, own_time_s
from bufstore.nats.session import Nats

P = ParamSpec("P")
T = TypeVar("T")

#: How many checkpoints of a list are fetched at once from the loop's thread.
_LIST = 50


class _SaverThread(LoopThread):
    """The saver's event loop."""

    @property
    def saver(self) -> AsyncBufferedSaver:
        saver: AsyncBufferedSaver = self._store
        return saver

    def run(self, work: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        return self._call(work, self._timeout_s + own_time_s(timeout_s))

    async def run_elsewhere(self, work: Callable[[], Awaitable[T]]) -> T:
        return await self._call_elsewhere(work, self._timeout_s)


def _blocking(
    method: Callable[Concatenate[AsyncBufferedSaver, P], Awaitable[T]],
) -> Callable[Concatenate[BufferedSaver, P], T]:
    """Return the method as a blocking one."""
    name = method.__name__

    @functools.wraps(method, assigned=("__doc__",))
    def call(self: BufferedSaver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._thread.run(lambda: getattr(self._inner, name)(*args, **kwargs))
        return result

    call.__name__ = name.removeprefix("a")
    return call


def _elsewhere(
    method: Callable[Concatenate[AsyncBufferedSaver, P], Awaitable[T]],
) -> Callable[Concatenate[BufferedSaver, P], Coroutine[Any, Any, T]]:
    """Return the method as one for the caller's own event loop."""
    name = method.__name__

    @functools.wraps(method, assigned=("__doc__", "__name__"))
    async def call(self: BufferedSaver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._thread.run_elsewhere(lambda: getattr(self._inner, name)(*args, **kwargs))
        return result

    return call


class BufferedSaver(BaseCheckpointSaver[str]):
    """An `AsyncBufferedSaver` whose calls block, in any thread: it has an event loop in a thread of its own.

    Use it in place of LangGraph's ``PostgresSaver``, with `from_conn_string`, or with `open` and `close`. Its
    asynchronous methods may be called on any event loop; a subclass that changes a method changes both forms. A call
    raises CallTimeout when it takes longer than `call_timeout_s` plus its own `timeout_s`, if it has one.
    """

    def __init__(
        self, open_saver: Callable[[], Awaitable[AsyncBufferedSaver]], *, call_timeout_s: float = 60.0
    ) -> None:
        self._thread = _SaverThread(open_saver, call_timeout_s=call_timeout_s)
        self._with_serde = saver = self._thread.saver
        # Where nobody has chosen a serializer for it, a subclass may have one of its own.
        super().__init__(serde=saver.serde if saver.serde is not BaseCheckpointSaver.serde else None)

    @property
    def _inner(self) -> AsyncBufferedSaver:
        """The saver that does the work, with the serializer that this one has now: `serde` may be set at any time."""
        saver = self._with_serde
        if saver.serde is not self.serde:
            self._with_serde = saver = copy.copy(saver)  # the other one may be at work, or a clone's
            saver.serde = self.serde
        return saver

    @classmethod
    def open(
        cls,
        store: CheckpointStore,
        *,
        nats: Nats = "nats://127.0.0.1:4222",
        call_timeout_s: float = 60.0,
        **options: Unpack[SaverOptions],
    ) -> Self:
        """See `AsyncBufferedSaver.open` for the options and errors."""
        return cls(lambda: AsyncBufferedSaver.open(store, nats=nats, **options), call_timeout_s=call_timeout_s)

    @classmethod
    @contextmanager
    def from_conn_string(
        cls,
        conn_string: str,
        nats: Nats = "nats://127.0.0.1:4222",
        *,
        schema: str | None = None,
        buffer_schema: str = "bufstore_langgraph",
        history: History = "all",
        pool_size: int = 16,
        call_timeout_s: float = 60.0,
        **options: Unpack[SaverOptions],
    ) -> Iterator[Self]:
        """See `AsyncBufferedSaver.from_conn_string`."""

        async def opened() -> AsyncBufferedSaver:
            store = PostgresCheckpointStore(
                conn_string, schema=schema, buffer_schema=buffer_schema, history=history, pool_size=pool_size
            )
            return await AsyncBufferedSaver.open(store, nats=nats, **options)

        saver = cls(opened, call_timeout_s=call_timeout_s)
        try:
            yield saver
        finally:
            saver.close()

    def setup(self) -> None:
        """Do nothing: see `AsyncBufferedSaver.setup`."""

    def close(self) -> None:
        """Finish the writes on their way, flush what this process still can, and end the thread. Idempotent."""
        self._thread.close()

    def force_flush(self, thread_id: str | None = None, *, timeout_s: float | None = None) -> None:
        """See `AsyncBufferedSaver.force_flush`."""
        self._thread.run(lambda: self._inner.force_flush(thread_id, timeout_s=timeout_s), timeout_s)

    health = _blocking(AsyncBufferedSaver.health)
    statistics = _blocking(AsyncBufferedSaver.statistics)
    put = _blocking(AsyncBufferedSaver.aput)
    put_writes = _blocking(AsyncBufferedSaver.aput_writes)
    get_tuple = _blocking(AsyncBufferedSaver.aget_tuple)
    delete_thread = _blocking(AsyncBufferedSaver.adelete_thread)
    delete_for_runs = _blocking(AsyncBufferedSaver.adelete_for_runs)
    copy_thread = _blocking(AsyncBufferedSaver.acopy_thread)
    prune = _blocking(AsyncBufferedSaver.aprune)
    get_delta_channel_history = _blocking(AsyncBufferedSaver.aget_delta_channel_history)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """See `AsyncBufferedSaver.alist`."""
        found = self._inner.alist(config, filter=filter, before=before, limit=limit)
        more = True
        while more:
            some, more, error = self._thread.run(lambda: _some(found))
            yield from some
            if error is not None:
                raise error

    def get_next_version(self, current: str | None, channel: None) -> str:
        """See `AsyncBufferedSaver.get_next_version`."""
        return self._inner.get_next_version(current, channel)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> BaseCheckpointSaver[str]:
        """Return a saver on the same event loop whose serializer may make objects of these classes, too."""
        inner = self._inner.with_allowlist(extra_allowlist)
        if inner is self._inner:
            return self
        assert isinstance(inner, AsyncBufferedSaver)
        clone = copy.copy(self)
        clone._with_serde, clone.serde = inner, inner.serde
        return clone

    # --- the same for code with an event loop of its own ------------------------------------------------------

    aput = _elsewhere(AsyncBufferedSaver.aput)
    aput_writes = _elsewhere(AsyncBufferedSaver.aput_writes)
    aget_tuple = _elsewhere(AsyncBufferedSaver.aget_tuple)
    adelete_thread = _elsewhere(AsyncBufferedSaver.adelete_thread)
    adelete_for_runs = _elsewhere(AsyncBufferedSaver.adelete_for_runs)
    acopy_thread = _elsewhere(AsyncBufferedSaver.acopy_thread)
    aprune = _elsewhere(AsyncBufferedSaver.aprune)
    aget_delta_channel_history = _elsewhere(AsyncBufferedSaver.aget_delta_channel_history)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """See `list`."""
        found = self._inner.alist(config, filter=filter, before=before, limit=limit)
        more = True
        while more:
            some, more, error = await self._thread.run_elsewhere(lambda: _some(found))
            for item in some:
                yield item
            if error is not None:
                raise error


class _Some(NamedTuple):
    """The next items of a list, whether there may be more, and the error that came behind them."""

    items: builtins.list[CheckpointTuple]
    more: bool
    error: Exception | None


async def _some(found: AsyncIterator[CheckpointTuple]) -> _Some:
    some: builtins.list[CheckpointTuple] = []
    try:
        async for item in found:
            some.append(item)
            if len(some) == _LIST:
                return _Some(some, True, None)
    except Exception as e:
        return _Some(some, False, e)
    return _Some(some, False, None)
