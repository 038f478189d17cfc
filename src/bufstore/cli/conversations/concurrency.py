"""Doing many things at once, but not too many."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from bufstore.tasks import spawn

T = TypeVar("T")

#: How many seconds after its last item a batch waits for another.
_GATHER_S = 0.02


class MemoryBudget:
    """Bounds how much is held in memory at once: a number of things, and their bytes together.

    One thing of any size always fits when nothing else is held.
    """

    def __init__(self, things: int, bytes_: int) -> None:
        self._things = things
        self._bytes = bytes_
        self._held = 0
        self._held_bytes = 0
        self._left = asyncio.Condition()

    async def take(self, size: int) -> None:
        """Wait until the budget has room for a thing of this size, and take it."""
        async with self._left:
            await self._left.wait_for(
                lambda: not self._held or (self._held < self._things and self._held_bytes + size <= self._bytes)
            )
            self._held += 1
            self._held_bytes += size

    async def give_back(self, size: int) -> None:
        async with self._left:
            self._held -= 1
            self._held_bytes -= size
            self._left.notify_all()


async def each(items: AsyncIterable[T], work: Callable[[T], Awaitable[None]], *, at_once: int) -> None:
    """Run `work` on every item, `at_once` of them at a time. The first error cancels the rest."""
    slots = asyncio.Semaphore(at_once)

    async def one(item: T) -> None:
        try:
            await work(item)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        async for item in items:
            await slots.acquire()
            group.create_task(one(item))


async def read_ahead(
    items: Iterable[T], memory: MemoryBudget, size: Callable[[T], int], most: int
) -> AsyncIterator[Sequence[T]]:
    """Iterate in a thread, because reading may block; yield batches of what arrives within a moment.

    A batch has `most` items at most. Each item takes its `size` of the memory, which the caller gives back when it is
    done with the item.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[T | _End] = asyncio.Queue()
    putting: set[asyncio.Task[None]] = set()

    async def put(item: T) -> None:
        await memory.take(size(item))
        queue.put_nowait(item)

    # Here, and not in the thread: a coroutine made for a loop that ends meanwhile would never be awaited.
    def begin(item: T, done: Future[None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                done.cancel()
            elif error := task.exception():
                done.set_exception(error)
            else:
                done.set_result(None)

        spawn(put(item), among=putting).add_done_callback(ended)

    def work() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                done: Future[None] = Future()
                loop.call_soon_threadsafe(begin, item, done)
                done.result()
        except CancelledError:
            return
        except BaseException as e:
            error = e
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for items
            loop.call_soon_threadsafe(queue.put_nowait, _End(error))

    # A daemon thread: nothing can interrupt a read from a pipe, and Ctrl-C must not wait for it.
    threading.Thread(target=work, name="bufstore-read-ahead", daemon=True).start()
    end: _End | None = None
    while end is None:
        batch: list[T] = []
        with contextlib.suppress(TimeoutError):
            while end is None and len(batch) < most:
                async with asyncio.timeout(_GATHER_S if batch else None):
                    item = await queue.get()
                if isinstance(item, _End):
                    end = item
                else:
                    batch.append(item)
        if batch:
            yield batch
    if end.error is not None:
        raise end.error


class _End:
    """The last thing in the queue, with the error that ended the iteration, if one did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
