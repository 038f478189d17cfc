"""The buffer: one log, the shared state beside it, the store behind it, and everything that works with them.

A domain's store (`bufstore.threads.buffered` is one) is the typed face of a `Buffer`: it drafts entries and hands them
to `appender`, and reads states through `reads`. The command line, repair and the Spark jobs use the same object without
starting it: `connected` opens only the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Generic, Self

from bufstore.buffer.append.appender import Appender
from bufstore.buffer.domain import Backing, C, Domain, M, S
from bufstore.buffer.flush.flusher import Flusher
from bufstore.buffer.lost_end import all_flushed
from bufstore.buffer.operate.audit import Verification
from bufstore.buffer.operate.erase import Eraser
from bufstore.buffer.operate.health import Vitals
from bufstore.buffer.operate.log_fill import FillForecast, look
from bufstore.buffer.operate.quarantine import Quarantine
from bufstore.buffer.operate.verify import Verifier
from bufstore.buffer.parts import Parts
from bufstore.buffer.ports.ledger import Ledger
from bufstore.buffer.ports.shared_state import Session
from bufstore.buffer.prepare import apart, prepare_log, prepare_store
from bufstore.buffer.read.flush_waiter import FlushWaiter
from bufstore.buffer.read.reads import Reads
from bufstore.buffer.subjects import Subjects
from bufstore.config import BufferConfig, as_seconds
from bufstore.errors import BufstoreError
from bufstore.home import Home
from bufstore.tasks import Closing

#: The seconds after which a look at a Postgres that was away when this began says why it still is.
_REASON_S = 1.0

_Call = Callable[[], Awaitable[None]]


class Buffer(Generic[C, S, M]):
    """Everything that works with one log in one process. The constructor needs a running event loop and does no I/O.

    `open` and `aclose` begin and end its work; `connected` is for code that only looks at the log from outside.
    """

    def __init__(
        self,
        domain: Domain[C, S, M],
        session: Session,
        ledger: Ledger,
        backing: Backing[S],
        config: BufferConfig,
        *,
        member: str | None = None,
    ) -> None:
        """`member`: the name of this process among the flushers; None: a random name."""
        self._closing, self._closed, self._home = Closing(), False, Home()
        self.session, self.ledger, self.backing, self.config = session, ledger, backing, config
        #: Whether Postgres was away when this was opened.
        self.began_away = False
        self.log, self.shared = session.log, session.shared
        self.subjects = Subjects(config.log.subject, config.log.partitions)
        self.parts = parts = Parts(
            domain=domain,
            log=self.log,
            shared=self.shared,
            ledger=ledger,
            subjects=self.subjects,
            config=config,
        )
        self.flusher = Flusher(parts, member or secrets.token_hex(8), self._prepare_store) if config.flusher else None
        #: The entries that could not be applied; lists, shows, replays and discards them.
        self.quarantine = Quarantine(parts)
        self.waiter = FlushWaiter(parts, self.flusher)
        self.reads = Reads(parts, backing, self.waiter, own_seq=self._own_seq)
        flushed = self.flusher.cursors if self.flusher is not None else dict[int, int]
        self.fill = FillForecast(lambda: look(self.log, self.shared, flushed()))
        self.appender = Appender(parts, self.reads, self.fill.explain, backing.held)
        self.eraser = Eraser(parts, self.waiter)
        #: The health and the statistics of this buffer.
        self.vitals = Vitals(parts, session, self.fill, self.appender, self.flusher, self.reads)

    # --- lifecycle ----------------------------------------------------------------------------------------------

    async def open(self, *, away: bool = False) -> Self:
        """Connect, create what is missing, check what is there, and begin to flush.

        Postgres may be down if the log already exists. Raises ConfigError (ConfigDrift names the field),
        LogUnavailable, LogRolledBack, and StoreUnavailable when the log does not exist and Postgres is down. On any
        error, everything is released. `away`: see `prepare_log`.
        """
        try:
            await self._start(away)
        except BaseException:
            await self._closing(self.release)
            raise
        return self

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Self]:
        """Connect to log, ledger and store for the block, and do no more: check, create and flush nothing.

        Raises ConfigError, LogUnavailable.
        """
        async with contextlib.AsyncExitStack() as stack:
            for part in (self.session, self.ledger, self.backing):
                stack.push_async_callback(part.aclose)
                await part.open()
            yield self

    async def _start(self, away: bool) -> None:
        await self.session.open()
        await self.ledger.open()
        await self.backing.open()
        self.log.vouched_by(
            lambda: apart(self.log, self.ledger, self.config.log, self.backing.kind),
            lambda endings, seen: all_flushed(self.ledger, self.subjects, endings, seen),
        )
        await self.shared.check()  # before a log is created that names this shared state
        self.began_away = not await prepare_log(self.log, self.ledger, self.backing, self.config, away=away)
        if self.began_away:
            # Whoever asks Postgres first prepares it; without a flusher nobody else would.
            self.reads.restored.prepare = self._prepare_once_back
            self.reads.store.take_for_down("it was away when this process began")
        await self.shared.setup()
        self.appender.start()
        await self.waiter.start()
        # A writer that builds on a parked entry would only have its own entry parked too.
        await self.shared.on_parked(self.appender.forget)
        if self.flusher is not None:
            await self.flusher.start()

    async def _prepare_store(self) -> None:
        await prepare_store(self.log, self.ledger, self.backing, self.config)

    async def _prepare_once_back(self) -> None:
        await prepare_store(self.log, self.ledger, self.backing, self.config, _REASON_S)

    async def aclose(self, *, before_store: _Call | None = None) -> None:
        """Finish the writes that are on their way, flush what this process still can, stop, and release everything.

        Takes at most ``append_timeout_s`` + ``flush_timeout_s``. What is not flushed by then stays in the log.
        Idempotent. Does nothing in a forked process: its parent owns everything. Raises ConfigError on another event
        loop. `before_store`: called just before the store is closed; of concurrent calls, only the first one's is used.
        """
        if self.closes_here():
            await self._closing(lambda: self._close(before_store))

    def closes_here(self) -> bool:
        """Return False once the buffer is closed, and in a forked process. Raises ConfigError on another event loop."""
        return not self._closed and self._home.closes_here()

    async def _close(self, before_store: _Call | None) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self.config.append_timeout_s + self.config.flush_timeout_s
        await self.appender.aclose()
        if self.flusher is not None and not self.flusher.state.trouble:
            with contextlib.suppress(BufstoreError):
                # A Postgres that does not answer must not hold up a process that has flushed everything.
                await self.reads.force_flush_all(self.config.flush_timeout_s, self.flusher.has_flushed)
        flusher_s = min(max(ends_at - loop.time(), 0), self.config.flush_timeout_s)
        try:
            await self.release(flusher_s, before_store=before_store)
        finally:
            self._closed = True  # no earlier: who closes meanwhile waits for the end

    async def release(self, flusher_s: float | None = None, *, before_store: _Call | None = None) -> None:
        """Stop and release everything, as `aclose` does, and flush nothing further.

        `flusher_s`: how long the flusher may take to finish what it has begun, at most ``flush_timeout_s``.
        """
        async with contextlib.AsyncExitStack() as stack:  # runs all callbacks in reverse, even if some raise
            stack.push_async_callback(self.backing.aclose)
            if before_store is not None:
                stack.push_async_callback(before_store)
            stack.push_async_callback(self.ledger.aclose)
            stack.push_async_callback(self.session.aclose)
            stack.push_async_callback(self.fill.aclose)
            stack.push_async_callback(self.appender.aclose)
            stack.push_async_callback(self.reads.aclose)
            if self.flusher is not None:
                stack.push_async_callback(self.flusher.aclose, flusher_s)

    # --- reading and flushing -----------------------------------------------------------------------------------

    def _own_seq(self, thread_id: str) -> int:
        tip = self.appender.tip(thread_id)
        return tip.seq if tip is not None else 0

    async def learn_new(self, thread_ids: Collection[str]) -> None:
        """Find out which of many threads are new, in a few requests, so that their first writes need no request each.

        The first writes must follow at once. Does nothing if the store cannot tell which threads it has. Raises
        Unavailable errors.
        """
        if self.backing.held is not None:
            await self.appender.learn_new(thread_ids)

    async def force_flush(self, thread_id: str, *, timeout_s: float | None = None) -> None:
        """Return once everything of the thread that is acknowledged now is in the store, whoever flushes it.

        Raises FlushTimeout after `timeout_s` (default ``flush_timeout_s``), LogUnavailable; StoreUnavailable when only
        Postgres can tell which entries of the thread wait.
        """
        await self.reads.force_flush(thread_id, self._flush_s(timeout_s))

    async def force_flush_all(self, *, timeout_s: float | None = None) -> None:
        """Return once everything that is acknowledged now is in the store. Raises like `force_flush`."""
        await self.reads.force_flush_all(self._flush_s(timeout_s))

    def _flush_s(self, timeout_s: float | None) -> float:
        return self.config.flush_timeout_s if timeout_s is None else as_seconds(timeout_s, "timeout_s")

    # --- operating ----------------------------------------------------------------------------------------------

    async def verify(self) -> Verification:
        """Check log, shared state and Postgres against each other, while they work. Raises Unavailable errors.

        Reads every thread that the log shows, in bounded memory. Every finding is damage, or a bug of ours: see
        docs/OPERATIONS.md.
        """
        # If the log is flushed into another kind of store, this store's tables in the same schema say nothing about it.
        named = self.log.target
        ours = named is None or named.kind == self.backing.kind
        return await Verifier(self.parts, self.backing.versions if ours else None).run()
