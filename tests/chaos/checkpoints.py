"""Chaos on LangGraph's checkpoints; LangGraph's own saver reads the final state."""

from __future__ import annotations

import random
import time

import psycopg
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver

from bufstore import BufferConfig, Consistency, ThreadQuarantined
from bufstore.buffer.entry import decode
from bufstore.langgraph import AsyncBufferedSaver, PostgresCheckpointStore
from bufstore.langgraph.model import Delete
from bufstore.langgraph.payload import decode_payload
from chaos import checkpoint_checkers
from chaos.domain import Domain
from chaos.graphs import key_of, position_of, saved_of
from chaos.history import FORKED, Final, History, ParkedEntry, Read, Recorder, Remains, Saved, Shown
from chaos.site import SCHEMA
from langgraph_savers import config

_COMPARED = 300


class _Saver:
    def __init__(self, saver: AsyncBufferedSaver) -> None:
        self.saver, self.lanes = saver, saver.engine.lanes

    async def aclose(self) -> None:
        await self.saver.aclose()


async def _open(postgres: str, nats: str, config: BufferConfig) -> _Saver:
    store = PostgresCheckpointStore(postgres, buffer_schema=SCHEMA, pool_size=4)
    return _Saver(await AsyncBufferedSaver.open(store, nats=nats, config=config))


async def _read_back(store: _Saver, history: History, chance: random.Random, recorder: Recorder) -> None:
    await _look_for_erased(store, history, recorder)
    level = Consistency.READ_YOUR_WRITES.value
    for thread in chance.sample(sorted(history.threads), min(_COMPARED, len(history.threads))):
        began = time.monotonic()
        try:
            found = await store.saver.aget_tuple(config(thread))
        except ThreadQuarantined:
            continue
        ended = time.monotonic()
        seen = (key_of(found)[1], saved_of(found)) if found is not None else (None, None)
        recorder.write(Shown("s", thread, level, began, ended, "", None, *seen))
        if not thread.startswith(FORKED):
            names = position_of(found).names if found is not None else None
            recorder.write(Read("s", thread, level, 0, began, ended, names))


async def _look_for_erased(store: _Saver, history: History, recorder: Recorder) -> None:
    erased = {
        thread: max(op.seq for op in h.ops if op.kind == "erase" and op.ok)
        for thread, h in history.threads.items()
        if any(op.kind == "erase" and op.ok for op in h.ops)
    }
    for buffer, threads in store.lanes.shared_out(erased):
        async for _, message in buffer.log.scan(threads=threads):
            thread = buffer.subjects.thread_id(message.subject)
            deletes = isinstance(decode_payload(decode(message).payload), Delete)
            if message.seq < erased[thread] and not deletes:
                recorder.write(Remains(thread, message.seq))


async def _final(postgres: str, quarantined: dict[int, ParkedEntry]) -> Final:
    async with await psycopg.AsyncConnection.connect(postgres) as connection:
        rows = "SELECT thread_id FROM checkpoints UNION SELECT thread_id FROM checkpoint_writes"
        cursor = await connection.execute(rows)
        threads = [thread for (thread,) in await cursor.fetchall()]
    names: dict[str, list[str]] = {}
    checkpoints: dict[tuple[str, str, str], Saved] = {}
    async with AsyncPostgresSaver.from_conn_string(postgres) as plain:
        for thread in threads:
            newest = ""
            async for found in plain.alist({"configurable": {"thread_id": thread}}):
                ns, id_ = key_of(found)
                checkpoints[thread, ns, id_] = saved_of(found)
                if not ns and id_ > newest:
                    newest, names[thread] = id_, list(position_of(found).names)
    return Final(names, quarantined, checkpoints)


DOMAIN = Domain("chaos.checkpoint_worker", _open, _read_back, _final, checkpoint_checkers.CHECKERS)
