"""A program that uses a part of bufstore where a driver cannot be imported; runs in a process of its own.

Arguments: the part (a function of this module), the modules to refuse (joined by commas), and the part's own arguments.
A refused module looks as if it were not installed; ``psycopg-without-libpq`` fails as psycopg does without its library.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import secrets
import sys
from typing import Any


class Refuse(importlib.abc.MetaPathFinder):
    """Refuses to find these modules."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        root = fullname.partition(".")[0]
        if root == "psycopg" and "psycopg-without-libpq" in self.names:
            raise ImportError("no pq wrapper available.\nAttempts made:\n- libpq library not found")
        if root in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


async def tokens(nats: str) -> None:
    from bufstore.tokens import ExclusiveWork, TokensConfig

    name = f"t{secrets.token_hex(5)}"
    async with await ExclusiveWork.open(nats, TokensConfig(name=name)) as work:
        await work.submit("key", b"payload")
        task = await work.take(10)
        assert task is not None
        assert (task.key, task.payload) == ("key", b"payload")
        await task.done()


async def mailbox(nats: str) -> None:
    from bufstore.mailbox import NatsMailboxNames, NatsMailboxStore, Status

    names = NatsMailboxNames(bucket=f"t{secrets.token_hex(5)}", max_bytes=64 << 20)
    async with NatsMailboxStore(nats, names=names) as store:
        await store.enqueue("thread", b"payload")
        claim = await store.claim("thread", "holder")
        assert claim is not None
        assert claim.payload == b"payload"
        assert (await store.ack(claim)).status is Status.ACKED


async def notify_nats(nats: str) -> None:
    from bufstore.notify import NatsNotifier

    async with await NatsNotifier.open(nats, prefix=f"t{secrets.token_hex(5)}", timeout_s=10) as notifier:
        await _heard(notifier)


async def notify_redis(redis: str) -> None:
    from bufstore.notify import RedisNotifier

    async with await RedisNotifier.open(redis, prefix=f"t{secrets.token_hex(5)}", timeout_s=10) as notifier:
        await _heard(notifier)


async def notify_memory() -> None:
    from bufstore.notify import MemoryNotifier

    async with MemoryNotifier() as notifier:
        await _heard(notifier)


async def _heard(notifier: Any) -> None:
    heard = asyncio.Event()
    await notifier.listen_scheduled(["kind"], lambda _: heard.set())
    await notifier.notify_scheduled("kind")
    await asyncio.wait_for(heard.wait(), 30)


async def postgres_store(postgres: str) -> None:
    from bufstore import PostgresThreadStore, Run

    async with PostgresThreadStore(postgres, schema=f"t{secrets.token_hex(5)}") as store:
        await store.setup()
        messages = [{"role": "user", "content": "Where is my bag?"}]
        await store.checkpoint("thread", messages, Run(run_id="run", thread_id="thread"))
        assert await store.load_messages("thread") == messages


async def postgres_mailbox(postgres: str) -> None:
    from bufstore.mailbox import PostgresMailboxStore

    async with PostgresMailboxStore(postgres, schema=f"t{secrets.token_hex(5)}") as store:
        await store.enqueue("thread", b"payload")
        assert await store.claim("thread", "holder") is not None


async def ask_for(*names: str) -> None:
    """Ask for names whose driver is missing, and print the errors."""
    for name in names:
        package, _, attribute = name.rpartition(".")
        try:
            getattr(importlib.import_module(package), attribute)
        except ImportError as e:
            print(e)


async def spark_session() -> None:
    from bufstore.spark import session

    try:
        session()
    except ImportError as e:
        print(e)


if __name__ == "__main__":
    part, refused, *arguments = sys.argv[1:]
    sys.meta_path.insert(0, Refuse(refused.split(",")))
    asyncio.run(globals()[part](*arguments))
