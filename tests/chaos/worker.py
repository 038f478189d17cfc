"""A process of a chaos run: a writer, a reader, a flusher, or all in one. Run by `chaos.run`, which kills it.

Writers write names that nobody has written before, each once: an unknown outcome is retried with its token until it is
known, as the documentation says. Readers are handed receipts of others' writes over a datagram socket. Everything that
is done and seen is recorded; what it means is for the checkers to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bufstore import (
    BufferConfig,
    BufferedThreadStore,
    BufstoreError,
    Consistency,
    LogConfig,
    NotFound,
    OutcomeUnknown,
    PostgresThreadStore,
    Receipt,
    Run,
    ThreadQuarantined,
)
from chaos.history import EDITED, OWN, SHARED, WHOLE, Begin, End, Failed, Read, Recorder, Started

#: How many messages a thread gets before its writer turns to a new one.
_LENGTH = 40
_SHARED_LENGTH = 150
_READS_AT_ONCE = 8
#: Pauses between reads of one task, and between tries of a call that failed.
_READ_PAUSE_S = 0.05
_RETRY_PAUSE_S = 0.05
#: How long outcomes are still looked for when the process is to stop.
_STOP_S = 15.0


class Options(msgspec.Struct, frozen=True):
    """What a process is told."""

    name: str
    role: str
    seed: int
    nats: str
    postgres: str
    schema: str
    log: dict[str, Any]
    buffer: dict[str, Any]
    history: str
    #: Where the readers listen, and where this process does.
    readers: tuple[str, ...]
    socket: str = ""
    #: How many threads are written to at the same time, and how many of them together with others.
    slots: int = 64
    shared: int = 8
    #: How long after its answer an acknowledged write is repeated.
    late_retry_s: float = 8.0


class Worker:
    """What all roles have: the store, the recorder, when to stop."""

    def __init__(self, options: Options, store: BufferedThreadStore, recorder: Recorder) -> None:
        self.options = options
        self.name = options.name
        self.store = store
        self.recorder = recorder
        self.chance = random.Random(f"{options.seed} {options.name}")
        self.stopping = asyncio.Event()
        self.stop_at = 0.0

    def stop(self) -> None:
        """Begin nothing new."""
        self.stopping.set()
        self.stop_at = time.monotonic() + _STOP_S

    async def pause(self, seconds: float) -> None:
        """Sleep, or until stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    def failed(self, call: str, began: float, error: Exception) -> None:
        """Record that a call raised."""
        ours = [c.__name__ for c in type(error).__mro__ if c.__module__ == BufstoreError.__module__]
        name = ours[0] if ours else type(error).__name__
        self.recorder.write(Failed(self.name, call, began, time.monotonic(), name, str(error)))

    async def read(self, thread: str, level: Consistency, receipt: Receipt | None = None) -> tuple[str, ...] | None:
        """Read and record; what was seen, or None."""
        began = time.monotonic()
        try:
            found = await self.store.load_messages(thread, consistency=level, at_least=receipt)
        except Exception as e:
            self.failed(f"read {level.value}", began, e)
            return None
        names = None if found is None else tuple(m if isinstance(m, str) else m["id"] for m in found)
        at_least = receipt.thread_seq if receipt is not None else 0
        self.recorder.write(Read(self.name, thread, level.value, at_least, began, time.monotonic(), names))
        return names


