"""The common part of all processes of a chaos run: start, recording, writes and stop.

`chaos.run` starts and kills the processes. Writers write each name once in the whole run, and retry an unknown outcome
until it is known, as the documentation says. Readers receive other processes' receipts over a datagram socket. All
calls and results are recorded; the checkers judge them.
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
from typing import Any, Protocol, TypeVar

import msgspec

from bufstore import (
    BufferConfig,
    BufstoreError,
    Consistency,
    LogConfig,
    OutcomeUnknown,
    Receipt,
    ThreadQuarantined,
)
from bufstore.buffer.side_by_side import Lanes
from chaos.history import Begin, End, Event, Failed, Recorder, Started

_READS_AT_ONCE = 8
#: Seconds between a task's reads, and between tries of a call that failed.
_READ_PAUSE_S = 0.05
RETRY_PAUSE_S = 0.05
#: How long a stopping process still resolves outcomes, in seconds.
_STOP_S = 15.0

#: Reads and records, given a thread, a level and a receipt.
ReadOnce = Callable[[str, Consistency, Receipt | None], Awaitable[object]]


class Options(msgspec.Struct, frozen=True):
    """The options of a process."""

    name: str
    role: str
    seed: int
    nats: str
    postgres: str
    schema: str
    log: dict[str, Any]
    buffer: dict[str, Any]
    history: str
    #: The sockets of the readers, and that of this process.
    readers: tuple[str, ...]
    socket: str = ""
    #: How many threads are written at the same time, and how many of these are shared with other writers.
    slots: int = 64
    shared: int = 8
    #: Seconds between the answer of a write and its late repetition.
    late_retry_s: float = 8.0

    @property
    def config(self) -> BufferConfig:
        """The buffer's configuration; with a flusher if the role has one."""
        return BufferConfig(log=LogConfig(**self.log), flusher=self.role in ("flusher", "all"), **self.buffer)


class Store(Protocol):
    """The store that a domain opens."""

    lanes: Lanes[Any, Any, Any]

    async def aclose(self) -> None:
        """Close it."""
        ...


S = TypeVar("S", bound=Store)


