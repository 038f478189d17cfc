"""Runs of a buffered store: finds a run's thread by its id, and the run as last saved, in the store or in the tail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from bufstore.errors import AlreadyExists, FlushTimeout, LogUnavailable, ReadNotFresh, StoreUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.home import Home
from bufstore.newest import Newest
from bufstore.tasks import while_awake
from bufstore.threads.lanes import ThreadLanes
from bufstore.threads.model import Run, decode_run
from bufstore.threads.protocol import WrappableStore
from bufstore.threads.state import ThreadState
from bufstore.threads.store_answers import answered
from bufstore.types import Consistency, Quarantined


class _Asked(NamedTuple):
    """What the store has of a run."""

    run: Run | None


class Runs:
    """Claims and reads runs."""

    def __init__(self, store: WrappableStore, lanes: ThreadLanes) -> None:
        self._store = store
        self._lanes, self._config = lanes, lanes.config
        self._home = Home()
        self._claimed: Newest[str, str] = Newest(lanes.config.cached_threads * lanes.config.log.lanes)

    def admitted(self, run: Run) -> bool:
        """Whether a checkpoint of the run needs no `BufferedLineage.admit`: it names no parent, and is claimed."""
        return run.parent_thread_id is None and self._claimed.get(run.run_id) == run.thread_id

    async def claim(self, run_id: str, thread_id: str) -> None:
        """Register the run and claim its id, once, before it is first saved. Raises AlreadyExists."""
        if self._claimed.get(run_id) == thread_id:
            return
        self._home.check()
        reach(Failpoint.CLAIM_BEFORE)
        shared, within_s = self._lanes.of(run_id).shared, self._config.append_timeout_s
        owner = await while_awake(lambda: shared.claim_run(run_id, thread_id, within_s), within_s)
        reach(Failpoint.CLAIM_STORED)
        _check_owner(run_id, owner, thread_id)
        self._claimed[run_id] = thread_id

    async def check_free(self, run_id: str, thread_id: str) -> None:
        """Raise AlreadyExists if the run is another thread's by now, without claiming it. Raises LogUnavailable."""
        if self._claimed.get(run_id) != thread_id:
            found = await self._lanes.of(run_id).shared.thread_of_run(run_id, self._config.append_timeout_s)
            _check_owner(run_id, found or thread_id, thread_id)

    async def load(self, run_id: str, level: Consistency, quarantined: Quarantined = "raise") -> Run | None:
        """The run as it was last saved; None if there is none. Raises as `Reads.thread` does."""
        if level is Consistency.EVENTUAL:
            return await self._stored(run_id)
        thread_id = await while_awake(lambda: self._thread_of(run_id), self._config.read_timeout_s)
        if thread_id is None:
            return None
        reads = self._lanes.of(thread_id).reads
        return (await self.of(run_id, lambda: reads.thread(thread_id, level, quarantined=quarantined)))[1]

    async def of(self, run_id: str, read: Callable[[], Awaitable[ThreadState]]) -> tuple[ThreadState, Run | None]:
        """Read the thread of a run, and the run; None: the thread has none with this id."""
        postgres = self._lanes.same_postgres
        while True:
            before = postgres.last
            state = await read()
            found = await self._in_state(run_id, state)
            # The run is not in the tail, so it is not newer than the watermark: the Postgres that told it has the run.
            if not isinstance(found, _Asked) or await postgres.now() == before:
                return state, found.run if isinstance(found, _Asked) else found

    async def _in_state(self, run_id: str, state: ThreadState) -> Run | _Asked | None:
        """Return the run of this state, if it has one, or what the store was asked for."""
        if state.thread is None:
            return None
        if run_id in state.tail_runs:
            return decode_run(state.tail_runs[run_id])
        if state.deleted:
            return None
        if state.latest_run is not None:
            latest = decode_run(state.latest_run)
            if latest.run_id == run_id:
                return latest
        if state.partial:
            reads = self._lanes.of(state.thread.thread_id).reads
            whole, _ = await reads.joined(state.thread.thread_id, proven=True)
            if whole.partial:
                raise StoreUnavailable(f"only Postgres knows about run {run_id!r}: {reads.store.reason}")
            return await self._in_state(run_id, whole)
        return _Asked(await self._stored(run_id))

    async def _thread_of(self, run_id: str) -> str | None:
        loop, reads = asyncio.get_running_loop(), self._lanes.first.reads
        until = loop.time() + self._config.read_timeout_s
        try:
            # Not in the time that Postgres is given: a NATS that is silent would be told as a Postgres that is.
            thread_id = await self._registered(run_id, until)
            if thread_id is not None:
                return thread_id
            return await reads.store.in_time(self._unregistered(run_id, until), until - loop.time())
        except (FlushTimeout, LogUnavailable) as e:
            raise ReadNotFresh(f"run {run_id!r} could not be looked up in time: {e}") from None
        except StoreUnavailable as e:
            raise StoreUnavailable(f"only Postgres knows about run {run_id!r}: {e}") from None

    async def _registered(self, run_id: str, until: float) -> str | None:
        """Return the thread that claimed the run; None: nothing tells. Raises LogUnavailable once the time is over."""
        try:
            return await self._lanes.of(run_id).shared.thread_of_run(run_id, self._config.read_timeout_s)
        except LogUnavailable:
            if asyncio.get_running_loop().time() >= until:
                raise
            return None

    async def _unregistered(self, run_id: str, until: float) -> str | None:
        # The key may have expired (then Postgres has the run), or the bucket was lost: then a run that is only in the
        # log is not found before it is flushed.
        run = await self._stored(run_id)
        if run is None:
            run = await self._lanes.same_postgres.within(lambda: self._flushed_run(run_id, until))
        return run.thread_id if run is not None else None

    async def _stored(self, run_id: str) -> Run | None:
        return await answered(self._store, self._store.load_run(run_id), self._config.read_timeout_s)

    async def _flushed_run(self, run_id: str, until: float) -> Run | None:
        # A little less than the caller has, who would otherwise not be told what the flush waits for.
        left_s = max(until - asyncio.get_running_loop().time(), 0)
        await self._lanes.force_flush_all(timeout_s=0.9 * left_s)
        return await self._stored(run_id)


def _check_owner(run_id: str, owner: str, thread_id: str) -> None:
    if owner != thread_id:
        raise AlreadyExists(f"run {run_id!r} belongs to another thread")
