"""The same stores for code without an event loop: each call runs on a loop in another thread and waits.

    with BlockingThreadStore(lambda: BufferedThreadStore.open(PostgresThreadStore(dsn), nats=url)) as store:
        store.checkpoint("thread-1", messages, run)

The methods are generated from those of the asynchronous stores and have their types. Any number of threads may call at
once; their calls run side by side on the one loop. gevent runs all patched threads as one, where only one loop can run:
such a process can have one store, which greenlets share. In a subinterpreter, close the store before it ends.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from bufstore.buffer.operate.quarantine import Quarantine
from bufstore.loop_thread import LoopThread, own_time_s
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.bulk import BulkWriter
from bufstore.threads.protocol import ThreadRunStore

P = ParamSpec("P")
R = TypeVar("R")


def _blocking(
    method: Callable[Concatenate[Any, P], Awaitable[R]], *, as_long_as_it_takes: bool = False
) -> Callable[Concatenate[BlockingThreadStore | _Part, P], R]:
    """Return the method as a blocking one. `as_long_as_it_takes`: `call_timeout_s` does not bound it."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: BlockingThreadStore | _Part, /, *args: P.args, **kwargs: P.kwargs) -> R:
        timeout_s = None if as_long_as_it_takes else self._timeout_s + own_time_s(kwargs.get("timeout_s"))
        result: R = self._call(lambda: getattr(self._store, name)(*args, **kwargs), timeout_s)
        return result

    return call


class BlockingThreadStore(LoopThread):
    """A `ThreadRunStore` whose calls block. Use ``with``, or `close` it.

    `open_store` makes the store, on the loop, where a BufferedThreadStore also opens what it keeps; its errors pass
    through. A call raises CallTimeout when it takes longer than `call_timeout_s` plus its own `timeout_s`, if it has
    one (`erase` may take longer); Closed after `close`, or when `close` overtakes it; ConfigError on the loop's own
    thread, where it would wait for itself.
    """

    def __init__(self, open_store: Callable[[], Awaitable[ThreadRunStore]], *, call_timeout_s: float = 60.0) -> None:
        super().__init__(open_store, call_timeout_s=call_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    checkpoint = _blocking(ThreadRunStore.checkpoint)
    checkpoint_append = _blocking(ThreadRunStore.checkpoint_append)
    load_checkpoint = _blocking(ThreadRunStore.load_checkpoint)
    load_thread = _blocking(ThreadRunStore.load_thread)
    load_messages = _blocking(ThreadRunStore.load_messages)
    load_run = _blocking(ThreadRunStore.load_run)
    latest_run = _blocking(ThreadRunStore.latest_run)
    load_thread_state = _blocking(ThreadRunStore.load_thread_state)
    query_messages = _blocking(ThreadRunStore.query_messages)
    load_message = _blocking(ThreadRunStore.load_message)
    load_message_range = _blocking(ThreadRunStore.load_message_range)
    query_runs = _blocking(ThreadRunStore.query_runs)
    query_threads = _blocking(ThreadRunStore.query_threads)
    create_run = _blocking(ThreadRunStore.create_run)
    save_thread = _blocking(ThreadRunStore.save_thread)
    update_metadata = _blocking(ThreadRunStore.update_metadata)
    save_thread_state = _blocking(ThreadRunStore.save_thread_state)
    append_messages = _blocking(ThreadRunStore.append_messages)
    delete_messages = _blocking(ThreadRunStore.delete_messages)
    set_parent = _blocking(ThreadRunStore.set_parent)
    delete_thread = _blocking(ThreadRunStore.delete_thread)


class _Part:
    """A part of a store, called on the store's loop."""

    def __init__(self, whole: BlockingThreadStore, part: object) -> None:
        self._whole = whole
        self._store = part
        self._timeout_s = whole._timeout_s

    def _call(self, work: Callable[[], Awaitable[R]], timeout_s: float | None) -> R:
        return self._whole._call(work, timeout_s)


class BlockingQuarantine(_Part):
    """`bufstore.buffer.operate.quarantine.Quarantine`, whose calls block."""

    count = _blocking(Quarantine.count)
    page = _blocking(Quarantine.page)
    show = _blocking(Quarantine.show)
    replay = _blocking(Quarantine.replay)
    replay_thread = _blocking(Quarantine.replay_thread)
    threads = _blocking(Quarantine.threads)
    discard = _blocking(Quarantine.discard)


class BlockingBulkWriter(_Part):
    """`bufstore.threads.bulk.BulkWriter`, whose calls block."""

    learn_new = _blocking(BulkWriter.learn_new)
    claim = _blocking(BulkWriter.claim)
    write = _blocking(BulkWriter.write)
    edit = _blocking(BulkWriter.edit)
    delete = _blocking(BulkWriter.delete)


class _BufferedCalls:
    """The calls of a `BufferedThreadStore`.

    `BlockingBufferedStore` does not assign them itself, because type checkers would then give them the types that they
    have in its base class.
    """

    checkpoint = _blocking(BufferedThreadStore.checkpoint)
    checkpoint_append = _blocking(BufferedThreadStore.checkpoint_append)
    load_checkpoint = _blocking(BufferedThreadStore.load_checkpoint)
    load_thread = _blocking(BufferedThreadStore.load_thread)
    load_messages = _blocking(BufferedThreadStore.load_messages)
    load_run = _blocking(BufferedThreadStore.load_run)
    latest_run = _blocking(BufferedThreadStore.latest_run)
    load_thread_state = _blocking(BufferedThreadStore.load_thread_state)
    query_messages = _blocking(BufferedThreadStore.query_messages)
    load_message = _blocking(BufferedThreadStore.load_message)
    load_message_range = _blocking(BufferedThreadStore.load_message_range)
    query_runs = _blocking(BufferedThreadStore.query_runs)
    query_threads = _blocking(BufferedThreadStore.query_threads)
    erase = _blocking(BufferedThreadStore.erase, as_long_as_it_takes=True)
    force_flush = _blocking(BufferedThreadStore.force_flush)
    force_flush_all = _blocking(BufferedThreadStore.force_flush_all)
    statistics = _blocking(BufferedThreadStore.statistics)
    health = _blocking(BufferedThreadStore.health)
    quarantined = _blocking(BufferedThreadStore.quarantined)
    verify = _blocking(BufferedThreadStore.verify)
    lag = _blocking(BufferedThreadStore.lag)


class BlockingBufferedStore(_BufferedCalls, BlockingThreadStore):
    """A `BufferedThreadStore` whose calls block: with levels and receipts for reads, and the operator's methods."""

    def __init__(
        self, open_store: Callable[[], Awaitable[BufferedThreadStore]], *, call_timeout_s: float = 60.0
    ) -> None:
        super().__init__(open_store, call_timeout_s=call_timeout_s)

    @property
    def bulk(self) -> BlockingBulkWriter:
        """See `BufferedThreadStore.bulk`."""
        return BlockingBulkWriter(self, self._store.bulk)

    @property
    def quarantine(self) -> BlockingQuarantine:
        """See `BufferedThreadStore.quarantine`."""
        return BlockingQuarantine(self, self._store.quarantine)

    def quarantine_of(self, thread_id: str) -> BlockingQuarantine:
        """See `BufferedThreadStore.quarantine_of`."""
        return BlockingQuarantine(self, self._store.quarantine_of(thread_id))
