"""BufferedSaver: the same saver for code without an event loop."""

from __future__ import annotations

import asyncio
import builtins
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)

from bufstore.langgraph.history import History
from bufstore.langgraph.postgres.store import PostgresCheckpointStore
from bufstore.langgraph.protocol import CheckpointStore
from bufstore.langgraph.saver import AsyncBufferedSaver
from bufstore.loop_thread import LoopThread, own_time_s
from bufstore.nats.session import Nats

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


class BufferedSaver(BaseCheckpointSaver[str]):
    """An `AsyncBufferedSaver` whose calls block, in any thread: it has an event loop in a thread of its own.

    In place of LangGraph's ``PostgresSaver``. Use `from_conn_string`, or `open` and `close`. Its asynchronous methods
    wait in threads. `call_timeout_s` bounds every call beyond the saver's own times: CallTimeout.
    """

    def __init__(
        self, open_saver: Callable[[], Awaitable[AsyncBufferedSaver]], *, call_timeout_s: float = 60.0
    ) -> None:
        self._thread = _SaverThread(open_saver, call_timeout_s=call_timeout_s)
        self._inner = self._thread.saver
        super().__init__(serde=self._inner.serde)

    @classmethod
    def open(
        cls,
        store: CheckpointStore,
        *,
        nats: Nats = "nats://127.0.0.1:4222",
        call_timeout_s: float = 60.0,
        **options: Any,
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
        schema: str = "public",
        buffer_schema: str = "bufstore_langgraph",
        history: History = "all",
        pool_size: int = 16,
        call_timeout_s: float = 60.0,
        **options: Any,
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
        """Nothing: see `AsyncBufferedSaver.setup`."""

    def close(self) -> None:
        """Finish the writes on their way, flush what this process still can, and end the thread. Idempotent."""
        self._thread.close()

    def force_flush(self, thread_id: str | None = None, *, timeout_s: float | None = None) -> None:
        """See `AsyncBufferedSaver.force_flush`."""
        self._thread.run(lambda: self._inner.force_flush(thread_id, timeout_s=timeout_s), timeout_s)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `AsyncBufferedSaver.aput`."""
        return self._thread.run(lambda: self._inner.aput(config, checkpoint, metadata, new_versions))

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """See `AsyncBufferedSaver.aput_writes`."""
        self._thread.run(lambda: self._inner.aput_writes(config, writes, task_id, task_path))

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `AsyncBufferedSaver.aget_tuple`."""
        return self._thread.run(lambda: self._inner.aget_tuple(config))

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
        while some := self._thread.run(lambda: _some(found)):
            yield from some

    def delete_thread(self, thread_id: str) -> None:
        """See `AsyncBufferedSaver.adelete_thread`."""
        self._thread.run(lambda: self._inner.adelete_thread(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """See `AsyncBufferedSaver.adelete_for_runs`."""
        self._thread.run(lambda: self._inner.adelete_for_runs(run_ids))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """See `AsyncBufferedSaver.acopy_thread`."""
        self._thread.run(lambda: self._inner.acopy_thread(source_thread_id, target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """See `AsyncBufferedSaver.aprune`."""
        self._thread.run(lambda: self._inner.aprune(thread_ids, strategy=strategy))

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """See `AsyncBufferedSaver.aget_delta_channel_history`."""
        return self._thread.run(lambda: self._inner.aget_delta_channel_history(config=config, channels=channels))

    def get_next_version(self, current: str | None, channel: None) -> str:
        """See `AsyncBufferedSaver.get_next_version`."""
        return self._inner.get_next_version(current, channel)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> BaseCheckpointSaver[str]:
        """A saver on the same event loop whose serializer may make objects of these classes, too."""
        inner = self._inner.with_allowlist(extra_allowlist)
        if inner is self._inner:
            return self
        assert isinstance(inner, AsyncBufferedSaver)
        clone = copy.copy(self)
        clone._inner, clone.serde = inner, inner.serde
        return clone

    # --- the same for code with an event loop of its own ------------------------------------------------------

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `put`."""
        return await asyncio.to_thread(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """See `put_writes`."""
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `get_tuple`."""
        return await asyncio.to_thread(self.get_tuple, config)

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
        while some := await asyncio.to_thread(self._thread.run, lambda: _some(found)):
            for item in some:
                yield item

    async def adelete_thread(self, thread_id: str) -> None:
        """See `delete_thread`."""
        await asyncio.to_thread(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """See `delete_for_runs`."""
        await asyncio.to_thread(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """See `copy_thread`."""
        await asyncio.to_thread(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """See `prune`."""
        await asyncio.to_thread(self.prune, thread_ids, strategy=strategy)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """See `get_delta_channel_history`."""
        return await asyncio.to_thread(lambda: self.get_delta_channel_history(config=config, channels=channels))


async def _some(found: AsyncIterator[CheckpointTuple]) -> builtins.list[CheckpointTuple]:
    """The next items; none: there are no more."""
    some: builtins.list[CheckpointTuple] = []
    async for item in found:
        some.append(item)
        if len(some) == _LIST:
            break
    return some
