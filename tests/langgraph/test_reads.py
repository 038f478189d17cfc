"""What a read asks Postgres for, and that it shows what waits there."""

from __future__ import annotations

import dataclasses
from typing import Any

import psycopg
import pytest

from bufstore import Consistency
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver
from helpers import eventually, fresh, query
from langgraph_savers import Place, checkpoint, config

META: Any = {"source": "loop", "step": 1, "parents": {}}


async def _put(saver: AsyncBufferedSaver, thread_id: str, text: str, at: Any = None) -> Any:
    version = {"said": saver.get_next_version(None, None)}
    return await saver.aput(at or config(thread_id), checkpoint(version, {"said": [text]}), META, version)


def _said(found: Any) -> str:
    (text,) = found.checkpoint["channel_values"]["said"]
    return str(text)


@pytest.mark.parametrize("level", [Consistency.READ_YOUR_WRITES, Consistency.EVENTUAL])
async def test_a_read_asks_postgres_once(servers: Servers, level: Consistency, monkeypatch: pytest.MonkeyPatch) -> None:
    place, thread_id = Place(servers), fresh()
    async with place.saver() as saver:
        at = await _put(saver, thread_id, "flushed")
        await saver.force_flush()
    async with place.saver(consistency=level) as saver:
        asked: list[str] = []
        store: Any = saver.engine._store
        fetch = store._fetch

        async def fetched(name: str, *rest: Any) -> Any:
            asked.append(name)
            return await fetch(name, *rest)

        monkeypatch.setattr(store, "_fetch", fetched)
        for named, question in ((config(thread_id), "latest"), (at, "one"), (config(thread_id), "latest")):
            found = await saver.aget_tuple(named)
            assert found is not None
            assert _said(found) == "flushed"
            assert asked == [question]
            asked.clear()
        assert await saver.aget_tuple(config(fresh())) is None
        assert asked == ["latest"]


async def test_what_waits_in_postgres_is_read(servers: Servers) -> None:
    """A locked row delays its thread; its entries wait in a table of the buffer, and the log forgets them."""
    place, thread_id, beside = Place(servers), fresh(), fresh()
    place.log = dataclasses.replace(place.log, partitions=1, failover_window_s=2.0)
    buffer = f"{place.schema}_b"
    async with place.saver(retain_after_flush_s=2.0) as saver:
        at = await _put(saver, thread_id, "first")
        await saver.force_flush(thread_id)
        async with await psycopg.AsyncConnection.connect(place.dsn) as lock:
            await lock.execute(f"SELECT FROM {buffer}.buffer_threads WHERE thread_id = %s FOR UPDATE", [thread_id])
            at = await _put(saver, thread_id, "second", at)

            async def waits() -> bool:
                return (await query(place.dsn, f"SELECT count(*) FROM {buffer}.buffer_waiting"))[0][0] == 1

            async def forgotten() -> bool:
                await _put(saver, beside, "beside")
                log, subjects = saver.engine.buffer.log, saver.engine.buffer.subjects
                return not await log.last([subjects.of(thread_id)], 5.0)

            await eventually(waits, 30)
            await eventually(forgotten, 30)
            async with place.saver(flusher=False, retain_after_flush_s=2.0) as other:
                for reader in (saver, other):
                    for named in (config(thread_id), at):
                        assert _said(await reader.aget_tuple(named)) == "second"
            await lock.rollback()
        await saver.force_flush(thread_id)
        assert _said(await saver.aget_tuple(config(thread_id))) == "second"
