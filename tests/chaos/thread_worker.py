"""A process that writes and reads threads: a writer, a reader, a flusher, or all in one. See `chaos.process`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from bufstore import (
    BufferedThreadStore,
    Consistency,
    NotFound,
    OutcomeUnknown,
    PostgresThreadStore,
    Receipt,
    Run,
)
from chaos.history import EDITED, OWN, SHARED, WHOLE, Begin, End, Read
from chaos.process import RETRY_PAUSE_S, Options, Reader, Worker, started

#: How many messages a thread gets before its writers start a new one.
_LENGTH = 40
_SHARED_LENGTH = 150


async def read(
    worker: Worker, store: BufferedThreadStore, thread: str, level: Consistency, receipt: Receipt | None = None
) -> tuple[str, ...] | None:
    """Read and record. Returns the names, or None when the read fails or the thread does not exist."""
    began = time.monotonic()
    try:
        found = await store.load_messages(thread, consistency=level, at_least=receipt)
    except Exception as e:
        worker.failed(f"read {level.value}", began, e)
        return None
    names = None if found is None else tuple(m if isinstance(m, str) else m["id"] for m in found)
    at_least = receipt.thread_seq if receipt is not None else 0
    worker.recorder.write(Read(worker.name, thread, level.value, at_least, began, time.monotonic(), names))
    return names


class Writer:
    """Writes to many threads at the same time."""

    def __init__(self, worker: Worker, store: BufferedThreadStore) -> None:
        self._worker = worker
        self._store = store
        self._chance = worker.chance
        self._late: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Write until told to stop."""
        o = self._worker.options
        slots = [self._together(n) for n in range(o.shared)]
        slots += [self._edit(n) for n in range(max(1, o.slots // 20))]
        slots += [self._own(n) for n in range(o.slots - len(slots))]
        await asyncio.gather(*slots)
        await asyncio.gather(*self._late)

    # --- threads ----------------------------------------------------------------------------------------------

    async def _own(self, slot: int) -> None:
        """Write threads that only this process writes, by appending or with the whole list each time."""
        whole = slot % 3 == 0
        for generation in range(10**9):
            thread = f"{WHOLE if whole else OWN}-{self._worker.name}-{slot}-{generation}"
            run = self._run(thread)
            names: list[str] = []
            for n in range(_LENGTH):
                if self._worker.stopping.is_set():
                    return
                name, kept = self._worker.new_name(), [*names]

                def append(key: str | None, name: str = name, run: Run = run) -> Awaitable[Receipt]:
                    return self._store.checkpoint_append(run.thread_id, [name], run, idempotency_key=key)

                def save(key: str | None, all_: Sequence[str] = (*kept, name), run: Run = run) -> Awaitable[Receipt]:
                    return self._store.checkpoint(run.thread_id, all_, run, idempotency_key=key)

                last = n == _LENGTH - 1
                # The last append has a key from the start, because it is repeated much later.
                key = f"key of {name}" if last and not whole else None
                receipt = await self._worker.write(
                    thread, "whole" if whole else "append", [name], save if whole else append, save, key
                )
                if receipt is None:
                    return
                names.append(name)
                if self._chance.random() < 0.03:
                    await read(self._worker, self._store, thread, Consistency.READ_YOUR_WRITES)
                if last and key is not None and self._chance.random() < 0.2:
                    late = asyncio.ensure_future(self._repeat(thread, name, key, append))
                    self._late.add(late)
                    late.add_done_callback(self._late.discard)

    async def _repeat(
        self, thread: str, name: str, key: str, append: Callable[[str | None], Awaitable[Receipt]]
    ) -> None:
        """Repeat a call with its key, long after it was answered."""
        await self._worker.pause(self._worker.options.late_retry_s)
        if not self._worker.stopping.is_set():
            # Few tries: a poisoned thread refuses appends, and nobody heals it any more.
            await self._worker.write(thread, "retry", [name], append, key=key, tries=5)

    async def _together(self, slot: int) -> None:
        """Append to threads that every writer appends to.

        They get so many appends that a key may have left the ring of the last 16 before it is used again.
        """
        generation = 0
        while not self._worker.stopping.is_set():
            thread = f"{SHARED}-{slot}-{generation}"
            run, name = self._run(thread), self._worker.new_name()

            def append(key: str | None, name: str = name, run: Run = run) -> Awaitable[Receipt]:
                return self._store.checkpoint_append(run.thread_id, [name], run, idempotency_key=key)

            receipt = await self._worker.write(thread, "append", [name], append)
            if receipt is not None and receipt.version >= _SHARED_LENGTH:
                generation += 1

    async def _edit(self, slot: int) -> None:
        """Write threads that are deleted too, as are messages of theirs. Their states are known after every step."""
        for generation in range(10**9):
            thread = f"{EDITED}-{self._worker.name}-{slot}-{generation}"
            state: list[str] = []
            for _ in range(_LENGTH):
                if self._worker.stopping.is_set() or (seen := await self._edit_once(thread, state)) is None:
                    return
                state = seen
                await self._worker.pause(0.1)

    async def _edit_once(self, thread: str, state: list[str]) -> list[str] | None:
        """Do one edit. Returns the thread's messages, or None when they cannot be determined."""
        kind = self._chance.choices(("add", "remove", "drop"), (6, 2 if state else 0, 0.5 if state else 0))[0]
        names = [self._worker.new_name()] if kind == "add" else self._chance.sample(state, min(2, len(state)))
        if kind == "drop":
            # Repeated until its outcome is known: the next deletion by any process may carry out one that was given up.
            return [] if await self._worker.write(thread, kind, [], self._deletion(thread)) is not None else None

        async def edit(_: str | None) -> Receipt:
            if kind == "add":
                return await self._store.append_messages(thread, [{"id": n} for n in names])
            return await self._store.delete_messages(thread, names)

        if await self._worker.write(thread, kind, names, edit, tries=1) is not None:
            if kind == "add":
                return [*state, *names]
            return [n for n in state if n not in names]
        # An edit has no key. Once a later entry is stored, an earlier call is either stored or never will be.
        fence, run = self._worker.new_name(), self._run(thread)
        receipt = await self._worker.write(
            thread,
            "add",
            [fence],
            lambda key: self._store.checkpoint_append(thread, [{"id": fence}], run, idempotency_key=key),
        )
        while receipt is not None and not self._worker.stopping.is_set():
            began = time.monotonic()
            seen = await read(self._worker, self._store, thread, Consistency.READ_YOUR_WRITES, receipt)
            if seen is not None:
                self._worker.ops += 1
                op, write = self._worker.ops, self._worker.recorder.write
                write(Begin(began, self._worker.name, op, thread, "saw", seen))
                write(End(time.monotonic(), self._worker.name, op, "ok"))
                return list(seen)
            await self._worker.pause(RETRY_PAUSE_S)
        return None

    def _deletion(self, thread: str) -> Callable[[str | None], Awaitable[Receipt]]:
        maybe = False

        async def delete(_: str | None) -> Receipt:
            nonlocal maybe
            try:
                return await self._store.delete_thread(thread)
            except OutcomeUnknown:
                maybe = True
                raise
            except NotFound:
                if not maybe:
                    raise
                return Receipt(thread, 0, 0, 0)  # an earlier try has deleted it

        return delete

    def _run(self, thread: str) -> Run:
        return Run(run_id=f"{thread} by {self._worker.name}", thread_id=thread)


async def opened(options: Options) -> BufferedThreadStore:
    """Open a process's store."""
    inner = PostgresThreadStore(options.postgres, schema=options.schema, pool_size=4)
    return await BufferedThreadStore.open(inner, nats=options.nats, config=options.config)


async def live(worker: Worker, store: BufferedThreadStore) -> None:
    """Play the role until told to stop."""
    if worker.options.role in ("writer", "all"):
        await Writer(worker, store).run()
    elif worker.options.role == "reader":
        await Reader(worker, partial(read, worker, store)).run()


if __name__ == "__main__":
    started(opened, live)
