"""A process that saves and reads LangGraph's checkpoints: a writer, a reader, a flusher, or all. See `chaos.process`.

One process writes each `own` and `edited` thread. It also deletes, erases and prunes its `edited` threads, deletes
their runs, and copies them to `copied` threads. With an odd seed all processes write `forked` threads at the same time,
which then fork; with an even seed `shared` threads, which must not fork: `on_conflict="reject"`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial

from langchain_core.runnables import RunnableConfig

from bufstore import Consistency, Receipt, ThreadQuarantined
from bufstore.langgraph import AsyncBufferedSaver, ConcurrentWriter, PostgresCheckpointStore
from chaos.graphs import FIRST, LAST, Position, key_of, position_of, saved_of
from chaos.history import COPIED, EDITED, FORKED, OWN, SHARED, Listed, Read, Saving, Shown
from chaos.process import RETRY_PAUSE_S, Options, Reader, Worker, started
from langgraph_savers import after_each_append, config

#: How many steps a thread gets before its writers start a new one.
_LENGTH = 40
_SHARED_LENGTH = 60
#: Operations of several entries, or that wait for one: when they raise, a part may be done.
_IN_PARTS = ("erase", "prune", "runs", "copy")

#: The receipt of the task's last write: LangGraph's interface does not return it.
_receipt: ContextVar[Receipt] = ContextVar("receipt")


class Savers:
    """One saver; a reader has one for each consistency level."""

    def __init__(self, savers: dict[Consistency, AsyncBufferedSaver]) -> None:
        self.savers = savers
        self.saver = savers[Consistency.READ_YOUR_WRITES]
        self.lanes = self.saver.engine.lanes

    @classmethod
    async def open(cls, options: Options) -> Savers:
        """Open the savers of the role."""
        levels = list(Consistency) if options.role == "reader" else [Consistency.READ_YOUR_WRITES]
        savers: dict[Consistency, AsyncBufferedSaver] = {}
        try:
            for level in levels:
                savers[level] = await _saver(options, level)
        except BaseException:
            for saver in savers.values():
                await saver.aclose()
            raise
        return cls(savers)

    async def aclose(self) -> None:
        """Close all savers."""
        for saver in self.savers.values():
            await saver.aclose()

    def read(self, worker: Worker, thread: str, level: Consistency, _: Receipt | None = None) -> Awaitable[object]:
        """Read the newest checkpoint, sometimes list all of them."""
        if level is Consistency.READ_YOUR_WRITES and worker.chance.random() < 0.1:
            return list_(worker, self.savers[level], thread)
        return read(worker, self.savers[level], thread, level)


async def _saver(options: Options, level: Consistency) -> AsyncBufferedSaver:
    store = PostgresCheckpointStore(options.postgres, buffer_schema=options.schema, pool_size=4)
    saver = await AsyncBufferedSaver.open(
        store,
        nats=options.nats,
        # A prune, a copy or a list waits for several flushes within one call's time.
        config=dataclasses.replace(options.config, flush_timeout_s=4.0),
        consistency=level,
        on_conflict="allow" if options.seed % 2 else "reject",
    )

    async def written(receipt: Receipt) -> None:
        _receipt.set(receipt)

    after_each_append(saver, written)
    return saver


async def read(
    worker: Worker,
    saver: AsyncBufferedSaver,
    thread: str,
    level: Consistency = Consistency.READ_YOUR_WRITES,
    ns: str = "",
    asked: str | None = None,
) -> Position | None:
    """Read and record the newest checkpoint, or the requested one. Returns None when the read fails."""
    began = time.monotonic()
    try:
        found = await saver.aget_tuple(config(thread, asked, ns))
    except Exception as e:
        worker.failed(f"read {level.value}", began, e)
        return None
    ended = time.monotonic()
    seen = (key_of(found)[1], saved_of(found)) if found is not None else (None, None)
    worker.recorder.write(Shown(worker.name, thread, level.value, began, ended, ns, asked, *seen))
    position = position_of(found, ns)
    if asked is None and not thread.startswith(FORKED):
        names = None if found is None else position.names
        worker.recorder.write(Read(worker.name, thread, level.value, 0, began, ended, names))
    return position


async def list_(worker: Worker, saver: AsyncBufferedSaver, thread: str) -> None:
    """List and record the thread's checkpoints."""
    began = time.monotonic()
    try:
        keys = tuple([key_of(found) async for found in saver.alist({"configurable": {"thread_id": thread}})])
    except Exception as e:
        worker.failed("list", began, e)
    else:
        worker.recorder.write(Listed(worker.name, thread, began, time.monotonic(), keys))


