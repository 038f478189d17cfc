"""A process that does everything at once, and kills itself at one failpoint: `python -m sweep.worker OPTIONS`.

In one life it has two instances on one log; threads that both append to, one with large messages and one that has to
wait; threads whose entries the store refuses and that are replayed or discarded; families that are deleted. In the end
all is flushed and closed. First of all it repeats, with their keys, the appends whose outcome the life before did not
learn, as an application would do.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bufstore import (
    BufferConfig,
    BufferedThreadStore,
    BufstoreError,
    Children,
    LogConfig,
    LogFull,
    LogUnavailable,
    NotFound,
    OutcomeUnknown,
    PostgresThreadStore,
    ReadNotFresh,
    Receipt,
    Run,
    StoreUnavailable,
    failpoints,
)
from bufstore.failpoints import Failpoint
from chaos.history import EDITED, SHARED, Begin, End, Read, Recorder, load

_THREADS = 10
_APPENDS = 12
#: How many threads are written while refused entries are flushed: more than are refused in all lives.
_OTHERS = 10
#: Bytes of a large message; how many characters of a name make its idempotency key.
_LARGE = 1_100_000
_KEY = 100
#: The thread that has to wait.
_HELD = f"{SHARED}-held"
#: Errors after which a call is safely repeated with the same key.
_TRANSIENT = (OutcomeUnknown, LogUnavailable, LogFull, StoreUnavailable, ReadNotFresh)


class Refusing(PostgresThreadStore):
    """A store that refuses marked messages, as a table's constraint would, until it is mended."""

    mended = False
    #: Whether the thread `_HELD` has to wait, in all instances.
    holding = False

    async def apply(self, connection: Any, batch: Any) -> None:
        if Refusing.holding and any(c.thread_id == _HELD for c in batch):
            await connection.execute("DO $$ BEGIN RAISE EXCEPTION 'not now'; END $$")
        if not self.mended and any(b"poison" in m for c in batch for m in c.messages):
            await connection.execute("SELECT 1/0")
        await super().apply(connection, batch)


