"""Tasks and calls side by side, on behalf of their caller."""

from __future__ import annotations

import asyncio
from asyncio import Task
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import Any, TypeVar

from bufstore.errors import Closed, LogUnavailable, ReadNotFresh, Unavailable

T = TypeVar("T")

#: How many turns of the loop it takes until an answer that arrived has been read, understood and told to a waiter.
TURNS = 10
#: The same for who waits for something that itself waits for an answer, and for what has arrived.
BEHIND_TURNS = 3 * TURNS

#: How long a task pauses that failed, or that somebody has cancelled. Who ends all tasks of a loop would meet a new
#: one, again and again; the loop does not live until this time, then.
_AGAIN_S = 0.5

#: A timer that is late by so many seconds shows that the loop stood still.
LATE_S = 0.2

#: Tasks that go on even when their callers give up. They are kept here because asyncio itself keeps no task.
_going_on: set[Task[Any]] = set()


class StrayCancelledError(Exception):
    """Something that this task awaits was cancelled, but not the task itself."""


@contextmanager
def own_cancels_only() -> Iterator[None]:
    """Raise StrayCancelledError for a CancelledError of something else: an error like any other, which ends no loop.

    An app's code may await something that another part of the app cancels.
    """
    try:
        yield
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise StrayCancelledError("a call that this task awaited was cancelled, but not the task itself") from e


@contextmanager
def no_cancel_lost() -> Iterator[None]:
    """Raise CancelledError if this task is cancelled in the block, even if something that it awaits swallows that."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


def spawn(
    work: Awaitable[T], *, name: str | None = None, apart: bool = False, among: set[Task[T]] | None = None
) -> Task[T]:
    """Return a task that begins one turn of the loop later, even if an app has made the tasks of its loop eager.

    So a caller that keeps the task has it before its work begins. The task gets a copy of the caller's context, or with
    `apart` an empty context. Use `apart` for work that outlives the call that happens to need it first; otherwise that
    call's context, with a request or a span in it, would live as long. `among`: keeps the task until it is done.
    """
    loop = asyncio.get_running_loop()
    coroutine = work if asyncio.iscoroutine(work) else _result(work)
    # Not `create_task`, which asks the loop's task factory: nobody can tell whether an app's factory makes eager tasks,
    # as when Sentry has wrapped `asyncio.eager_task_factory`.
    task = Task(coroutine, loop=loop, name=name, context=Context() if apart else None)
    if among is not None:
        among.add(task)
        task.add_done_callback(among.discard)
    return task


async def _result(work: Awaitable[T]) -> T:
    return await work


async def outlasted(task: asyncio.Future[T]) -> T:
    """Return the task's result. It goes on if the caller is cancelled meanwhile; nobody is told of its error then.

    `asyncio.shield` is the same up to Python 3.13. From 3.14 on it reports such an error to the loop, as if nobody
    knew of it.
    """
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.add_done_callback(see_error)
        raise
    return task.result()


async def unless_closed(
    task: asyncio.Future[T], closed: Callable[[], bool], otherwise: type[Unavailable] = LogUnavailable
) -> T:
    """Return the task's result, as `outlasted` does.

    Raises Closed, or `otherwise` in what is not `closed`, if the task was cancelled, but not its caller.
    """
    try:
        return await outlasted(task)
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if task.cancelled() and caller is not None and not caller.cancelling():
            if closed():
                raise Closed("the store was closed before there was an answer") from None
            raise otherwise("the task that asks was cancelled before there was an answer; retry") from None
        raise


async def to_the_end(work: Awaitable[T], *, name: str | None = None) -> T:
    """Return the result. The work goes on to its end even if the caller is cancelled meanwhile, however often."""
    return await outlasted(_keep(work, name))


class Closing:
    """Closes to the end even if a caller is cancelled meanwhile, because nobody could close what was left open.

    A caller that comes meanwhile waits for the same end. A later caller closes again, and must find nothing to do.
    """

    _task: Task[None] | None = None

    async def __call__(self, close: Callable[[], Awaitable[None]]) -> None:
        """Run `close`, or wait for the run that has begun. Raises what `close` raises."""
        if self._task is None or self._task.done():
            self._task = _keep(close(), "bufstore-close")
        await outlasted(self._task)


def _keep(work: Awaitable[T], name: str | None) -> Task[T]:
    return spawn(work, name=name, among=_going_on)


async def end(*tasks: asyncio.Future[Any] | None) -> None:
    """End these tasks, if they have not ended. Their results and errors are dropped."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def settle(answer: asyncio.Future[T], outcome: T | Exception) -> None:
    """Set the future's result or error, unless it has ended."""
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


