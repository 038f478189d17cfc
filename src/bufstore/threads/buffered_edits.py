"""Edits of a buffered store: decided on the thread as reads show it, and appended directly behind what was read.

The entry names the entry that the decision was made on; if another entry is the thread's last by then, the thread is
read and the edit decided again. So an edit is as strict as a transaction, at the price of a read; checkpoints pay
nothing for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from bufstore.buffer import producers
from bufstore.errors import ConfigError, LogUnavailable, Rejected, ThreadQuarantined
from bufstore.threads.edits import Known, WantedEdit
from bufstore.threads.lanes import ThreadLanes
from bufstore.threads.payload import Edit, Removal
from bufstore.threads.protocol import Queryable, WrappableStore
from bufstore.threads.runs import Runs
from bufstore.threads.state import ThreadState
from bufstore.threads.write import Moved, editing
from bufstore.types import Consistency, Receipt


class Overtaken(Exception):
    """Another process has done this already."""


class BufferedEdits:
    """Appends edits; see the module's text."""

    def __init__(self, store: WrappableStore, lanes: ThreadLanes, runs: Runs) -> None:
        self._store = store
        self._lanes, self._config = lanes, lanes.config
        self._runs = runs
        #: Edits of a thread by this process take turns: else each that is stored would make all others read again. A
        #: thread has a lock here while there is an edit of it.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def edit(
        self,
        wanted: WantedEdit,
        *,
        overtaken: Callable[[], Awaitable[bool]] | None = None,
        mark: bytes | None = None,
    ) -> Receipt:
        """Claim the run's id if the edit creates a run; read, decide, append.

        Raises what these raise: AlreadyExists, Rejected errors of the decision, the errors of a read and of an append.

        `overtaken` is asked between the read and the append; if it says yes, raises Overtaken. `mark`: an item of
        `bufstore.buffer.producers`. An edit that the thread has already is not decided again: the thread is no longer
        as that edit found it.
        """
        self.check_store()
        if wanted.run_id is not None:
            await self._runs.claim(wanted.run_id, wanted.thread_id)
        deadline = asyncio.get_running_loop().time() + self._config.read_timeout_s + self._config.append_timeout_s
        turn = self._turns.setdefault(wanted.thread_id, asyncio.Lock())
        try:
            async with asyncio.timeout_at(deadline):
                if turn.locked():
                    # What is away shows here, to all at once: in turn, each would wait for it by itself.
                    with contextlib.suppress(Rejected):
                        await self._read(wanted, False, mark)
                await turn.acquire()
        except TimeoutError:
            raise _no_turn(wanted.thread_id) from None
        try:
            return await self._edit(wanted, deadline, overtaken, mark)
        finally:
            turn.release()

    async def _edit(
        self, wanted: WantedEdit, deadline: float, overtaken: Callable[[], Awaitable[bool]] | None, mark: bytes | None
    ) -> Receipt:
        # An append fails unless the thread is still as it was read. A refusal has no such check: prove its read.
        proven = False
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    state, exists = await self._read(wanted, proven, mark)
                    if mark is not None and producers.holds(state.watermark.producers, mark):
                        return _repeated(wanted.thread_id, state)
                    if overtaken is not None and await overtaken():
                        raise Overtaken
                    parked = state.watermark.broken_since is not None
                    payload = wanted.decide(Known(state.thread, state.messages, exists, parked=parked))
            except Rejected:
                if proven:
                    raise
                proven = True
                continue
            except TimeoutError:
                raise _no_turn(wanted.thread_id) from None
            try:
                # Outside the timeout above: an append ends by itself, and knows its outcome.
                return await self._append(wanted.thread_id, payload, state, mark)
            except Moved as moved:
                if moved.tip_seq < state.watermark.flushed_seq or not state.watermark.flushed_seq:
                    # The remembered tip is older than what was read; or the thread was deleted, and no row is left.
                    self._lanes.of(wanted.thread_id).appender.forget(wanted.thread_id)

    async def _read(self, wanted: WantedEdit, proven: bool, mark: bytes | None) -> tuple[ThreadState, bool]:
        """Return the thread, and whether it has the run that the edit creates."""
        if wanted.run_id is None:
            return await self._state(wanted, proven, mark), False
        state, found = await self._runs.of(wanted.run_id, lambda: self._state(wanted, proven, mark))
        return state, found is not None

    async def _state(self, wanted: WantedEdit, proven: bool, mark: bytes | None) -> ThreadState:
        reads = self._lanes.of(wanted.thread_id).reads
        if wanted.heals:
            return (await reads.joined(wanted.thread_id, proven=proven))[0]
        try:
            return await reads.thread(wanted.thread_id, Consistency.READ_YOUR_WRITES, proven=proven)
        except ThreadQuarantined:
            state, _ = await reads.joined(wanted.thread_id, proven=proven)
            if mark is None or not producers.holds(state.watermark.producers, mark):
                raise
            return state  # the edit was made before the thread's chain broke

    async def _append(self, thread_id: str, payload: Edit | Removal, state: ThreadState, mark: bytes | None) -> Receipt:
        decided = editing(payload, thread_id, state.watermark.applied_id, new=state.thread is None)
        return await self._lanes.of(thread_id).appender.append(thread_id, decided, mark=mark)

    @property
    def taken(self) -> bool:
        """Whether the wrapped store takes edits."""
        return isinstance(self._store, Queryable)

    def check_store(self) -> None:
        """Raise ConfigError if the wrapped store takes no edits."""
        if not self.taken:
            raise ConfigError(
                "the wrapped store takes checkpoints only: for anything else make it `bufstore.Queryable`, too, with "
                "an `apply` for all of a change (docs/OWN_STORE.md)"
            )


def _no_turn(thread_id: str) -> LogUnavailable:
    return LogUnavailable(f"could not get a turn to write to thread {thread_id!r} in time")


def _repeated(thread_id: str, state: ThreadState) -> Receipt:
    found = state.watermark
    return Receipt(thread_id, found.flushed_seq, found.applied_id, found.version, repeated=True)
