"""Opens stores on an event loop, forks, and lets the child use them; run by `test_forks`.

Arguments: the addresses of NATS and Postgres, and a name for streams and schemas. Prints a JSON object: the outcome of
the child's calls, the child's sockets, the parent's writes meanwhile, and the connections that the parent lost.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from bufstore import BufferConfig, BufferedThreadStore, Consistency, LogConfig, PostgresThreadStore
from bufstore.langgraph import AsyncBufferedSaver, PostgresCheckpointStore
from bufstore.mailbox import MailboxStore, NatsMailboxNames, NatsMailboxStore, PostgresMailboxStore
from bufstore.notify import NatsNotifier, PostgresNotifier
from bufstore.postgres.connection.pool import Pool
from bufstore.tokens import Locks
from helpers import run_of
from langgraph_savers import config as saver_config

_CALL_S = 10.0
_IDLE_S = 1.0


def _config(log: str) -> BufferConfig:
    config = LogConfig(stream=log, bucket=log, subject=log, max_bytes=64 << 20)
    return BufferConfig.fitting(config, flush_interval_s=0.05)


async def _store(nats: str, dsn: str, name: str) -> BufferedThreadStore:
    inner = PostgresThreadStore(dsn, schema=name, pool_size=4)
    return await BufferedThreadStore.open(inner, nats=nats, config=_config(f"threads-{name}"))


class _Opened:
    """One instance of each kind."""

    store: BufferedThreadStore
    threads: PostgresThreadStore
    saver: AsyncBufferedSaver
    mailboxes: list[MailboxStore]
    notifiers: list[NatsNotifier | PostgresNotifier]
    locks: Locks

    async def open(self, nats: str, dsn: str, name: str) -> None:
        self.store = await _store(nats, dsn, name)
        self.threads = PostgresThreadStore(dsn, schema=f"{name}_alone", pool_size=2)
        await self.threads.open()
        await self.threads.setup()
        kept = PostgresCheckpointStore(dsn, schema=f"{name}_lg", buffer_schema=f"{name}_lgb", pool_size=2)
        self.saver = await AsyncBufferedSaver.open(kept, nats=nats, config=_config(f"saver-{name}"))
        names = NatsMailboxNames(bucket=f"mailbox-{name}", max_bytes=32 << 20)
        self.mailboxes = [NatsMailboxStore(nats, names=names), PostgresMailboxStore(dsn, schema=name, pool_size=2)]
        for mailbox in self.mailboxes:
            await mailbox.__aenter__()
        self.notifiers = [await NatsNotifier.open(nats, prefix=name), await PostgresNotifier.open(dsn, prefix=name)]
        self.locks = await Locks.open(nats, name=f"locks-{name}")
        await self.store.checkpoint("before", [1], run_of("before"))
        await self.store.force_flush_all()
        # The fork must not happen while a pool is opening a connection: such a connection has no owner yet.
        await asyncio.gather(*(pool.wait() for pool in gc.get_objects() if isinstance(pool, Pool)))

    def all(self) -> list[Any]:
        return [self.store, self.threads, self.saver, *self.mailboxes, *self.notifiers, self.locks]

    def calls(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        store, eventual = self.store, Consistency.EVENTUAL
        return {
            "checkpoint": lambda: store.checkpoint("child", [1], run_of("child")),
            "append": lambda: store.append_messages("before", [2]),
            "load": lambda: store.load_messages("before"),
            "load from Postgres": lambda: store.load_run("run-0-of-before", consistency=eventual),
            "flush": store.force_flush_all,
            "verify": store.verify,
            "threads": lambda: self.threads.checkpoint("child", [1], run_of("child")),
            "open": self.threads.open,
            "saver": lambda: self.saver.aget_tuple(saver_config("t")),
            "blocking saver": lambda: asyncio.to_thread(self.saver.get_tuple, saver_config("t")),
            "locks": lambda: self.locks.acquire("key"),
        } | {
            f"{type(each).__name__}": call
            for each, call in (
                *((mailbox, lambda m=mailbox: m.enqueue("t", b"")) for mailbox in self.mailboxes),
                *((notifier, lambda n=notifier: n.listen_scheduled("k", print)) for notifier in self.notifiers),
            )
        }


class _Losses(logging.Handler):
    """Collects warnings about lost connections."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _peers() -> dict[int, Any]:
    """Return the peer address of each TCP socket of this process."""
    found = {}
    for number in (int(entry.name) for entry in Path("/dev/fd").iterdir()):
        try:
            with socket.socket(fileno=os.dup(number)) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6):
                    found[number] = each.getpeername()
        except OSError:
            continue
    return found


def _child(loop: asyncio.AbstractEventLoop, opened: _Opened, arguments: Sequence[str]) -> dict[str, Any]:
    async def said(call: Callable[[], Awaitable[Any]]) -> str:
        try:
            async with asyncio.timeout(_CALL_S):
                await call()
        except BaseException as e:
            return f"{type(e).__name__}: {e}"
        return "done"

    async def own() -> Any:
        async with await _store(*arguments) as store:
            await store.checkpoint("own", [1], run_of("own"))
            return await store.load_messages("own")

    found: dict[str, Any] = {"shared": list(_peers().values())}
    found["calls"] = {name: loop.run_until_complete(said(call)) for name, call in opened.calls().items()}
    loop.run_until_complete(asyncio.sleep(_IDLE_S))  # gives the copies of the parent's tasks time to run
    found["later"] = {name: loop.run_until_complete(said(call)) for name, call in opened.calls().items()}
    found["closed"] = [loop.run_until_complete(said(each.aclose)) for each in opened.all()]
    vars(opened).clear()
    gc.collect()
    found["own"] = asyncio.run(own())
    return found


def main(*arguments: str) -> None:
    loop, opened, losses = asyncio.new_event_loop(), _Opened(), _Losses()
    loop.run_until_complete(opened.open(*arguments))
    logging.getLogger().addHandler(losses)
    connected = _peers()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(writer, "w") as told:
                json.dump(_child(loop, opened, arguments), told)
        finally:
            os._exit(0)
    os.close(writer)
    acknowledged: list[str] = []

    async def write() -> bytes:
        with os.fdopen(reader, "rb") as told:
            heard = asyncio.ensure_future(asyncio.to_thread(told.read))
            while not heard.done():
                thread = f"parent-{len(acknowledged)}"
                await opened.store.checkpoint(thread, [thread], run_of(thread))
                acknowledged.append(thread)
                assert await opened.store.load_messages(thread) == [thread]
                await opened.mailboxes[1].enqueue(thread, b"")
            return await heard

    told = json.loads(loop.run_until_complete(write()))
    told["kept"] = connected.items() <= _peers().items()
    loop.run_until_complete(opened.store.force_flush_all())
    for each in opened.all():
        loop.run_until_complete(each.aclose())
    told |= {"acknowledged": acknowledged, "losses": losses.said, "exit": os.waitpid(child, 0)[1]}
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