async def what_came(turns: int = TURNS) -> None:
    """Have the loop handle what has arrived: after it stood still, a deadline is over before that is read."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def ended_within(future: asyncio.Future[Any], seconds: float, turns: int = TURNS) -> bool:
    """Wait for a future for so many seconds, and for `what_came`; return whether it has ended."""
    await asyncio.wait([future], timeout=seconds)
    if not future.done():
        await what_came(turns)
    return future.done()


async def while_awake(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Return what `call`, which takes so many seconds at most, returns. It may be repeated.

    It is called again if it failed and the loop stood still when its time was over: an app that computes for long on
    its loop, or a process that was stopped, has no outage. No step of a call is made meanwhile, whatever has arrived.
    """
    loop, late_s = asyncio.get_running_loop(), 0.0

    def look(at: float) -> None:
        nonlocal late_s
        late_s = loop.time() - at

    over_at = loop.time() + seconds
    over = loop.call_at(over_at, look, over_at)
    try:
        return await call()
    except (Unavailable, ReadNotFresh):
        if late_s < LATE_S:
            raise
    finally:
        over.cancel()
    return await call()


async def set_within(event: asyncio.Event, seconds: float) -> None:
    """Return when the event is set, or after so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def see_error(task: asyncio.Future[Any]) -> None:
    """Look at the error of a task that is done. Otherwise asyncio warns of it when all callers were cancelled."""
    if not task.cancelled():
        task.exception()


def interrupted(task: Task[Any]) -> bool:
    """Whether a task that is done was ended by Ctrl-C: Python raises KeyboardInterrupt in whatever runs just then.

    A loop that is run again afterwards, as IPython does, goes on without the task.
    """
    return not task.cancelled() and isinstance(task.exception(), KeyboardInterrupt)


class Lasting:
    """A task that somebody needs for as long as this is open. It begins anew unless its work returns.

    It may be cancelled, ended by Ctrl-C, or by an error that its work does not handle: the loop is told of that.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> None:
        self._work, self._name, self._closed = work, name, False
        self._begin()

    def _begin(self) -> None:
        if not self._closed:
            self._task = spawn(self._work(), name=self._name)
            self._task.add_done_callback(self._ended)

    def _ended(self, task: Task[None]) -> None:
        if interrupted(task):
            self._begin()
            return
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not self._closed:
            message = f"{self._name} failed, and begins anew"
            task.get_loop().call_exception_handler({"message": message, "exception": error, "task": task})
        if task.cancelled() or isinstance(error, Exception):
            task.get_loop().call_later(_AGAIN_S, self._begin)

    async def aclose(self) -> None:
        """End the task. May be called twice."""
        self._closed = True
        await end(self._task)


async def unless(event: asyncio.Event, work: Awaitable[None]) -> None:
    """Do this work. Once the event is set, cancel it, and return when it has ended. Raises what the work raises."""
    task, stop = spawn(work), spawn(event.wait())
    try:
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not interrupted(task):  # the loop has raised that, and nobody wants it twice
            task.result()
    finally:
        await end(task, stop)


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results, in order. Raises the first error once all calls have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    found: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found
