"""Pipelines' writes: to many threads at once, and many per thread, in order; a refused write stops its thread."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from bufstore.buffer import producers
from bufstore.buffer.append.tip import Prepare
from bufstore.errors import BufstoreError, InvalidRecord, NotFound, Rejected
from bufstore.tasks import together
from bufstore.threads.buffered_edits import BufferedEdits
from bufstore.threads.buffered_lineage import BufferedLineage
from bufstore.threads.digests import MessageMemory
from bufstore.threads.edits import WantedEdit
from bufstore.threads.lanes import ThreadLanes
from bufstore.threads.lineage import LineageChange
from bufstore.threads.model import Run, check_run
from bufstore.threads.runs import Runs
from bufstore.threads.write import Call, call_after, call_of
from bufstore.types import Message, ProducerSequence, Receipt, check_id, check_ids


class BulkCheckpoint(NamedTuple):
    """One checkpoint of a series."""

    messages: Sequence[Message]
    run: Run
    #: True: `messages` are the whole list, as in `ThreadRunStore.checkpoint`. False: they are appended.
    whole: bool
    producer: ProducerSequence | None = None


class Series(NamedTuple):
    """How far a series got."""

    #: The receipts of the stored steps, which are the first ones.
    receipts: Sequence[Receipt]
    #: Why the next step is not stored; the steps behind it were not tried. None: all steps are stored.
    error: BufstoreError | None


class BulkWriter:
    """`BufferedThreadStore.bulk`: writes for pipelines, with fewer round trips and less work for each checkpoint."""

    def __init__(self, lanes: ThreadLanes, runs: Runs, lineage: BufferedLineage, edits: BufferedEdits) -> None:
        self._lanes = lanes
        self._runs = runs
        self._lineage = lineage
        self._edits = edits

    async def learn_new(self, thread_ids: Collection[str]) -> None:
        """Find out in a few requests which of many threads are new: first writes right after it look nothing up.

        It has no effect with an app's own store. Raises InvalidId, Unavailable errors.
        """
        wanted = [check_id(t, "a thread's id") for t in check_ids(thread_ids, "thread_ids")]
        await together(buffer.learn_new(some) for buffer, some in self._lanes.shared_out(wanted))

    async def claim(self, runs: Iterable[Run]) -> None:
        """Register runs ahead of their first checkpoints, in a few requests. Failures are left to `write`.

        Raises InvalidRecord for what is no Run.
        """
        new: dict[str, Run] = {}
        before: Run | None = None
        for run in runs:
            if run is before:
                continue
            before = run
            if not isinstance(run, Run):
                raise InvalidRecord(f"each run must be a Run, not {type(run).__name__}")
            if run.parent_thread_id is None and not self._runs.admitted(run):
                with suppress(Rejected):
                    check_run(run)
                    new[run.run_id] = run
        claims = (self._runs.claim(run.run_id, run.thread_id) for run in new.values())
        await asyncio.gather(*claims, return_exceptions=True)

    async def write(self, thread_id: str, steps: Sequence[BulkCheckpoint]) -> Series:
        """Write a thread's checkpoints in order, none behind one that is not stored.

        A step with a receipt is durable. Each step is judged as `BufferedThreadStore.checkpoint` or `checkpoint_append`
        judges it, and fails with their errors; after OutcomeUnknown, some steps behind it may be stored too.
        """
        wanted: list[tuple[Prepare[MessageMemory], bytes | None]] = []
        refused: BufstoreError | None = None
        before: tuple[Run, Call] | None = None
        admitted, written = False, _Written(self._lanes, thread_id)
        for step in steps:
            try:
                if before is not None and before[0] is step.run:
                    call = call_after(before[1], step.messages, step.producer)
                else:
                    call, admitted = call_of(thread_id, step.messages, step.run, None, step.producer), False
                if not (admitted or self._runs.admitted(step.run) or await written.holds(step)):
                    await self._lineage.admit(step.run)
                    admitted = True
                if not step.whole:
                    call.check_new_ids()
            except BufstoreError as e:
                refused = e
                break
            before = step.run, call
            wanted.append((call.whole_list if step.whole else call.appending, producers.item_of(step.producer)))
        if not wanted:  # what the first step is refused for may be an id that is in no lane
            return Series([], refused)
        receipts, error = await self._lanes.of(thread_id).appender.append_series(thread_id, wanted)
        if error is not None and not isinstance(error, BufstoreError):
            raise error
        return Series(receipts, error or refused)

    async def edit(self, wanted: WantedEdit, producer: ProducerSequence | None) -> Receipt:
        """Make an edit that does not concern lineage, once per `producer`. Raises what the store's edits raise.

        `wanted`: what a function of `bufstore.threads.edits` returned.
        """
        return await self._edits.edit(wanted, mark=producers.item_of(producer))

    async def delete(self, wanted: LineageChange, producer: ProducerSequence | None) -> bool | None:
        """Delete a thread, once per `producer`. Returns True if that was done before, None if there is no such thread.

        `wanted`: what `bufstore.threads.lineage.deletion` returned. Raises what the store's `delete_thread` raises.
        """
        try:
            return (await self._lineage.change(wanted, producers.item_of(producer))).repeated
        except NotFound:
            return None


class _Written:
    """Knows which steps a thread has already: the parents that those name are not checked, for they may be gone."""

    def __init__(self, lanes: ThreadLanes, thread_id: str) -> None:
        self._lanes, self._thread_id = lanes, thread_id
        self._producers: bytes | None = None

    async def holds(self, step: BulkCheckpoint) -> bool:
        if step.producer is None or step.run.parent_thread_id is None:
            return False  # the append finds out
        if self._producers is None:
            state, _ = await self._lanes.of(self._thread_id).reads.joined(self._thread_id)
            self._producers = state.watermark.producers
        return producers.holds(self._producers, producers.item(step.producer.producer_id, step.producer.sequence))