class Worker:
    """The common part of all roles: the recorder, names, writes, and when to stop."""

    def __init__(self, options: Options, recorder: Recorder) -> None:
        self.options = options
        self.name = options.name
        self.recorder = recorder
        self.chance = random.Random(f"{options.seed} {options.name}")
        self.stopping = asyncio.Event()
        self.stop_at = 0.0
        self.ops = 0
        self._names = 0
        self._hand_over = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._hand_over.setblocking(False)

    def stop(self) -> None:
        """Begin nothing new."""
        self.stopping.set()
        self.stop_at = time.monotonic() + _STOP_S

    def close(self) -> None:
        """Close socket and recorder."""
        self._hand_over.close()
        self.recorder.close()

    async def pause(self, seconds: float) -> None:
        """Sleep, or return when told to stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    def failed(self, call: str, began: float, error: Exception) -> None:
        """Record that a call raised."""
        ours = [c.__name__ for c in type(error).__mro__ if c.__module__ == BufstoreError.__module__]
        name = ours[0] if ours else type(error).__name__
        self.recorder.write(Failed(self.name, call, began, time.monotonic(), name, str(error)))

    def new_name(self) -> str:
        """Return a name that no process has written."""
        self._names += 1
        return f"{self.name}:{self._names}"

    async def write(
        self,
        thread: str,
        kind: str,
        names: Sequence[str],
        call: Callable[[str | None], Awaitable[Receipt]],
        heal: Callable[[str | None], Awaitable[Receipt]] | None = None,
        key: str | None = None,
        tries: int = 10**9,
        *,
        gives_up: tuple[type[Exception], ...] = (),
        about: Callable[[int], Event] | None = None,
        in_parts: bool = False,
    ) -> Receipt | None:
        """Do `call`, with an idempotency key or without, until its outcome is known.

        When the thread is broken, do `heal` instead. Returns None if it did not succeed within `tries` or before the
        end, or raised one of `gives_up`. `about`: makes an additional event from the write's number. `in_parts`: a call
        that raises, with whatever error, may have done a part.
        """
        self.ops += 1
        op, write = self.ops, self.recorder.write
        if about is not None:
            write(about(op))
        write(Begin(time.monotonic(), self.name, op, thread, kind, tuple(names)))
        maybe = False
        while True:
            began, over = time.monotonic(), False
            try:
                receipt = await call(key)
            except Exception as e:
                self.failed(kind, began, e)
                over, maybe = isinstance(e, gives_up), maybe or in_parts
                if isinstance(e, OutcomeUnknown):
                    maybe, key = True, e.token
                elif isinstance(e, ThreadQuarantined) and heal is not None and call is not heal:
                    call, key = heal, None
            else:
                write(End(time.monotonic(), self.name, op, "ok", receipt.thread_seq, maybe))
                self._tell(receipt)
                return receipt
            tries -= 1
            if over or not tries or (self.stopping.is_set() and time.monotonic() > self.stop_at):
                write(End(time.monotonic(), self.name, op, "unknown" if maybe else "rejected"))
                return None
            await asyncio.sleep(RETRY_PAUSE_S * self.chance.random())

    def _tell(self, receipt: Receipt) -> None:
        if self.chance.random() < 0.1:
            data = msgspec.json.encode(receipt)
            for reader in self.options.readers:
                with contextlib.suppress(OSError):  # it is away or busy
                    self._hand_over.sendto(data, reader)


class Reader:
    """Reads what other processes have written."""

    def __init__(self, worker: Worker, read: ReadOnce) -> None:
        self._worker, self._read_once = worker, read
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
            # At the Eventual level a read with a receipt waits for its flush, so few reads get one.
            handed = receipt if chance.random() < (0.2 if level is Consistency.EVENTUAL else 0.7) else None
            await self._read_once(receipt.thread_id, level, handed)


async def main(
    options: Options,
    open_: Callable[[Options], Awaitable[S]],
    live: Callable[[Worker, S], Awaitable[None]],
) -> None:
    """Open the store, retrying until it succeeds, and play the role until SIGTERM."""
    recorder = Recorder(Path(options.history))
    loop, opening = asyncio.get_running_loop(), asyncio.current_task()
    assert opening is not None
    loop.add_signal_handler(signal.SIGTERM, opening.cancel)  # for a SIGTERM before the store is open
    store = None
    while store is None:
        began = time.monotonic()
        try:
            store = await open_(options)
        except asyncio.CancelledError:
            return
        except BufstoreError as e:
            logging.getLogger("chaos").warning("cannot open after %.1f s: %s", time.monotonic() - began, e)
            await asyncio.sleep(0.2)
    worker = Worker(options, recorder)
    loop.add_signal_handler(signal.SIGTERM, worker.stop)
    loop.add_signal_handler(signal.SIGUSR1, _step_clock, worker.chance)
    members = tuple(b.flusher.member for b in store.lanes.all if b.flusher is not None)
    recorder.write(Started(time.monotonic(), options.name, os.getpid(), members))
    try:
        await live(worker, store)
        await worker.stopping.wait()
    finally:
        await store.aclose()
        worker.close()


_true_time = time.time


def _step_clock(chance: random.Random) -> None:
    """Make the wall clock jump, for all code of this process that asks Python for the time."""
    offset = chance.choice((-7200.0, -60.0, 60.0, 7200.0))
    time.time = lambda: _true_time() + offset


def started(open_: Callable[[Options], Awaitable[S]], live: Callable[[Worker, S], Awaitable[None]]) -> None:
    """Run a worker module as a process."""
    logging.basicConfig(level=logging.INFO, format="%(created).3f %(levelname)s %(name)s: %(message)s")
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    told = msgspec.json.decode(sys.argv[1], type=Options)
    factory = None
    if told.seed % 2:  # half of the runs use the faster loop, if it is installed
        with contextlib.suppress(ModuleNotFoundError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(told, open_, live))