class Life:
    """One life of the process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        path = Path(options["history"])
        #: Appends that an earlier life began and whose outcome it did not learn.
        self._open: list[tuple[str, str]] = []
        for thread_id, t in load([path]).threads.items() if path.exists() else ():
            ended = {o.names[0] for o in t.ops if o.kind in ("append", "retry") and o.outcome != "unknown"}
            self._open += [(thread_id, o.names[0]) for o in t.ops if o.kind == "append" and o.names[0] not in ended]
        self._life = options["life"]
        self._process = f"life-{self._life}"
        self._recorder = Recorder(path)
        self._count = 0
        self._visits = 0
        self._stores: list[BufferedThreadStore] = []

    def reached(self, point: Failpoint) -> None:
        """The hook of the failpoints: kill the process at the wanted visit of the wanted point."""
        if point != self._options["point"]:
            return
        self._visits += 1
        if self._visits == self._options["visit"]:
            os.kill(os.getpid(), signal.SIGKILL)

    async def live(self) -> None:
        """Work to the end, or until killed at the failpoint."""
        failpoints.active = self.reached
        purging = {"append_timeout_s": 1.0, "read_timeout_s": 1.0, "retain_after_flush_s": 2}
        config = BufferConfig.fitting(
            LogConfig(**self._options["log"]),
            flush_interval_s=0.1,
            lease_s=4,
            **(purging if self._options["purging"] else {}),  # type: ignore[arg-type]
        )
        inner = [Refusing(self._options["postgres"], schema=self._options["schema"], pool_size=3) for _ in range(2)]
        first = await BufferedThreadStore.open(inner[0], nats=self._options["nats"], config=config)
        self._stores = [first]
        # This comes first, because a thread remembers only the keys of its last 16 entries.
        await self._repeat()
        async with asyncio.TaskGroup() as group:
            second = await BufferedThreadStore.open(inner[1], nats=self._options["nats"], config=config)
            self._stores.append(second)
            for n in range(_THREADS):
                group.create_task(self._talk(n))
            group.create_task(self._say_much())
            group.create_task(self._poison(inner[0], first))
            group.create_task(self._family())
            group.create_task(self._wait_for_turn())
            group.create_task(self._close(second))
        if self._options["purging"]:
            await asyncio.sleep(3.0)
        await first.aclose()
        self._recorder.close()

    async def _close(self, second: BufferedThreadStore) -> None:
        """Close the second instance while the first goes on."""
        await asyncio.sleep(0.3)
        self._stores.remove(second)
        await second.aclose()

    async def _repeat(self) -> None:
        """Repeat appends that the life before left open. The next change of lineage completes open deletions."""
        for thread_id, name in self._open:
            await self._append(thread_id, name, kind="retry")

    async def _talk(self, n: int) -> None:
        thread_id = f"{SHARED}-{n}"
        for i in range(_APPENDS):
            await self._append(thread_id, f"{self._process}.{n}.{i}")
            if i % 5 == 4:
                await self._read(thread_id)

    async def _say_much(self) -> None:
        """Append messages that do not fit into one message of the log."""
        for i in range(2):
            await self._append(f"{SHARED}-large", f"{self._process}.large.{i}.{'x' * _LARGE}")

    async def _read(self, thread_id: str) -> None:
        async def read() -> None:
            began = time.monotonic()
            names = await self._stores[0].load_messages(thread_id)
            shown = tuple(names) if names is not None else None
            self._recorder.write(Read(self._process, thread_id, "read-your-writes", 0, began, time.monotonic(), shown))

        await self._patiently(read)

    async def _append(self, thread_id: str, name: str, *, kind: str = "append") -> None:
        """Append a message; its name is the idempotency key, so that a later life can repeat the append."""
        run = Run(run_id=f"run-of-{thread_id}", thread_id=thread_id)
        receipt = await self._call(
            kind, thread_id, [name],
            lambda: self._stores[-1].checkpoint_append(thread_id, [name], run, idempotency_key=name[:_KEY]),
        )  # fmt: skip
        if receipt is not None and receipt.repeated and kind != "retry":
            await self._append(thread_id, name, kind="retry")

    async def _poison(self, inner: Refusing, store: BufferedThreadStore) -> None:
        """Append refused entries, which are parked with those behind them; then replay or discard them."""
        for n, replayed in enumerate((True, False)):
            threads = [f"poisoned-{self._life}-{n}-{i}" for i in range(2)]
            for thread_id in threads:
                await self._append(thread_id, f"{thread_id}.first")
            # They are written together, so that the flusher has to split the window to find the entry to blame.
            await asyncio.gather(*(self._append_poison(t) for t in threads))
            flushing = asyncio.create_task(self._patiently(lambda: store.force_flush_all(timeout_s=20)))
            await self._go_on(flushing, n)
            for thread_id in threads:
                if replayed:
                    inner.mended = True
                    await self._patiently(lambda t=thread_id: store.quarantine.replay_thread(t))  # type: ignore[misc]
                    inner.mended = False
                    continue
                seqs = [p.seq for p in await store.quarantine.page(thread_id=thread_id)]
                await self._call("discard", thread_id, [str(s) for s in seqs], lambda s=seqs: _discard(store, s))

    async def _go_on(self, flushing: asyncio.Task[None], n: int) -> None:
        """Write other threads meanwhile: while more entries are refused than applied, no entry is blamed."""
        for i in range(_OTHERS * 20):
            if flushing.done():
                break
            await self._append(f"{SHARED}-{_THREADS + i % _OTHERS}", f"{self._process}.beside.{n}.{i}")
            await asyncio.wait([flushing], timeout=0.1)
        await flushing

    async def _append_poison(self, thread_id: str) -> None:
        for what in ("poison", "behind", "last"):
            await self._append(thread_id, f"{thread_id}.{what}")

    async def _wait_for_turn(self) -> None:
        """Make the store refuse a thread so long that its entries wait in the ledger; then let it accept them."""
        Refusing.holding = True
        for i in range(_APPENDS):
            await self._append(_HELD, f"{self._process}.held.{i}")
            await asyncio.sleep(0.15)
        Refusing.holding = False
        await self._patiently(lambda: self._stores[0].force_flush(_HELD, timeout_s=20))

    async def _family(self) -> None:
        """Delete parent, two children and a grandchild together; then create a thread with the parent's name again."""
        names = [f"{EDITED}-{self._life}-{who}" for who in ("parent", "child", "sibling", "grandchild")]
        for name, parent in zip(names, (None, names[0], names[0], names[1]), strict=True):
            await self._create(name, "old", parent)
        await self._call("delete", names[0], names, lambda: _delete(self._stores[0], names[0]))
        await self._create(names[0], "new", None)
        # The next change of lineage completes the deletion if the call above did not.
        await self._patiently(lambda: self._stores[0].set_parent(names[0], None))

    async def _create(self, thread_id: str, message: str, parent: str | None) -> None:
        run = Run(run_id=f"run-of-{thread_id}", thread_id=thread_id, parent_thread_id=parent)
        await self._call(
            "create", thread_id, [message],
            lambda: self._stores[0].checkpoint(thread_id, [message], run, idempotency_key=message),
        )  # fmt: skip

    async def _call(
        self, kind: str, thread_id: str, names: list[str], call: Callable[[], Awaitable[Receipt | None]]
    ) -> Receipt | None:
        self._count += 1
        number = self._count
        self._recorder.write(Begin(time.monotonic(), self._process, number, thread_id, kind, tuple(names)))
        receipt = None
        try:
            receipt = await self._patiently(call)
        except BufstoreError as e:
            outcome = "rejected"
            print(f"{kind} of {thread_id}: {type(e).__name__}: {e}", file=sys.stderr)
        else:
            # The receipt of a repeated call names the thread's last entry, so this entry's position is not known.
            outcome = "unknown" if receipt is not None and receipt.repeated and kind == "append" else "ok"
        seq = receipt.thread_seq if receipt is not None else 0
        self._recorder.write(End(time.monotonic(), self._process, number, outcome, seq))
        return receipt

    async def _patiently(self, call: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await call()
            except _TRANSIENT:
                await asyncio.sleep(0.02)


async def _delete(store: BufferedThreadStore, thread_id: str) -> Receipt | None:
    try:
        return await store.delete_thread(thread_id, children=Children.CASCADE)
    except NotFound:
        return None  # an earlier try deleted it


async def _discard(store: BufferedThreadStore, seqs: list[int]) -> None:
    await store.quarantine.discard(seqs)


if __name__ == "__main__":
    asyncio.run(Life(json.loads(sys.argv[1])).live())
