"""Runs go on through an outage of Postgres, and so do their reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langgraph.types import Command
from psycopg.conninfo import make_conninfo

from bufstore import ReadNotFresh, StoreMisconfigured, StoreUnavailable
from bufstore.embedded import Servers
from helpers import fresh, healthy, query
from langgraph_graphs import assistant
from langgraph_savers import META, Place, checkpoint, config


@pytest.fixture(scope="module")
def own() -> Iterator[Servers]:
    """Servers that these tests stop."""
    with Servers() as running:
        yield running


@pytest.fixture
def place(own: Servers) -> Iterator[Place]:
    own.postgres.start()
    yield Place(own)
    own.postgres.start()


async def test_postgres_goes_in_the_middle_of_a_run(own: Servers, place: Place) -> None:
    """The log shows a part of an old thread. In the outage the subgraph reads a namespace never read before."""
    thread_id = fresh()
    async with place.plain() as plain:
        await query(place.dsn, f"CREATE SCHEMA {place.schema}")
        await plain.setup()
        await assistant(plain).ainvoke({"said": ["user: first"]}, config(thread_id))
        before = await assistant(plain).ainvoke(Command(resume="yes"), config(thread_id))

    async def stop() -> None:
        own.postgres.stop()

    async with place.saver() as saver:
        graph = assistant(saver, on_tool=stop)
        after = await graph.ainvoke({"said": ["user: second"]}, config(thread_id))
        assert "__interrupt__" in after
        assert after["said"][: len(before["said"])] == before["said"]
        # The next turn of the conversation, still without Postgres.
        done = await assistant(saver).ainvoke(Command(resume="no"), config(thread_id))
        assert done["approved"] == "no"
        shown = (await saver.aget_tuple(config(thread_id))).checkpoint  # type: ignore[union-attr]
        own.postgres.start()
        await saver.force_flush()
        assert (await saver.aget_tuple(config(thread_id))).checkpoint == shown  # type: ignore[union-attr]
    async with place.plain() as plain:
        assert (await plain.aget_tuple(config(thread_id))).checkpoint == shown  # type: ignore[union-attr]


async def test_a_probe_asks_a_saver_what_works(own: Servers, place: Place) -> None:
    """Regression: only a buffered store could be asked, though the document has every app ask it."""
    async with place.saver() as saver:
        await healthy(saver)
        at = await saver.aput(config(fresh()), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        own.postgres.stop()
        await saver.aput_writes(at, [("a", 2)], "task")
        health = await saver.health()
        assert (health.can_write, health.can_read, health.flushing) == (True, False, False)
        assert (await saver.statistics()).appended == 2
        own.postgres.start()
        await healthy(saver)


async def test_another_process_reads_a_thread_that_the_log_has_whole(own: Servers, place: Place) -> None:
    thread_id = fresh()
    async with place.saver(read_timeout_s=8.0) as one, place.saver(read_timeout_s=8.0) as other:
        await assistant(one).ainvoke({"said": ["user: hello"]}, config(thread_id))
        own.postgres.stop()
        done = await assistant(other).ainvoke(Command(resume="yes"), config(thread_id))
        assert done["approved"] == "yes"
        assert (await assistant(one).aget_state(config(thread_id))).values["approved"] == "yes"
        own.postgres.start()
        await one.force_flush()


@pytest.mark.long
async def test_only_postgres_can_tell_of_a_thread_that_nobody_here_has_read(own: Servers, place: Place) -> None:
    thread_id = fresh()
    put = checkpoint({"a": "1"}, {"a": [1]})
    metadata: Any = {"source": "loop", "step": 0, "parents": {}}
    async with (
        place.saver(read_timeout_s=8.0) as careful,
        place.saver(read_timeout_s=8.0, new_threads="assume") as bold,
    ):
        own.postgres.stop()
        with pytest.raises((StoreUnavailable, ReadNotFresh)):
            await careful.aget_tuple(config(thread_id))
        with pytest.raises(StoreUnavailable):
            await careful.aput(config(thread_id), put, metadata, {"a": "1"})
        assert await bold.aget_tuple(config(thread_id)) is None
        await bold.aput(config(thread_id), put, metadata, {"a": "1"})
        for saver in (bold, careful):
            assert (await saver.aget_tuple(config(thread_id))).checkpoint == put  # type: ignore[union-attr]
        own.postgres.start()
        await bold.force_flush()
        assert (await careful.aget_tuple(config(thread_id))).checkpoint == put  # type: ignore[union-attr]


@pytest.mark.long
async def test_a_thread_that_was_wrongly_assumed_to_be_new_forks_and_loses_nothing(own: Servers, place: Place) -> None:
    """Neither the log nor this process knows that the thread is older."""
    thread_id = fresh()
    put = checkpoint({"a": "1"}, {"a": [1]})
    metadata: Any = {"source": "loop", "step": 0, "parents": {}}
    async with place.plain() as plain:
        await query(place.dsn, f"CREATE SCHEMA {place.schema}")
        await plain.setup()
        await assistant(plain).ainvoke({"said": ["user: first"]}, config(thread_id))
        before = [item async for item in plain.alist(config(thread_id))]
    async with place.saver(read_timeout_s=8.0, new_threads="assume") as bold:
        own.postgres.stop()
        assert await bold.aget_tuple(config(thread_id)) is None
        fork = await bold.aput(config(thread_id), put, metadata, {"a": "1"})
        own.postgres.start()
        await bold.force_flush()
        found = [item async for item in bold.alist(config(thread_id))]
        assert [item for item in found if item.config != fork] == before
        (added,) = [item for item in found if item.config == fork]
        assert (added.checkpoint, added.parent_config) == (put, None)


@pytest.mark.long  # as long as the log shows the thread
async def test_another_process_serves_a_thread_that_is_older_than_the_log(own: Servers, place: Place) -> None:
    """The other process never read the thread, but the run that began here has put all its values into the log."""
    thread_id = fresh()
    async with place.plain() as plain:
        await query(place.dsn, f"CREATE SCHEMA {place.schema}")
        await plain.setup()
        await assistant(plain).ainvoke({"said": ["user: first"]}, config(thread_id))
        await assistant(plain).ainvoke(Command(resume="yes"), config(thread_id))
    async with place.saver() as one, place.saver() as other:
        before = await assistant(one).ainvoke({"said": ["user: second"]}, config(thread_id))
        await one.force_flush()
        own.postgres.stop()
        done = await assistant(other).ainvoke(Command(resume="no"), config(thread_id))
        assert done["approved"] == "no"
        assert done["said"][: len(before["said"])] == before["said"]
        after = await assistant(other).ainvoke({"said": ["user: third"]}, config(thread_id))
        assert after["turns"] == 3
        # An older checkpoint, and a namespace that the log does not show, still need Postgres.
        with pytest.raises((StoreUnavailable, ReadNotFresh)):
            await other.aget_tuple(config(thread_id, ns="research:none"))
        own.postgres.start()
        await other.force_flush()
        assert (await assistant(one).aget_state(config(thread_id))).values["said"] == after["said"]


async def test_runs_go_on_while_postgres_lets_nobody_in(own: Servers, place: Place) -> None:
    """Regression: a login that was refused ended every run, though an outage ends none."""
    thread_id, role, dsn = fresh(), place.schema, place.dsn
    await query(dsn, f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD 'x'")
    place.dsn = make_conninfo(dsn, user=role, password="x")
    async with place.saver() as one, place.saver() as other, place.saver(new_threads="assume") as bold:
        await assistant(one).ainvoke({"said": ["user: first"]}, config(thread_id))
        await one.force_flush()
        await query(dsn, f"ALTER ROLE {role} NOLOGIN")
        await query(dsn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", role)
        await assistant(other).ainvoke(Command(resume="yes"), config(thread_id))
        done = await assistant(one).ainvoke({"said": ["user: second"]}, config(thread_id))
        assert done["turns"] == 2
        with pytest.raises((StoreMisconfigured, StoreUnavailable), match="is not permitted to log in"):
            await assistant(one).ainvoke({"said": ["user: first"]}, config(fresh()))
        await assistant(bold).ainvoke({"said": ["user: first"]}, config(fresh()))
        await query(dsn, f"ALTER ROLE {role} LOGIN")
        await healthy(one)
        await one.force_flush()
        assert (await assistant(other).aget_state(config(thread_id))).values["said"] == done["said"]


async def test_what_a_deletion_leaves_is_read_from_the_log(own: Servers, place: Place) -> None:
    """The saver remembers only the checkpoint that it read before, which is then deleted."""
    thread_id, metadata = fresh(), {"source": "loop", "step": 0, "parents": {}}
    async with place.saver(flush=0, read_timeout_s=8.0) as saver:
        at = config(thread_id)
        for n in ("1", "2"):
            at = await saver.aput(at, checkpoint({"a": n}, {"a": [n]}), metadata | {"run_id": n}, {"a": n})  # type: ignore[arg-type]
        await saver.force_flush()
        assert await saver.aget_tuple(config(thread_id)) is not None
        await saver.adelete_for_runs(["2"])
        own.postgres.stop()
        found = await saver.aget_tuple(config(thread_id))
        assert found is not None
        assert found.checkpoint["channel_values"] == {"a": ["1"]}
        own.postgres.start()
