"""A log in memory that fails in all ways in which a real one can, and an event loop whose clock costs no time."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from bufstore.buffer import recent_keys
from bufstore.buffer.entry import Base, Entry, decode, encode
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import BufstoreError, LogFull, LogUnavailable
from bufstore.jetstream.messages import AppendUnknown, BatchRefused, Conflict, Outgoing, StoredMessage
from bufstore.memory.log import MemoryLog, MemoryStream
from bufstore.threads.model import Run, encode_messages, encode_run
from bufstore.threads.payload import Payload, encode_payload
from bufstore.threads.write import save_of

T = TypeVar("T")

_CALLS_MAX = 20_000

#: The faults of a write.
WRITE_FAULTS = ("", "unavailable", "full", "refused", "lost", "stored", "late", "slow", "intruder")


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits, but adds the time of each wait to the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("everything waits for something that never comes")
        if timeout <= 0:
            return []  # no test here waits for a file, and asking the system takes longer than going on
        self.now += timeout
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time. Fails on a leaked task, and on an exception that nobody retrieved."""
    loop = JumpingLoop()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    try:
        result = loop.run_until_complete(main)
        for _ in range(5):
            loop.run_until_complete(asyncio.sleep(0))
        left = asyncio.all_tasks(loop)
        assert not left, f"leaked tasks: {left}"
        gc.collect(0)  # an exception that nobody retrieved is reported when its future is collected
        loop.run_until_complete(asyncio.sleep(0))
        assert not complaints, complaints
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


class FakeLog(MemoryLog):
    """A stream in memory whose calls can fail: `fault` returns the fault of the next call."""

    def __init__(self, message_bytes_max: int = 1 << 20) -> None:
        config = BufferConfig(log=LogConfig(partitions=4, max_bytes=1 << 30))
        self.stream = MemoryStream(config.log)
        super().__init__({config.log.stream: self.stream}, config, message_bytes_max)
        #: Returns the next call's fault; called with "publish", "batch" or "read".
        self.fault: Callable[[str], str] = lambda _: ""
        self.batches: list[int] = []
        self.last_of = self.stream.last_of
        self.store = self.stream.store
        self._late: list[tuple[int, Sequence[Outgoing]]] = []
        self._ids = itertools.count(1 << 62)

    @property
    def messages(self) -> list[StoredMessage]:
        return self.stream.messages

    @property
    def last_seq(self) -> int:
        return self.stream.end

    # --- writes

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        return await self._send("publish", [message])

    async def publish_each(
        self, messages: Sequence[Outgoing], timeout_s: float, ended: Callable[[int, int | Exception], None]
    ) -> None:
        async def one(number: int, message: Outgoing) -> None:
            outcome: int | Exception
            try:
                outcome = await self.publish(message, timeout_s)
            except (Conflict, AppendUnknown, BufstoreError) as e:
                outcome = e
            ended(number, outcome)

        await asyncio.gather(*(one(number, message) for number, message in enumerate(messages)))

    async def publish_batch(self, messages: Sequence[Outgoing], timeout_s: float) -> int:
        self.batches.append(len(messages))
        return await self._send("batch", messages)

    async def _send(self, kind: str, messages: Sequence[Outgoing]) -> int:
        fault = self.fault(kind)
        await super()._turn()
        self._land()
        match fault:
            case "unavailable":
                raise LogUnavailable("no leader")
            case "full":
                raise LogFull("maximum bytes exceeded")
            case "refused" if kind == "batch":
                raise BatchRefused("too many batches")
            case "lost":
                raise AppendUnknown("no answer")
            case "late":
                self._late.append((self.calls + random.randint(1, 4), messages))
                raise AppendUnknown("no answer")
            case "stored":
                try:
                    self.store(messages)
                except Conflict:
                    raise AppendUnknown("no answer") from None
                raise AppendUnknown("no answer")
            case "slow":
                await asyncio.sleep(2)
            case "intruder":
                self.intrude(messages[-1].subject)
        seq = self.store(messages)
        await asyncio.sleep(0)
        return seq

    def intrude(self, subject: str, content: str = "intruder") -> int:
        """Write a full checkpoint to the thread, as another process. Returns the id of the entry."""
        there = [m for m in self.messages if m.subject == subject]
        before = decode(there[-1]) if there else None
        id_ = next(self._ids)
        run_ = Run(run_id=f"intruder-{id_}", thread_id="t")
        entry = Entry(
            id=id_,
            prev_id=before.id if before else 0,
            base=Base.CHAINED if before else Base.UNKNOWN,
            seen=0 if before else self.last_seq,
            version=1,
            self_contained=True,
            keys=recent_keys.add(before.keys if before else b"", recent_keys.item(recent_keys.key_of(id_), b"")),
            # Like any writer, the intruder knows all keys only if the writer before it did.
            keys_complete=before is not None and before.keys_complete,
            payload=encode_payload(Payload(0, encode_messages([f"{content} {id_}"]), encode_run(run_), save_of(run_))),
        )
        header, body = encode(entry)
        self.store([Outgoing(subject, body, header)])
        return id_

    # --- reads

    async def _turn(self) -> MemoryStream:
        fault = self.fault("read")
        stream = await super()._turn()
        self._land()
        if fault == "unavailable":
            raise LogUnavailable("no answer")
        return stream

    def expire_below(self, seq: int) -> None:
        """Remove everything below `seq`, as retention does."""
        self.stream.purge(seq)

    def _land(self) -> None:
        """Store the late messages whose time has come."""
        assert self.calls < _CALLS_MAX, "a storm of calls: somebody tries again and again without a pause"
        due = [messages for when, messages in self._late if when <= self.calls]
        self._late = [(when, messages) for when, messages in self._late if when > self.calls]
        for messages in due:
            try:
                self.store(messages)
            except Conflict:
                continue
