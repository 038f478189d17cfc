"""Knows whether the store answers. A read of one thread may take long, so a small query decides whether it is down."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from bufstore.buffer.domain import S, StateReader
from bufstore.errors import BufstoreError, Closed, StoreMisconfigured, StoreUnavailable
from bufstore.log_lines import LogLines
from bufstore.tasks import Lasting, end, ended_within, spawn, unless_closed

T = TypeVar("T")

_log = LogLines(__name__)

#: How many seconds a call waits for the store before it tries the log alone, or gives up.
STORE_PATIENCE_S = 2.0
_PROBE_INTERVAL_S = 0.25
_CLOSED = "the store was closed before there was an answer"


class StoreWatch(Generic[S]):
    """Asks the store, and spares reads the wait while the store is away."""

    def __init__(self, reader: StateReader[S], read_timeout_s: float) -> None:
        self._reader = reader
        self._patience = min(STORE_PATIENCE_S, read_timeout_s / 2)
        self._probe: Lasting | None = None
        self._question: asyncio.Task[None] | None = None
        self._closed = False
        #: Who waits for the store, and since when, in the loop's time, the longest first. Woken when it goes down.
        self._waiting: dict[asyncio.Future[None], float] = {}
        #: Looks after them: one timer, because each of thousands of reads that looked itself would keep the loop busy.
        self._looks: asyncio.TimerHandle | None = None
        #: When the store was asked for them last, in the loop's time.
        self._looked_at = float("-inf")
        #: Cancelled requests to the store that have not ended yet.
        self._ending: set[asyncio.Task[Any]] = set()
        #: Why the store counts as down; None while it answers.
        self.down: str | None = None

    @property
    def reason(self) -> str:
        """Why it had no answer."""
        return self.down or "it does not answer"

    async def aclose(self) -> None:
        """Stop checking whether the store is back."""
        self._closed = True
        if self._probe is not None:
            await self._probe.aclose()
        await end(self._question, *self._ending)

    async def answers(self) -> None:
        """Ask the store a small query, for somebody who only wants to know. Raises StoreUnavailable."""
        try:
            await self._reader.answers()
        except BufstoreError:
            raise
        except Exception as e:  # an app's own store raises its driver's errors
            raise StoreUnavailable(type(e).__name__) from e

    def ask(self, thread_id: str) -> asyncio.Task[S]:
        """Ask for the thread's state."""
        return spawn(self._reader.state(thread_id))

    async def stored(self, asked: asyncio.Task[S], deadline: float) -> S | None:
        """Return the store's answer, however long that takes while the store is up; None if it does not answer."""
        if not await self._answered(asked, deadline - asyncio.get_running_loop().time()):
            return None
        try:
            return asked.result()
        except StoreUnavailable:
            pass
        except StoreMisconfigured:
            if not await self._is_down():  # it refuses this one thing
                raise
        except BufstoreError:
            raise
        except Exception as e:
            # An app's own store raises its driver's errors. Whatever they mean, the store did not answer.
            _log.debug("a read of the store failed: %s", type(e).__name__, extra={"action": "store_read_failed"})
        await self._is_down()
        return None

    async def while_up(self, asking: Coroutine[Any, Any, T]) -> T:
        """Return the store's answer, however long that takes while the store is up. Raises StoreUnavailable."""
        asked = spawn(asking)
        try:
            if self.down is not None or not await self._answered(asked):
                raise StoreUnavailable(self.reason)
            return asked.result()
        finally:
            self.let_go(asked)

    async def in_time(self, asking: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Return the store's answer, which may come late. Raises StoreUnavailable, with the reason, after this time.

        Meanwhile the store is asked whether it answers at all: a question that waits for its turn knows no reason.
        """
        asked = spawn(asking)
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._answered(asked):
                    pass  # the store has gone down, and may come back in time
        except TimeoutError:
            raise StoreUnavailable(self.reason) from None
        finally:
            self.let_go(asked)
        return asked.result()

    async def told_after_all(self, thread_id: str, asked: asyncio.Task[S] | None, deadline: float) -> S:
        """Wait for a state that only the store knows. `asked`: an earlier request, or None. Raises StoreUnavailable."""
        if asked is None or asked.done():
            asked = self.ask(thread_id)
        try:
            while (left := deadline - asyncio.get_running_loop().time()) > 0:
                if await self._answered(asked, left if self.down is None else min(left, self._patience)):
                    return asked.result()
                if self.down is not None:
                    break
            raise StoreUnavailable(self.down or "it did not answer within BufferConfig.read_timeout_s")
        except StoreUnavailable as e:
            raise StoreUnavailable(f"only Postgres has the state of thread {thread_id!r}: {e}") from e
        finally:
            self.let_go(asked)

    def let_go(self, asked: asyncio.Task[Any] | None) -> None:
        """Cancel the request without waiting for its end, which takes long on a hanging server."""
        if asked is not None:
            self._ending.add(asked)
            asked.add_done_callback(self._ended)
            asked.cancel()

    def _ended(self, asked: asyncio.Task[Any]) -> None:
        self._ending.discard(asked)
        if not asked.cancelled():
            asked.exception()  # otherwise asyncio reports an exception that was never retrieved

    async def _answered(self, asked: asyncio.Task[Any], timeout_s: float | None = None) -> bool:
        """Wait for the store's answer until the store goes down; return whether it is there.

        Raises Closed when this was closed, and there is still no answer.
        """
        if asked.done():
            return True
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        self._waiting[woken] = loop.time()
        self._look_later()
        try:
            await asyncio.wait([asked, woken], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._waiting[woken]
        if self._closed and woken.done() and not asked.done():
            raise Closed(_CLOSED)
        return asked.done()

    def _due(self) -> float:
        """Return when to ask the store: once somebody has waited for a while since it answered last."""
        return max(next(iter(self._waiting.values())), self._looked_at) + self._patience / 2

    def _look_later(self) -> None:
        if not self._waiting or (self._question is not None and not self._question.done()):
            return  # behind the question, `_looked` comes here again
        loop = asyncio.get_running_loop()
        # One that is long over was ended by Ctrl-C before it began.
        if self._looks is None or self._looks.when() < loop.time() - self._patience:
            self._looks = loop.call_at(self._due(), self._look)

    def _look(self) -> None:
        self._looks = None
        if self._closed:  # nobody would end what asks from now on
            self._wake()
        elif not self._waiting or asyncio.get_running_loop().time() < self._due():  # the first ones have their answers
            self._look_later()
        elif self.down is None:
            self._asking()
        else:
            self._looked()

    def _looked(self, _: object = None) -> None:
        self._looked_at = asyncio.get_running_loop().time()
        self._look_later()

    def _wake(self) -> None:
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)

    async def _is_down(self) -> bool:
        """Return whether the store does not even answer a small query, which all callers share.

        Raises Closed, and StoreUnavailable when somebody cancels the query.
        """
        if self._closed:  # nobody would end what asks from now on
            raise Closed(_CLOSED)
        await unless_closed(self._asking(), lambda: self._closed, StoreUnavailable)
        return self.down is not None

    def _asking(self) -> asyncio.Task[None]:
        """Return the small query that is under way; begin it if none is."""
        if self._question is None or self._question.done():
            self._question = spawn(self._ask_little(), name="bufstore-store-question")
            self._question.add_done_callback(self._looked)
        return self._question

    async def _ask_little(self) -> None:
        asked = spawn(self._reader.answers(), name="bufstore-store-ping")
        try:
            if await ended_within(asked, self._patience):
                asked.result()
            else:
                self.take_for_down("it did not answer in time")
        except Exception as e:
            self.take_for_down(_why(e))
        finally:
            self.let_go(asked)

    def take_for_down(self, reason: str) -> None:
        """Let reads do without the store until it answers."""
        if self.down is None:
            self.down = reason
            _log.warning(
                "Postgres does not answer; reads use the log alone where it has the whole thread: %s",
                reason,
                extra={"action": "store_down"},
            )
            self._wake()
            if not self._closed:  # a question may end while `aclose` waits
                self._probe = Lasting(self._look_for_store, name="bufstore-store-probe")

    async def _look_for_store(self) -> None:
        while self.down is not None:
            try:
                await self._reader.answers()
            except Exception as e:  # whatever an app's store raises means that it is not back yet
                self.down = _why(e)
            else:
                self.down = None
                _log.info("Postgres answers again; reads use it", extra={"action": "store_up"})
                return
            await asyncio.sleep(_PROBE_INTERVAL_S)


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, BufstoreError) else type(error).__name__
