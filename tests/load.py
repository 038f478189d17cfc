"""Writers and readers that work while servers fail, judged by the rules of `chaos.checkers`."""

from __future__ import annotations

import asyncio
import time

from bufstore import BufferedThreadStore, BufstoreError, Consistency, LogUnavailable, OutcomeUnknown, Verification
from chaos import checkers
from chaos.history import Final, History, Op, Read, ThreadHistory
from helpers import eventually, flush_all, fresh, run_of

RULES = (
    checkers.lost, checkers.duplicated, checkers.phantom, checkers.reordered, checkers.not_a_past_state, checkers.stale,
    checkers.flicker,
)  # fmt: skip
#: Timeouts for stores whose servers stop and start.
PATIENCE = {"append_timeout_s": 2.0, "read_timeout_s": 2.0, "flush_timeout_s": 30.0}


class Load:
    """Writers and readers of some threads, and the history of what they saw."""

    def __init__(self, threads: int = 4) -> None:
        self.history = History()
        self._threads_each = threads
        #: One writer each: a retry is recognised among a thread's last 16 entries, and more writers could exceed that.
        self.threads: list[str] = []
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def write(self, store: BufferedThreadStore, who: str) -> None:
        """Start writers that append to threads of their own through this store."""
        threads = [fresh() for _ in range(self._threads_each)]
        self.threads += threads
        self._tasks += [asyncio.create_task(self._write(store, who, t)) for t in threads]

    def read(self, store: BufferedThreadStore, who: str, level: Consistency) -> None:
        """Start readers of every existing thread through this store."""
        self._tasks += [asyncio.create_task(self._read(store, who, t, level)) for t in self.threads]

    async def acknowledged(self, more: int, timeout_s: float = 60) -> None:
        """Wait until `more` further writes are acknowledged."""
        goal = self.history.acknowledged + more

        async def reached() -> bool:
            self._raise()
            return self.history.acknowledged >= goal

        await eventually(reached, timeout_s)

    async def end(self) -> None:
        """Stop all writers and readers; raises the error of any that failed."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def check(self, store: BufferedThreadStore) -> None:
        """Check that all acknowledged writes are in Postgres, once and in order, and that every read was right."""
        await flush_all(store, 180)

        async def flushed() -> Final | None:
            try:
                level = Consistency.EVENTUAL
                return Final({t: await store.load_messages(t, consistency=level) or [] for t in self.threads})
            except BufstoreError:
                return None  # the connection was lost

        final = await eventually(flushed)
        wrong = [str(v) for rule in RULES for v in rule(self.history, final)]
        assert not wrong, "\n".join(wrong[:20])

        async def verified() -> Verification | None:
            try:
                return await store.verify()
            except LogUnavailable:
                return None  # a node is still catching up

        report = await eventually(verified, 120)
        assert report.ok, report.findings

    def _raise(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _write(self, store: BufferedThreadStore, who: str, thread_id: str) -> None:
        ops = self.history.threads.setdefault(thread_id, ThreadHistory()).ops
        number = 0
        while not self._stop.is_set():
            name = f"{who}-{number}"
            op = Op(f"{who}-{thread_id}", thread_id, "append", (name,), time.monotonic())
            ops.append(op)
            while True:
                try:
                    receipt = await store.checkpoint_append(thread_id, [name], run_of(thread_id), idempotency_key=name)
                except BufstoreError as e:
                    op.kind = "retry" if isinstance(e, OutcomeUnknown) else op.kind  # a retry's position is unknown
                    if self._stop.is_set():
                        return
                    await asyncio.sleep(0.05)
                    continue
                break
            op.ended, op.outcome, op.seq = time.monotonic(), "ok", receipt.thread_seq
            number += 1
            await asyncio.sleep(0.01)

    async def _read(self, store: BufferedThreadStore, who: str, thread_id: str, level: Consistency) -> None:
        reads = self.history.threads.setdefault(thread_id, ThreadHistory()).reads
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                names = await store.load_messages(thread_id, consistency=level)
            except BufstoreError:
                names = None
            else:
                shown = tuple(names) if names is not None else None
                reads.append(Read(who, thread_id, level.value, 0, began, time.monotonic(), shown))
            await asyncio.sleep(0.05)
