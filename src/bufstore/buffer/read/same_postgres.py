"""Reads that Postgres alone answers, after a flush, must be answered by the Postgres that has the flush.

A read that joins the log's tail is not misled by a Postgres that has failed over to a copy without the last commits.
One that waits for a flush and then asks Postgres would be: the copy may lack what the flush has waited for. So such a
read asks afterwards whether it was the same run of the same server all the time, and starts over if not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from bufstore.buffer.ports.ledger import Ledger
from bufstore.buffer.read.store_watch import STORE_PATIENCE_S, StoreWatch
from bufstore.errors import StoreUnavailable
from bufstore.home import Home
from bufstore.shared_call import SharedCall

T = TypeVar("T")


class SamePostgres:
    """Tells whether Postgres may have failed over."""

    def __init__(self, ledger: Ledger, store: StoreWatch[Any], timeout_s: float) -> None:
        self._home = Home()
        self._ledger, self._store, self._timeout_s = ledger, store, timeout_s
        #: How long one question may take.
        self._patience_s = self._patience_min_s = min(STORE_PATIENCE_S, timeout_s / 2)
        self._look = SharedCall(self._run)
        #: The run that answered last; None: none did. Before a read nobody need ask for it: a run never comes back.
        self.last: str | None = None

    async def aclose(self) -> None:
        """Stop asking Postgres."""
        await self._look.aclose()

    async def now(self) -> str:
        """Return the run that answers now. Raises what the ledger raises; StoreUnavailable after `timeout_s`."""
        self._home.check()
        try:
            self.last = await self._store.in_time(self._answer(), self._timeout_s)
        except StoreUnavailable as e:
            raise StoreUnavailable(f"only Postgres can answer this: {e}") from None
        return self.last

    async def _answer(self) -> str:
        while (run := await self._look()) is None:
            pass
        return run

    async def _run(self) -> str | None:
        """Return the run; None: no answer yet. One connection that fell silent must not hold up all who ask behind."""
        try:
            async with asyncio.timeout(self._patience_s):
                run = await self._ledger.server_run()
        except TimeoutError:
            self._patience_s = min(2 * self._patience_s, self._timeout_s)  # or Postgres is slow
            return None
        self._patience_s = self._patience_min_s
        return run

    async def within(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return what `read` returns, all of it from one run of Postgres; each further try needs another failover."""
        run = self.last if self.last is not None else await self.now()
        while True:
            found = await read()
            before, run = run, await self.now()
            if run == before:
                return found