class Writer:
    """Runs graphs on many threads at the same time."""

    def __init__(self, worker: Worker, saver: AsyncBufferedSaver) -> None:
        self._worker, self._saver, self._chance = worker, saver, worker.chance

    async def run(self) -> None:
        """Write until told to stop."""
        o = self._worker.options
        together = self._fork if o.seed % 2 else self._share
        slots = [together(n) for n in range(o.shared)]
        slots += [self._edit(n) for n in range(max(1, o.slots // 6))]
        slots += [self._own(n) for n in range(o.slots - len(slots))]
        await asyncio.gather(*slots)

    @property
    def _stopping(self) -> bool:
        return self._worker.stopping.is_set()

    # --- one write --------------------------------------------------------------------------------------------

    async def _put(self, thread: str, at: Position, kind: str = "put", run: str = "") -> Position | None:
        """Save the next checkpoint. Returns None if it may not be saved."""
        name = self._worker.new_name()
        step = at.next(name, self._saver.get_next_version, self._chance, run)
        id_ = step.checkpoint["id"]

        def save() -> Awaitable[RunnableConfig]:
            return self._saver.aput(
                config(thread, step.parent, at.ns), step.checkpoint, step.metadata, step.new_versions
            )

        def saving(op: int) -> Saving:
            return Saving(self._worker.name, op, at.ns, id_, step.parent, step.content, run)

        return step.after if await self._write(thread, kind, name, save, saving) else None

    async def _put_writes(
        self, thread: str, at: Position, task: str, channels: tuple[str, ...] = FIRST, kind: str = "writes"
    ) -> Position | None:
        """Save a task's writes on a checkpoint. Returns None if they may not be saved."""
        name, id_ = self._worker.new_name(), at.id
        assert id_ is not None

        def save() -> Awaitable[None]:
            writes = [(channel, name) for channel in channels]
            return self._saver.aput_writes(config(thread, id_, at.ns), writes, task)

        def saving(op: int) -> Saving:
            return Saving(self._worker.name, op, at.ns, id_, task=task, channels=channels)

        return at.with_pending(name) if await self._write(thread, kind, name, save, saving) else None

    async def _write(
        self,
        thread: str,
        kind: str,
        names: str | Sequence[str],
        save: Callable[[], Awaitable[object]],
        saving: Callable[[int], Saving] | None = None,
    ) -> bool:
        async def call(_: str | None) -> Receipt:
            _receipt.set(Receipt(thread, 0, 0, 0))  # an empty copy or prune writes nothing
            await save()
            return _receipt.get()

        names = [names] if names and isinstance(names, str) else names
        gives_up = (ThreadQuarantined, ConcurrentWriter)
        done = await self._worker.write(
            thread, kind, names, call, gives_up=gives_up, about=saving, in_parts=kind in _IN_PARTS
        )
        return done is not None

    # --- threads ----------------------------------------------------------------------------------------------

    async def _own(self, slot: int) -> None:
        """Write threads that only this process writes: checkpoints, and tasks' writes in between."""
        for generation in range(10**9):
            thread = f"{OWN}-{self._worker.name}-{slot}-{generation}"
            at: Position | None = Position()
            past: list[str] = []
            for n in range(_LENGTH):
                if self._stopping:
                    return
                assert at is not None
                if at.id is None or self._chance.random() < 0.6:
                    at = await self._put(thread, at)
                else:
                    at = await self._put_writes(thread, at, f"task {n:03}")
                if at is None:
                    break  # it is in quarantine
                if at.id is not None and at.id not in past:
                    past.append(at.id)
                if self._chance.random() < 0.03:
                    await read(self._worker, self._saver, thread, asked=self._chance.choice((None, *past)))

    async def _share(self, slot: int) -> None:
        """Write threads that every writer continues from what it has read; the second of two writers is rejected."""
        generation = 0
        while not self._stopping:
            thread = f"{SHARED}-{slot}-{generation}"
            at = await self._read(thread)
            while at is not None and at.step < _SHARED_LENGTH and self._chance.random() < 0.8:
                if at.id is None or self._chance.random() < 0.6:
                    at = await self._put(thread, at)
                else:
                    at = await self._put_writes(thread, at, f"task {len(at.pending):03} {self._worker.name}")
            generation += at is not None and at.step >= _SHARED_LENGTH

    async def _fork(self, slot: int) -> None:
        """Write threads that every writer continues from what it has read; concurrent checkpoints become branches."""
        generation = count = 0
        while not self._stopping:
            thread, ns = f"{FORKED}-{slot}-{generation}", self._chance.choice(("", "", "inner:1"))
            before = await self._read(thread, ns)
            if before is None:
                continue
            if before.step >= _SHARED_LENGTH:
                generation += 1
                continue
            after = await self._put(thread, before)
            if after is None:
                continue
            count += 1
            tasks = [self._put_writes(thread, after, f"{self._worker.name} {count} {part}") for part in "ab"]
            if before.id is not None:  # a task that several workers run
                channels = self._chance.choice((FIRST, LAST))
                tasks.append(self._put_writes(thread, before, f"contested {channels[0]}", channels))
            await asyncio.gather(*tasks)
            if self._chance.random() < 0.1:
                await read(self._worker, self._saver, thread, ns=ns, asked=after.id)

    async def _edit(self, slot: int) -> None:
        """Write threads that are also deleted, erased, pruned and copied. Their states are known after every step."""
        for generation in range(10**9):
            thread = f"{EDITED}-{self._worker.name}-{slot}-{generation}"
            at: Position | None = Position()
            #: Each run saves consecutive checkpoints. Runs that a copy shares are not deleted here.
            runs = [f"{thread} 0"]
            for n in range(1, _LENGTH + 1):
                if self._stopping or at is None:
                    return
                if at.id is not None and self._chance.random() < 0.25:
                    at = await self._remove_or_copy(thread, at, runs)
                elif at.id is None or self._chance.random() < 0.6:
                    if self._chance.random() < 0.4:
                        runs.append(f"{thread} {n}")
                    at = await self._put(thread, at, "add", runs[-1])
                else:
                    at = await self._put_writes(thread, at, f"task {len(at.pending):03}", kind="add")
                await self._worker.pause(0.1)

    async def _remove_or_copy(self, thread: str, at: Position, runs: list[str]) -> Position | None:
        """Do one operation on the whole thread. Returns None if it may not be done."""
        saver, me = self._saver, self._worker.name
        what = self._chance.choice(("delete", "erase", *["prune"] * 4, *["copy"] * 4, *["runs"] * 8))
        if what == "erase":
            done = await self._write(thread, "erase", "", lambda: saver.aerase_thread(thread))
            return Position() if done else None
        if what == "delete":
            done = await self._write(thread, "drop", "", lambda: saver.adelete_thread(thread))
            return Position() if done else None
        if what == "prune":

            def left(op: int) -> Saving:
                return Saving(me, op, at.ns, at.id or "", task="prune")

            return at if await self._write(thread, "prune", "", lambda: saver.aprune([thread]), left) else None

        if what == "runs":
            if len(runs) < 2:
                return at
            # Keep the last run, which may have saved the current checkpoint.
            run = runs.pop(self._chance.randrange(len(runs) - 1))

            def gone(op: int) -> Saving:
                return Saving(me, op, at.ns, "", run=run, task="runs")

            return at if await self._write(thread, "runs", "", lambda: saver.adelete_for_runs([run]), gone) else None

        def source(op: int) -> Saving:
            return Saving(me, op, at.ns, thread, task="copy")

        runs[:] = [f"{thread} behind {self._worker.ops}"]
        copy = f"{COPIED}-{thread}-{self._worker.ops}"
        names = [*at.names]
        return at if await self._write(copy, "copy", names, lambda: saver.acopy_thread(thread, copy), source) else None

    async def _read(self, thread: str, ns: str = "") -> Position | None:
        found = await read(self._worker, self._saver, thread, ns=ns)
        if found is None:
            await self._worker.pause(RETRY_PAUSE_S)
        return found


async def live(worker: Worker, savers: Savers) -> None:
    """Play the role until told to stop."""
    if worker.options.role in ("writer", "all"):
        await Writer(worker, savers.saver).run()
    elif worker.options.role == "reader":
        await Reader(worker, partial(savers.read, worker)).run()


if __name__ == "__main__":
    started(Savers.open, live)