class Writer:
    """Writes to many threads at the same time."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._store = worker.store
        self._chance = worker.chance
        self._count = 0
        self._ops = 0
        self._hand_over = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._hand_over.setblocking(False)
        self._late: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Write until told to stop."""
        o = self._worker.options
        slots = [self._together(n) for n in range(o.shared)]
        slots += [self._edit(n) for n in range(max(1, o.slots // 20))]
        slots += [self._own(n) for n in range(o.slots - len(slots))]
        await asyncio.gather(*slots)
        await asyncio.gather(*self._late)
        self._hand_over.close()

    def _name(self) -> str:
        self._count += 1
        return f"{self._worker.name}:{self._count}"

    # --- one write --------------------------------------------------------------------------------------------

    async def _write(
        self,
        thread: str,
        kind: str,
        names: Sequence[str],
        call: Callable[[str | None], Awaitable[Receipt]],
        heal: Callable[[str | None], Awaitable[Receipt]] | None = None,
        key: str | None = None,
        tries: int = 10**9,
    ) -> Receipt | None:
        """Do `call` with an idempotency key, or none, until its outcome is known.

        `heal` instead when the thread is broken. None if it did not succeed within `tries`, or before the end.
        """
        self._ops += 1
        op, write = self._ops, self._worker.recorder.write
        write(Begin(time.monotonic(), self._worker.name, op, thread, kind, tuple(names)))
        maybe = False
        while True:
            began = time.monotonic()
            try:
                receipt = await call(key)
            except Exception as e:
                self._worker.failed(kind, began, e)
                if isinstance(e, OutcomeUnknown):
                    maybe, key = True, e.token
                elif isinstance(e, ThreadQuarantined) and heal is not None and call is not heal:
                    call, key = heal, None
            else:
                write(End(time.monotonic(), self._worker.name, op, "ok", receipt.thread_seq))
                self._tell(receipt)
                return receipt
            tries -= 1
            if not tries or (self._worker.stopping.is_set() and time.monotonic() > self._worker.stop_at):
                write(End(time.monotonic(), self._worker.name, op, "unknown" if maybe else "rejected"))
                return None
            await asyncio.sleep(_RETRY_PAUSE_S * self._chance.random())

    def _tell(self, receipt: Receipt) -> None:
        if self._chance.random() < 0.1:
            data = msgspec.json.encode(receipt)
            for reader in self._worker.options.readers:
                with contextlib.suppress(OSError):  # it is away, or has enough to do
                    self._hand_over.sendto(data, reader)

    # --- threads ----------------------------------------------------------------------------------------------

    async def _own(self, slot: int) -> None:
        """Threads that only we write to, by appending or with the whole list each time."""
        whole = slot % 3 == 0
        for generation in range(10**9):
            thread = f"{WHOLE if whole else OWN}-{self._worker.name}-{slot}-{generation}"
            run = self._run(thread)
            names: list[str] = []
            for n in range(_LENGTH):
                if self._worker.stopping.is_set():
                    return
                name, kept = self._name(), [*names]

                def append(key: str | None, name: str = name, run: Run = run) -> Awaitable[Receipt]:
                    return self._store.checkpoint_append(run.thread_id, [name], run, idempotency_key=key)

                def save(key: str | None, all_: Sequence[str] = (*kept, name), run: Run = run) -> Awaitable[Receipt]:
                    return self._store.checkpoint(run.thread_id, all_, run, idempotency_key=key)

                last = n == _LENGTH - 1
                # The last one has a key from the start: it is repeated much later.
                key = f"key of {name}" if last and not whole else None
                receipt = await self._write(
                    thread, "whole" if whole else "append", [name], save if whole else append, save, key
                )
                if receipt is None:
                    return
                names.append(name)
                if self._chance.random() < 0.03:
                    await self._worker.read(thread, Consistency.READ_YOUR_WRITES)
                if last and key is not None and self._chance.random() < 0.2:
                    late = asyncio.ensure_future(self._repeat(thread, name, key, append))
                    self._late.add(late)
                    late.add_done_callback(self._late.discard)

    async def _repeat(
        self, thread: str, name: str, key: str, append: Callable[[str | None], Awaitable[Receipt]]
    ) -> None:
        """The same call with the same key, long after it was answered."""
        await self._worker.pause(self._worker.options.late_retry_s)
        if not self._worker.stopping.is_set():
            # Few tries: a poisoned thread stays closed to appends, as nobody heals it any more.
            await self._write(thread, "retry", [name], append, key=key, tries=5)

    async def _together(self, slot: int) -> None:
        """Threads that every writer appends to.

        So many that a key may have left the ring of the last 16 before it is used again.
        """
        generation = 0
        while not self._worker.stopping.is_set():
            thread = f"{SHARED}-{slot}-{generation}"
            run, name = self._run(thread), self._name()

            def append(key: str | None, name: str = name, run: Run = run) -> Awaitable[Receipt]:
                return self._store.checkpoint_append(run.thread_id, [name], run, idempotency_key=key)

            receipt = await self._write(thread, "append", [name], append)
            if receipt is not None and receipt.version >= _SHARED_LENGTH:
                generation += 1

    async def _edit(self, slot: int) -> None:
        """Threads whose messages, and themselves, are also deleted. Their states are known after every step."""
        for generation in range(10**9):
            thread = f"{EDITED}-{self._worker.name}-{slot}-{generation}"
            state: list[str] = []
            for _ in range(_LENGTH):
                if self._worker.stopping.is_set() or (seen := await self._edit_once(thread, state)) is None:
                    return
                state = seen
                await self._worker.pause(0.1)

    async def _edit_once(self, thread: str, state: list[str]) -> list[str] | None:
        """One edit; what the thread then holds, or None when that cannot be found out."""
        kind = self._chance.choices(("add", "remove", "drop"), (6, 2 if state else 0, 0.5 if state else 0))[0]
        names = [self._name()] if kind == "add" else self._chance.sample(state, min(2, len(state)))
        if kind == "drop":
            # Given up, a deletion may be carried out by whoever deletes next: repeated until it is known.
            return [] if await self._write(thread, kind, [], self._deletion(thread)) is not None else None

        async def edit(_: str | None) -> Receipt:
            if kind == "add":
                return await self._store.append_messages(thread, [{"id": n} for n in names])
            return await self._store.delete_messages(thread, names)

        if await self._write(thread, kind, names, edit, tries=1) is not None:
            if kind == "add":
                return [*state, *names]
            return [n for n in state if n not in names]
        # An edit has no key. Behind an entry that stands, what was sent before it either stands or never will.
        fence, run = self._name(), self._run(thread)
        receipt = await self._write(
            thread,
            "add",
            [fence],
            lambda key: self._store.checkpoint_append(thread, [{"id": fence}], run, idempotency_key=key),
        )
        while receipt is not None and not self._worker.stopping.is_set():
            began = time.monotonic()
            seen = await self._worker.read(thread, Consistency.READ_YOUR_WRITES, receipt)
            if seen is not None:
                self._ops += 1
                op, write = self._ops, self._worker.recorder.write
                write(Begin(began, self._worker.name, op, thread, "saw", seen))
                write(End(time.monotonic(), self._worker.name, op, "ok"))
                return list(seen)
            await self._worker.pause(_RETRY_PAUSE_S)
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
                return Receipt(thread, 0, 0, 0)  # the one before has done it

        return delete

    def _run(self, thread: str) -> Run:
        return Run(run_id=f"{thread} by {self._worker.name}", thread_id=thread)


class Reader:
    """Reads what others have written."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._receipts: deque[Receipt] = deque(maxlen=300)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        Path(worker.options.socket).unlink(missing_ok=True)
        self._socket.bind(worker.options.socket)
        self._socket.setblocking(False)

    async def run(self) -> None:
        """Read until told to stop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._on_receipt)
        await asyncio.gather(*(self._read() for _ in range(_READS_AT_ONCE)))
        loop.remove_reader(self._socket)
        self._socket.close()

    def _on_receipt(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receipts.append(msgspec.json.decode(self._socket.recv(4096), type=Receipt))

    async def _read(self) -> None:
        chance = self._worker.chance
        levels = list(Consistency)
        while not self._worker.stopping.is_set():
            await self._worker.pause(_READ_PAUSE_S)
            if not self._receipts:
                continue
            receipt = self._receipts[-1] if chance.random() < 0.5 else chance.choice(self._receipts)
            level = chance.choices(levels, [{"strong": 1, "eventual": 3}.get(level.value, 6) for level in levels])[0]
            # At the Eventual level a receipt makes a read wait for its flush: now and then only.
            handed = receipt if chance.random() < (0.2 if level is Consistency.EVENTUAL else 0.7) else None
            await self._worker.read(receipt.thread_id, level, handed)


async def main(options: Options) -> None:
    """Open the store, however long that takes, and do what the role says until SIGTERM."""
    recorder = Recorder(Path(options.history))
    config = BufferConfig(log=LogConfig(**options.log), flusher=options.role in ("flusher", "all"), **options.buffer)
    loop, opening = asyncio.get_running_loop(), asyncio.current_task()
    assert opening is not None
    loop.add_signal_handler(signal.SIGTERM, opening.cancel)  # told to end before it has begun
    store = None
    while store is None:
        began = time.monotonic()
        inner = PostgresThreadStore(options.postgres, schema=options.schema, pool_size=4)
        try:
            store = await BufferedThreadStore.open(inner, nats=options.nats, config=config)
        except asyncio.CancelledError:
            return
        except BufstoreError as e:
            logging.getLogger("chaos").warning("cannot open after %.1f s: %s", time.monotonic() - began, e)
            await asyncio.sleep(0.2)
    worker = Worker(options, store, recorder)
    loop.add_signal_handler(signal.SIGTERM, worker.stop)
    loop.add_signal_handler(signal.SIGUSR1, _step_clock, worker.chance)
    member = store.buffer.flusher._member if store.buffer.flusher is not None else ""
    recorder.write(Started(time.monotonic(), options.name, os.getpid(), member))
    async with store:
        if options.role in ("writer", "all"):
            await Writer(worker).run()
        elif options.role == "reader":
            await Reader(worker).run()
        else:
            await worker.stopping.wait()
    recorder.close()


_true_time = time.time


def _step_clock(chance: random.Random) -> None:
    """The wall clock jumps, for everybody in this process who asks Python for it."""
    offset = chance.choice((-7200.0, -60.0, 60.0, 7200.0))
    time.time = lambda: _true_time() + offset


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(levelname)s %(name)s: %(message)s")
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    told = msgspec.json.decode(sys.argv[1], type=Options)
    factory = None
    if told.seed % 2:  # half of the runs on the faster loop, if it is there
        with contextlib.suppress(ModuleNotFoundError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(told))
