"""How a step is done: read a thread, decide, write if the thread is still the same; else try again, for a while."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from msgspec.structs import replace
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from bufstore.errors import (
    BufstoreError,
    LogFull,
    LogUnavailable,
    Rejected,
    StaleClaim,
    StepUnknown,
    StoreMisconfigured,
    TooLarge,
    Unavailable,
)
from bufstore.jetstream.messages import AppendUnknown, Conflict
from bufstore.mailbox import decisions
from bufstore.mailbox.counters import Counters
from bufstore.mailbox.decisions import Step
from bufstore.mailbox.model import Dispatch, MailboxThread
from bufstore.mailbox.ports import Backend
from bufstore.newest import Newest

#: For how many threads the state after our last write is remembered. This saves the next step of a holder the read.
_REMEMBERED = 4096
#: The most superseded dispatches that one write takes out of a queue.
AT_ONCE = 100

#: The most bytes of them: each is stored anew, and in a full bucket there is little room for that.
_BYTES_AT_ONCE = 256 << 10

#: Errors that the next attempt may not meet.
_PASSING = (Conflict, AppendUnknown, LogUnavailable)

T = TypeVar("T")
Load = Callable[[], Awaitable[MailboxThread]]
Decide = Callable[[MailboxThread], Step | None]


class Done(NamedTuple):
    """A step that was written."""

    #: The state after it.
    thread: MailboxThread
    step: Step

    @property
    def dispatch(self) -> Dispatch:
        """The dispatch that the step was about: the one that moved, or the one that is still claimed."""
        found = self.step.moves[0].after if self.step.moves else self.thread.active
        assert found is not None
        return found


class Steps:
    """The steps of one mailbox on its backend."""

    def __init__(self, backend: Backend, counters: Counters, timeout_s: float) -> None:
        self._backend = backend
        self._counters = counters
        self._timeout_s = timeout_s
        self._last: Newest[str, MailboxThread] = Newest(_REMEMBERED)

    async def tried(self, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """Return the first result of `attempt` in the call's time. Its argument says that an earlier one may be done.

        Raises LogUnavailable (nothing was done), StepUnknown, and errors that repeating does not help.
        """
        began, unsure = time.monotonic(), False

        async def once() -> T:
            nonlocal unsure
            try:
                return await attempt(unsure)
            except AppendUnknown:
                unsure = True
                raise

        try:
            # Almost always the first attempt succeeds, and the code that tries again costs more than the attempt.
            with suppress(*_PASSING):
                return await once()
            return await AsyncRetrying(
                wait=wait_random_exponential(multiplier=0.002, max=0.2),
                stop=stop_after_delay(max(0.0, self._timeout_s - (time.monotonic() - began))),
                retry=retry_if_exception_type(_PASSING),
                reraise=True,
            )(once)
        except Conflict as e:
            if not unsure:
                raise LogUnavailable("other calls keep changing the thread; nothing was done") from e
            raise StepUnknown("the step got no answer in time, and other calls keep changing the thread") from e
        except AppendUnknown as e:
            raise StepUnknown(f"the step got no answer: {e}") from e
        except (Unavailable, StoreMisconfigured, LogFull, TooLarge) as e:
            if unsure:
                raise StepUnknown(f"the step got no answer, and the retry failed: {e}") from e
            raise

    def known(self, claim: Dispatch) -> MailboxThread | None:
        """Return the state that we last wrote for the claim's thread, if `claim` held the thread then."""
        last = self._last.get(claim.thread_id)
        return last if last is not None and last.active is not None and last.active.token == claim.token else None

    async def change(
        self,
        thread_id: str,
        now_ms: int,
        decide: Decide,
        *,
        known: MailboxThread | None = None,
        load: Load | None = None,
    ) -> Done | None:
        """Decide a step, first on `known` if given, until one is written. None when `decide` finds nothing to do."""
        step_id = secrets.token_hex(8)
        sent: Step | None = None
        sent_ends = 0

        async def attempt(unsure: bool) -> Done | None:
            nonlocal sent, sent_ends, known
            thread, known = known, None
            if thread is None:
                thread = await (load() if load is not None else self._backend.thread(thread_id))
            if sent is not None and thread.step == step_id:
                return Done(thread, sent)
            try:
                step = decide(thread)
            except Rejected as e:
                if isinstance(e, StaleClaim):
                    self._counters.count("stale_claims")
                if unsure:
                    raise StepUnknown(
                        f"a step of thread {thread_id!r} got no answer, and the retry was refused: {e}"
                    ) from e
                raise
            if step is None and unsure:
                raise StepUnknown(f"a step of thread {thread_id!r} got no answer, and a retry found nothing left to do")
            if step is None:
                return None
            ends = _ends(thread, step)
            if unsure and ends != sent_ends:
                raise StepUnknown(f"a step of thread {thread_id!r} got no answer, and a retry would end another claim")
            sent, sent_ends = step, ends
            return Done(await self.write(thread, step, step_id, now_ms), step)

        return await self.tried(attempt)

    async def write(self, thread: MailboxThread, step: Step, step_id: str, now_ms: int) -> MailboxThread:
        """Write one step; return the state after it. Raises Conflict, AppendUnknown."""
        named = replace(step, thread=replace(step.thread, step=step_id))
        after = await self.noted(thread.thread_id, self._backend.write(thread, named, now_ms))
        assert after is not None
        return after

    async def noted(self, thread_id: str, writing: Awaitable[MailboxThread | None]) -> MailboxThread | None:
        """Await a write to the thread; remember and return the state that it gives."""
        try:
            after = await writing
        except BaseException as e:
            if isinstance(e, Conflict):
                self._counters.count("conflicts")
            self._last.pop(thread_id, None)
            raise
        if after is not None:
            self._last[thread_id] = after
        return after

    async def drop_stale(
        self, thread: MailboxThread, queued: Sequence[Dispatch], now_ms: int
    ) -> tuple[MailboxThread, list[Dispatch]]:
        """Take superseded dispatches out of the queue; other instances may do so at the same time."""
        dropped: list[Dispatch] = []
        for part in _parts(queued):
            step = decisions.supersede_stale(thread, part, now_ms)
            if step is None:
                continue
            try:
                thread = await self.write(thread, step, secrets.token_hex(8), now_ms)
            except Conflict:
                return await self._backend.thread(thread.thread_id), dropped
            self._counters.count("superseded", len(step.moves))
            dropped += [move.after for move in step.moves if move.after is not None]
        return thread, dropped

    async def drop_all_stale(self, thread: MailboxThread, now_ms: int, deadline: float) -> tuple[list[Dispatch], bool]:
        """Take what is superseded out of the queue, a part at a time; return it, and whether that was all in time."""
        current, dropped, complete = thread, list[Dispatch](), False
        with suppress(Conflict, AppendUnknown, BufstoreError):
            while not complete and time.monotonic() < deadline:
                queued = await self._backend.queued(thread.thread_id, thread.epoch, AT_ONCE)
                current, part = await self.drop_stale(current, queued, now_ms)
                dropped += part
                complete = not queued
        return dropped, complete


def _parts(queued: Sequence[Dispatch]) -> Iterator[list[Dispatch]]:
    """Return these dispatches in parts that one write takes out each."""
    part: list[Dispatch] = []
    size = 0
    for d in queued:
        here = len(d.payload) + len(d.result or b"")
        if part and (len(part) == AT_ONCE or size + here > _BYTES_AT_ONCE):
            yield part
            part, size = [], 0
        part.append(d)
        size += here
    if part:
        yield part


def _ends(thread: MailboxThread, step: Step) -> int:
    """Return the token of the claim that the step ends; 0: it ends none."""
    return thread.active.token if thread.active is not None and step.thread.active is None else 0
