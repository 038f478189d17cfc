"""How many queries a read sends to Postgres, and that it shows entries which wait there."""

from __future__ import annotations

import dataclasses
from typing import Any

import psycopg
import pytest

from bufstore import Consistency, ThreadQuarantined
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver
from helpers import eventually, fresh, query
from langgraph_savers import META, Place, asked_of, checkpoint, config


async def _put(saver: AsyncBufferedSaver, thread_id: str, text: str, at: Any = None) -> Any:
    version = {"said": saver.get_next_version(None, None)}
    return await saver.aput(at or config(thread_id), checkpoint(version, {"said": [text]}), META, version)


def _said(found: Any) -> str:
    (text,) = found.checkpoint["channel_values"]["said"]
    return str(text)


@pytest.mark.parametrize("level", [Consistency.READ_YOUR_WRITES, Consistency.EVENTUAL])
async def test_a_read_asks_postgres_once(servers: Servers, level: Consistency, monkeypatch: pytest.MonkeyPatch) -> None:
    """For checkpoints that this process does not remember."""
    place, thread_id = Place(servers), fresh()
    async with place.saver() as saver:
        at = await _put(saver, thread_id, "flushed")
        await saver.force_flush()
    async with place.saver(consistency=level) as saver:
        asked = asked_of(saver, monkeypatch)
        for named, question in ((config(thread_id), "latest"), (at, "one"), (config(thread_id), "latest")):
            found = await saver.aget_tuple(named)
            assert found is not None
            assert _said(found) == "flushed"
            assert asked == [question]
            asked.clear()
            saver.engine.of("t")._recent.forget(None)
        assert await saver.aget_tuple(config(fresh())) is None
        assert asked == ["latest"]


async def test_a_thread_that_a_read_has_found_nowhere_is_not_looked_up_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that another process began meanwhile is not overwritten either."""
    place = Place(servers)
    async with place.saver() as saver, place.saver() as other:
        await _put(saver, fresh(), "so that the end of the log is known")
        asked = asked_of(saver, monkeypatch)
        alone, shared = fresh(), fresh()
        for thread_id in (alone, shared):
            assert await saver.aget_tuple(config(thread_id)) is None
        await _put(other, shared, "theirs")
        for thread_id in (alone, shared):
            await _put(saver, thread_id, "ours")
        assert asked == ["latest", "latest", "state"], "of the one that was there by then"
        assert [_said(found) async for found in saver.alist(config(shared))] == ["ours", "theirs"]
        assert [_said(found) async for found in saver.alist(config(alone))] == ["ours"]
        assert await saver.engine.buffer.ledger.quarantined() == 0


@pytest.mark.long  # as long as the log keeps it
async def test_what_waits_in_postgres_is_read(servers: Servers) -> None:
    """A locked row delays its thread; its entries wait in a table of the buffer, and the log purges them."""
    place, thread_id, beside = Place(servers), fresh(), fresh()
    # The shortest window in which a write may take four seconds, because a server may stand still for some.
    place.log = dataclasses.replace(place.log, partitions=1, failover_window_s=8.0)
    buffer = f"{place.schema}_b"
    async with place.saver(retain_after_flush_s=8.0) as saver:
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
                return not await log.last([subjects.of(thread_id)])

            await eventually(waits, 30)
            await eventually(forgotten, 90)
            async with place.saver(flusher=False, retain_after_flush_s=8.0) as other:
                for reader in (saver, other):
                    for named in (config(thread_id), at):
                        assert _said(await reader.aget_tuple(named)) == "second"
            await lock.rollback()
        await saver.force_flush(thread_id)
        assert _said(await saver.aget_tuple(config(thread_id))) == "second"


async def test_a_process_goes_on_with_what_it_knows_until_another_writes(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, thread_id = Place(servers), fresh()
    async with place.saver() as one, place.saver() as other:
        assert await one.aget_tuple(config(fresh())) is None
        asked = asked_of(one, monkeypatch)
        assert await one.aget_tuple(config(thread_id)) is None
        first = at = await _put(one, thread_id, "0")
        for n in range(1, 5):
            at = await _put(one, thread_id, f"{n}", at)
            await one.aput_writes(at, [("said", n)], "task")
            for named in (config(thread_id), at):
                found = await one.aget_tuple(named)
                assert found is not None
                assert (_said(found), found.pending_writes) == (f"{n}", [("task", "said", n)])
                assert found.config == at
        assert await one.aget_tuple(config(thread_id, ns="inner:1")) is None
        assert asked == ["latest", "state"], "the first read and the first write"
        asked.clear()
        assert _said(await one.aget_tuple(first)) == "0"
        assert asked == ["one"]
        at = await _put(other, thread_id, "other", at)
        assert _said(await one.aget_tuple(config(thread_id))) == "other"
        assert asked == ["one", "latest"]
        await other.adelete_thread(thread_id)
        assert await one.aget_tuple(config(thread_id)) is None


async def test_what_another_flusher_parks_is_soon_known(servers: Servers) -> None:
    """Nobody writes to the thread any more, so its last entry in the log remains this process's."""
    place, thread_id = Place(servers), fresh()
    async with place.saver(flusher=False) as writer, place.saver(flush_interval_s=3600.0) as flusher:
        assert await writer.aget_tuple(config(thread_id)) is None
        await _put(writer, thread_id, "poison")
        await query(
            place.dsn, f"ALTER TABLE {place.schema}.checkpoint_blobs ADD CONSTRAINT no CHECK (channel <> 'said')"
        )
        assert _said(await writer.aget_tuple(config(thread_id))) == "poison"
        await flusher.force_flush(thread_id)

        async def known() -> bool:
            try:
                await writer.aget_tuple(config(thread_id))
            except ThreadQuarantined:
                return True
            return False

        await eventually(known, 15)
