"""Chaos on threads of messages; reads the final state."""

from __future__ import annotations

import random
import time

import psycopg

from bufstore import BufferConfig, BufferedThreadStore, Consistency, PostgresThreadStore, decode_message
from chaos import checkers
from chaos.domain import Domain
from chaos.history import Final, History, ParkedEntry, Read, Recorder
from chaos.site import SCHEMA

_COMPARED = 100


async def _open(postgres: str, nats: str, config: BufferConfig) -> BufferedThreadStore:
    inner = PostgresThreadStore(postgres, schema=SCHEMA, pool_size=4)
    return await BufferedThreadStore.open(inner, nats=nats, config=config)


async def _read_back(store: BufferedThreadStore, history: History, chance: random.Random, recorder: Recorder) -> None:
    for thread in chance.sample(sorted(history.threads), min(_COMPARED, len(history.threads))):
        for level in Consistency:
            began = time.monotonic()
            found = await store.load_messages(thread, consistency=level, quarantined="known")
            names = None if found is None else tuple(_name(m) for m in found)
            recorder.write(Read("s", thread, level.value, 0, began, time.monotonic(), names))


async def _final(postgres: str, quarantined: dict[int, ParkedEntry]) -> Final:
    messages: dict[str, list[str]] = {}
    async with await psycopg.AsyncConnection.connect(postgres) as connection:
        cursor = await connection.execute(f"SELECT thread_id, payload FROM {SCHEMA}.messages ORDER BY thread_id, seq")
        async for thread, payload in cursor:
            messages.setdefault(thread, []).append(_name(decode_message(payload)))
    return Final(messages, quarantined)


def _name(message: object) -> str:
    return message if isinstance(message, str) else message["id"]  # type: ignore[index]


DOMAIN = Domain("chaos.thread_worker", _open, _read_back, _final, checkers.CHECKERS)
