"""Rows in the sink's quarantine: each is kept, and replayed once; without Spark."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from bufstore import ProducerSequence
from bufstore.errors import ConfigError, LogUnavailable, StoreUnavailable
from bufstore.postgres.connection import arrays
from bufstore.postgres.connection.migrate import queries
from bufstore.spark import SinkConfig
from bufstore.spark.sink.app_id import AppId
from bufstore.spark.sink.parked_rows import PRODUCER, ParkedRows
from bufstore.spark.sink.parts import Part
from bufstore.spark.sink.row_writer import Pass, RowCounts, write_rows
from bufstore.spark.sink.spark_ledger import FOLDER, Query, SparkLedger, row_key
from bufstore.threads.postgres.tables import grants
from conftest import Deployment
from helpers import eventually, fresh, query, run_of
from integration.test_operator_cli import cli
from spark.jobs import held, prepared, rows_of, settings_of


async def parked(deployment: Deployment, rows: list[dict[str, Any]], *, times: int = 1) -> SinkConfig:
    """Write the rows through a sink that quarantines bad rows."""
    await prepared(deployment)
    config = SinkConfig(app_id="app", bad_rows="quarantine", **settings_of(deployment))
    await asyncio.to_thread(AppId(config).setup)
    for _ in range(times):
        await asyncio.to_thread(write_rows, config, 0, [rows])
    return config


async def test_rows_that_differ_only_in_what_text_cannot_hold_are_kept_each(deployment: Deployment) -> None:
    ids = [None, "", "a\0", "a\N{REPLACEMENT CHARACTER}"]
    rows = [{"thread_id": i, "run_id": "r", "delta": ["1"] if i != ids[3] else ["{"], "position": 0} for i in ids]
    await parked(deployment, rows, times=2)
    found = await query(deployment.servers.postgres.dsn, f'SELECT row FROM "{deployment.name}".spark_quarantine')
    assert sorted(json.loads(row)["thread_id"] or "" for (row,) in found) == sorted(i or "" for i in ids)


async def test_a_row_whose_thread_id_is_longer_than_an_index_takes_is_set_aside_whole(deployment: Deployment) -> None:
    """Regression: Postgres refused it in each attempt of the batch, and the query did not go on."""
    start, good = secrets.token_urlsafe(3000), fresh("z")
    ids = sorted(start + end for end in "12")
    bad = [{"thread_id": i, "run_id": "r", "delta": ['{"n": 7}'], "position": 0} for i in ids]
    await parked(deployment, [*bad, *rows_of([good], range(1))])
    assert await held(deployment, [good]) == {good: [0]}
    async with deployment.store() as store, ParkedRows(deployment.servers.postgres.dsn, deployment.name) as inside:
        rows = await inside.page()
        assert [json.loads(row.row)["thread_id"] for row in rows] == ids
        assert len({row.thread_id for row in rows}) == 2, "each has a name of its own"
        for row in rows:
            assert await inside.page(thread_id=row.thread_id) == [row]
            (replay,) = await inside.replay(store, row.thread_id, None)
            assert "the limit is" in (replay.refused or "")
        await inside.correct(rows[0].id, json.dumps(bad[0] | {"thread_id": good}))
        assert [r.refused for r in await inside.replay(store, good, None)] == [None]
    assert await held(deployment, [good]) == {good: [0, 7]}


@pytest.mark.parametrize("depth", [101, 900, 5000])
async def test_a_row_that_is_nested_too_deeply_is_set_aside(deployment: Deployment, depth: int) -> None:
    deep, bad, good = "[" * depth + "]" * depth, [fresh("a") for _ in range(3)], fresh("b")
    says = (
        {"delta": [deep]},
        {"delta": ["1"], "run": f'{{"input": {deep}}}'},
        {"edit": f'{{"metadata": {{"custom": {{"deep": {deep}}}}}}}'},
    )
    rows = [
        *({"thread_id": t, "run_id": f"run-{t}", "position": 0} | what for t, what in zip(bad, says, strict=True)),
        *rows_of([good], range(2)),
    ]
    await parked(deployment, sorted(rows, key=lambda row: row["thread_id"]))
    found = await query(deployment.servers.postgres.dsn, f'SELECT thread_id FROM "{deployment.name}".spark_quarantine')
    assert sorted(t for (t,) in found) == sorted(bad)
    assert await held(deployment, [good]) == {good: [0, 1]}


async def test_rows_come_back_once(deployment: Deployment) -> None:
    thread, orphan, parent = fresh(), fresh(), fresh("parent")
    rows = rows_of([thread], range(3))
    rows[1]["delta"] = ["{"]
    rows += [row | {"parent_thread_id": parent} for row in rows_of([orphan], range(2))]
    await parked(deployment, rows)
    listed = await cli(deployment, "spark", "quarantine", "list", "--json")
    assert (listed.code, listed.json["total"]) == (0, 3), listed
    ids = {(r["thread_id"], json.loads(r["row"])["position"]): r["id"] for r in listed.json["rows"]}
    only = await cli(deployment, "spark", "quarantine", "list", "--thread", thread, "--app", "app", "--json")
    assert [r["id"] for r in only.json["rows"]] == [ids[thread, 1]]
    assert "does not exist" in (await cli(deployment, "spark", "quarantine", "list")).out

    still = await cli(deployment, "spark", "quarantine", "replay", "--all", "--json")
    assert (still.code, still.json["written"], len(still.json["left"])) == (1, 0, 3)
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(parent, [], run_of(parent))
    # A replay died between its write and the row's removal. The orphan's second row is replayed first.
    async with ParkedRows(deployment.servers.postgres.dsn, deployment.name) as inside, deployment.store() as store:
        with pytest.raises(LogUnavailable):
            await inside.replay(Unanswered(store), orphan, [ids[orphan, 1]])  # type: ignore[arg-type]
    again = await cli(deployment, "spark", "quarantine", "replay", "--thread", orphan, "--json")
    assert (again.code, again.json) == (0, {"written": 2, "left": []})
    right = json.dumps(rows_of([thread], range(1, 2))[0])
    wrong = await cli(deployment, "spark", "quarantine", "replay", ids[thread, 1], "--row", '{"thread_id": 1}')
    assert wrong.code == 2, wrong
    mended = await cli(deployment, "spark", "quarantine", "replay", ids[thread, 1], "--row", right, "--json")
    assert (mended.code, mended.json["written"]) == (0, 1)
    assert await held(deployment, [thread, orphan]) == {thread: [0, 2, 1], orphan: [1, 0]}
    gone = await cli(deployment, "spark", "quarantine", "replay", ids[thread, 1])
    assert gone.code == 2


async def test_a_schema_may_have_any_name(deployment: Deployment) -> None:
    deployment.name = f"{deployment.name}'s %I \"\\schema"
    await parked(deployment, [])
    thread_id = fresh()
    await set_aside(deployment, thread_id, 0, {"id": "a"})
    async with (
        deployment.store() as store,
        ParkedRows(deployment.servers.postgres.dsn, deployment.name) as rows,
    ):
        assert [row.refused for row in await rows.replay(store, thread_id, None)] == [None]
        assert await store.load_messages(thread_id) == [{"id": "a"}]


async def test_edits_and_whole_threads_come_back_once(deployment: Deployment) -> None:
    """The rows are of each kind, and none could be applied when it came."""
    await prepared(deployment)
    family, edited, whole, parent = fresh("family"), fresh("edited"), fresh("whole"), fresh("parent")
    child = f"{family}-child"

    def row(thread: str, **what: Any) -> dict[str, Any]:
        edit = {name: json.dumps(value) for name, value in what.items() if name == "edit"}
        return {"thread_id": thread, "run_id": f"run-{thread}", "position": 0} | what | edit

    rows = [
        row(family, edit={"delete_thread": "reject"}),
        row(edited, edit={"delete_messages": ["b"]}),
        row(whole, messages=['{"n": 1}'], parent_thread_id=parent),
    ]
    async with deployment.store() as store:
        await store.checkpoint(family, [], run_of(family))
        await store.checkpoint(child, [], run_of(child, parent_thread_id=family))
        await store.checkpoint(edited, [{"id": "a"}], run_of(edited))
        await parked(deployment, sorted(rows, key=lambda r: r["thread_id"]))
        async with ParkedRows(deployment.servers.postgres.dsn, deployment.name) as inside:
            assert await inside.count() == 3
            refused = [(await inside.replay(store, t, None))[0].refused for t in (family, edited, whole)]
            assert all(refused), refused
            await store.delete_thread(child)
            await store.checkpoint(edited, [{"id": "a"}, {"id": "b"}], run_of(edited, 1))
            await store.checkpoint(parent, [], run_of(parent))
            for found in ([None], []):
                for thread in (family, edited, whole):
                    assert [r.refused for r in await inside.replay(store, thread, None)] == found
        assert await store.load_thread(family) is None
        assert await store.load_messages(edited) == [{"id": "a"}]
        assert await store.load_messages(whole) == [{"n": 1}]


@pytest.mark.parametrize(
    ("what", "left", "interrupted"),
    [
        ({"delta": ["1"]}, [{"id": "a"}, 1], False),
        ({"delta": ["1"]}, [{"id": "a"}, 1], True),
        ({"edit": '{"delete_messages": ["a"]}'}, [], False),
        ({"edit": '{"delete_thread": "reject"}'}, None, False),
    ],
    ids=["a checkpoint", "a checkpoint whose first replay failed", "an edit", "a deletion"],
)
async def test_a_row_is_written_though_the_clock_went_back(
    deployment: Deployment, what: dict[str, Any], left: list[Any] | None, interrupted: bool
) -> None:
    """Regression: it was refused, or, once its first replay had failed, dropped as written."""
    await prepared(deployment)
    thread, number = fresh(), time.time_ns() // 1000 + 3_600_000_000
    bad = {"thread_id": thread, "run_id": f"run-{thread}", "delta": ["{"], "position": 0}
    await parked(deployment, [bad])
    async with deployment.store() as store, ParkedRows(deployment.servers.postgres.dsn, deployment.name) as inside:
        await store.checkpoint(thread, [{"id": "a"}], run_of(thread), producer=ProducerSequence(PRODUCER, number))
        (row,) = await inside.page(thread_id=thread)
        good = {"thread_id": thread, "run_id": f"run-{thread}", "position": 0} | what
        await inside.correct(row.id, json.dumps(good))
        if interrupted:
            with pytest.raises(LogUnavailable):
                await inside.replay(Interrupted(store, 1), thread, None)  # type: ignore[arg-type]
        assert [replay.refused for replay in await inside.replay(store, thread, None)] == [None]
        assert await inside.count() == 0
        assert await store.load_messages(thread) == left


async def test_rows_that_come_back_after_a_failover_are_not_written_twice(deployment: Deployment) -> None:
    """Regression: Postgres lost that they were written. The first one counted as never written, and was again.

    It may have been refused, too: then it must not be dropped. So it stays, and people decide.
    """
    thread, dsn = fresh(), deployment.servers.postgres.dsn
    table, kept = f'"{deployment.name}".spark_quarantine', f'"{deployment.name}".standby'
    await parked(deployment, [])
    for rank, id_ in enumerate("ab"):
        await set_aside(deployment, thread, rank, {"id": id_})
    async with deployment.store() as store, ParkedRows(dsn, deployment.name) as inside:
        with pytest.raises(LogUnavailable):
            await inside.replay(Interrupted(store, 1), thread, None)  # type: ignore[arg-type]
        await query(dsn, f"CREATE TABLE {kept} AS TABLE {table}")
        assert [replay.refused for replay in await inside.replay(store, thread, None)] == [None, None]
        await query(dsn, f"INSERT INTO {table} OVERRIDING SYSTEM VALUE TABLE {kept}")
        first, second = [replay.refused for replay in await inside.replay(store, thread, None)]
        assert "may have been" in (first or "")
        assert second is None
        assert await store.load_messages(thread) == [{"id": "a"}, {"id": "b"}]
        assert await inside.count() == 1


async def test_a_row_that_is_corrected_to_another_thread_meanwhile_is_not_numbered_with_its_old_one(
    deployment: Deployment,
) -> None:
    """Regression: it got a number below one that its new thread had already, and was dropped as written."""
    old, new = fresh("old"), fresh("new")
    await parked(deployment, [])
    await set_aside(deployment, old, 0, {"id": "corrected"})
    await set_aside(deployment, new, 0, {"id": "first"})
    corrected = json.dumps({"thread_id": new, "run_id": f"run-{new}", "delta": ['{"id": "corrected"}']})
    dsn, table = deployment.servers.postgres.dsn, f'"{deployment.name}".spark_quarantine'
    async with deployment.store() as store, ParkedRows(dsn, deployment.name) as inside:
        (row,) = await inside.page(thread_id=old)
        async with await psycopg.AsyncConnection.connect(dsn) as correcting:
            await correcting.execute(
                f"UPDATE {table} SET row = %s, thread_id = %s WHERE id = %s", (corrected, new, row.id)
            )
            replaying = asyncio.create_task(inside.replay(store, old, None))

            await someone_waits_for(deployment, correcting)
            assert [r.refused for r in await inside.replay(store, new, None)] == [None]
            await correcting.commit()
            assert await replaying == []
        assert [r.refused for r in await inside.replay(store, new, None)] == [None]
        assert await store.load_messages(new) == [{"id": "first"}, {"id": "corrected"}]


async def test_an_apps_role_may_replay(deployment: Deployment) -> None:
    await parked(deployment, [{"thread_id": "t", "run_id": "r", "delta": ["{"], "position": 0}])
    dsn, role = deployment.servers.postgres.dsn, fresh("role")
    await query(dsn, f'CREATE ROLE "{role}"')
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        for statement in grants(deployment.name, role):
            await connection.execute(statement)
    may = "SELECT has_sequence_privilege(%s, %s, 'USAGE')"
    assert await query(dsn, may, role, f'"{deployment.name}".spark_replays') == [(True,)]


async def someone_waits_for(deployment: Deployment, connection: psycopg.AsyncConnection[Any]) -> None:
    async def waits() -> bool:
        blocked = "SELECT pid FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
        return bool(await query(deployment.servers.postgres.dsn, blocked, connection.info.backend_pid))

    await eventually(waits)


class Unanswered:
    """A store whose log goes away behind each append."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def checkpoint_append(self, *arguments: Any, **options: Any) -> Any:
        await self._store.checkpoint_append(*arguments, **options)
        raise LogUnavailable("no answer")


class Interrupted:
    """A store whose log goes away before the nth append."""

    def __init__(self, store: Any, nth: int) -> None:
        self._store, self._left = store, nth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def checkpoint_append(self, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise LogUnavailable("no answer")
        return await self._store.checkpoint_append(*arguments, **options)


async def set_aside(deployment: Deployment, thread_id: str, batch_id: int, *messages: Any) -> None:
    ledger = SparkLedger(deployment.servers.postgres.dsn, deployment.name)
    await ledger.open()
    try:
        for rank, message in enumerate(messages):
            row = {"thread_id": thread_id, "run_id": f"run-{thread_id}", "delta": [json.dumps(message)]}
            await ledger.quarantine("app", batch_id, rank, row, "as it was", row_key("app", batch_id, row, rank))
    finally:
        await ledger.aclose()


async def test_a_row_whose_number_is_taken_is_not_dropped(deployment: Deployment) -> None:
    """Regression: it was noted as set aside, and was nowhere. Sequences do not come with logical replication."""
    await parked(deployment, [])
    dsn, schema, thread_id = deployment.servers.postgres.dsn, deployment.name, fresh()
    await set_aside(deployment, thread_id, 0, {"id": "a"})
    await query(dsn, f'ALTER TABLE "{schema}".spark_quarantine ALTER id RESTART')
    with pytest.raises(psycopg.errors.UniqueViolation):
        await set_aside(deployment, thread_id, 1, {"id": "b"})
    await set_aside(deployment, thread_id, 1, {"id": "b"})
    assert await query(dsn, f'SELECT count(*) FROM "{schema}".spark_quarantine') == [(2,)]


@pytest.mark.parametrize("restored", [False, True])
async def test_a_replay_that_is_interrupted_takes_no_refused_row_for_written(
    deployment: Deployment, restored: bool
) -> None:
    """The row's number was rolled back while a higher one was in the log. `restored`: the sequence was reset too."""
    await parked(deployment, [])
    thread_id = fresh()
    messages = [{"id": "a", "n": n} for n in range(2)] + [{"id": "b"}, {"id": "c"}, {"id": "d"}]
    await set_aside(deployment, thread_id, 0, *messages[1:4])
    async with (
        deployment.store() as store,
        ParkedRows(deployment.servers.postgres.dsn, deployment.name) as rows,
    ):
        await store.checkpoint(thread_id, messages[:1], run_of(thread_id))
        with pytest.raises(LogUnavailable):
            await rows.replay(Interrupted(store, 3), thread_id, None)  # type: ignore[arg-type]
        if restored:
            await query(deployment.servers.postgres.dsn, f'ALTER SEQUENCE "{deployment.name}".spark_replays RESTART')
            await set_aside(deployment, thread_id, 1, messages[4])
        done = await rows.replay(store, thread_id, None)
        assert ["id of new message" in (row.refused or "") for row in done].count(True) == 1
        assert await store.load_messages(thread_id) == [messages[0], *messages[2 : 5 if restored else 4]]
        assert [json.loads(json.loads(row.row)["delta"][0]) for row in await rows.page()] == [messages[1]]


async def test_a_row_without_a_number_is_set_aside_once_though_the_answer_is_lost(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each try gave it a new key, so it was there twice, and a replay wrote both."""
    await prepared(deployment)
    config = SinkConfig(app_id="batch", bad_rows="quarantine", **settings_of(deployment))
    await asyncio.to_thread(AppId(config).setup)
    orphan, answers = fresh(), []
    rows = [row | {"parent_thread_id": "nobody"} for row in rows_of([orphan], range(3))]
    fetch = SparkLedger._fetch

    async def lost(ledger: SparkLedger, name: str, *parameters: Any, **options: Any) -> Any:
        found = await fetch(ledger, name, *parameters, **options)
        if name == "quarantine":
            answers.append(parameters)
            if len(answers) == 1:
                raise StoreUnavailable("the answer was lost")
        return found

    monkeypatch.setattr(SparkLedger, "_fetch", lost)
    found = await asyncio.to_thread(write_rows, config, None, [rows[:1], rows[1:]])
    assert (found.counts.bad, len(answers)) == (3, 4)
    kept = await query(deployment.servers.postgres.dsn, f'SELECT row FROM "{deployment.name}".spark_quarantine')
    assert sorted(json.loads(row)["position"] for (row,) in kept) == [0, 1, 2]


async def test_a_task_that_outlives_its_batch_sets_nothing_aside(deployment: Deployment) -> None:
    """Regression: it set a row aside that its batch had set aside and somebody had replayed: it was written twice."""
    await parked(deployment, [])
    config = SinkConfig(app_id="app", bad_rows="quarantine", **settings_of(deployment))
    app, thread_id, of = AppId(config), fresh(), Query("query", "run")
    await asyncio.to_thread(app.begin, of, 0)
    await set_aside(deployment, thread_id, 0, {"id": "a"})
    async with deployment.store() as store, ParkedRows(deployment.servers.postgres.dsn, deployment.name) as rows:
        assert [row.refused for row in await rows.replay(store, thread_id, None)] == [None]
        await set_aside(deployment, thread_id, 0, {"id": "a"})
        assert await rows.count() == 0, "the batch may still come again"
        await asyncio.to_thread(app.begin, of, 1)
        with pytest.raises(ConfigError, match="a later batch was begun"):
            await set_aside(deployment, thread_id, 0, {"id": "a"})
        assert await rows.count() == 0


async def test_a_task_that_sets_a_row_aside_while_the_next_batch_begins_waits_for_it(deployment: Deployment) -> None:
    """Else it would note anew what that batch forgets, and the row would come again."""
    await parked(deployment, [])
    dsn, schema, thread_id = deployment.servers.postgres.dsn, deployment.name, fresh()
    app = AppId(SinkConfig(app_id="app", **settings_of(deployment)))
    of = Query("query", "run")
    await asyncio.to_thread(app.begin, of, 0)
    await set_aside(deployment, thread_id, 0, {"id": "a"})
    await query(dsn, f'DELETE FROM "{schema}".spark_quarantine')
    async with await psycopg.AsyncConnection.connect(dsn) as beginning:
        begin = queries(FOLDER, schema)["begin"]
        await arrays.rows_of(beginning, begin, ("app", *of, 1))
        late = asyncio.create_task(set_aside(deployment, thread_id, 0, {"id": "a"}))

        await someone_waits_for(deployment, beginning)
        await beginning.commit()
        with pytest.raises(ConfigError, match="a later batch was begun"):
            await late
    assert await query(dsn, f'SELECT count(*) FROM "{schema}".spark_quarantine') == [(0,)]


async def test_a_discarded_row_is_gone(deployment: Deployment) -> None:
    await parked(deployment, [{"thread_id": "t", "run_id": "r", "delta": ["{"], "position": 0}])
    (row,) = (await cli(deployment, "spark", "quarantine", "list", "--json")).json["rows"]
    assert (await cli(deployment, "spark", "quarantine", "discard", row["id"], "--json")).json["discarded"] == 1
    assert (await cli(deployment, "spark", "quarantine", "discard", row["id"])).code == 1


@pytest.mark.parametrize("what", ["replay", "discard", "neither"])
async def test_a_batch_that_comes_again_leaves_rows_that_were_set_aside_to_people(
    deployment: Deployment, what: str
) -> None:
    """The driver was killed before the batch was done, and the missing parent was made meanwhile."""
    orphan, parent = fresh(), fresh("parent")
    await prepared(deployment)
    config = SinkConfig(app_id="app", bad_rows="quarantine", **settings_of(deployment))
    app = AppId(config)
    first = [row | {"parent_thread_id": parent} for row in rows_of([orphan], range(1))]
    query_ = Query("query", "run")
    seen_again = Pass(noting=True, again=True)  # must hear which rows were set aside

    async def tried() -> RowCounts:
        await asyncio.to_thread(app.begin, query_, 0)
        return (await asyncio.to_thread(write_rows, config, 0, [first], seen_again, Part(0, 1, 7))).counts

    assert (await tried()).bad == 1
    async with deployment.store() as store:
        await store.checkpoint(parent, [], run_of(parent))
    (parked_row,) = (await cli(deployment, "spark", "quarantine", "list", "--json")).json["rows"]
    if what != "neither":
        assert (await cli(deployment, "spark", "quarantine", what, parked_row["id"], "--json")).code == 0
    again = await tried()
    assert (again.written, again.repeated, again.bad) == (0, 1, 0)
    failing = replace(config, bad_rows="fail")  # it leaves them to people, too, and does not end with them
    again = (await asyncio.to_thread(write_rows, failing, 0, [first], seen_again, Part(0, 1, 7))).counts
    assert (again.written, again.repeated, again.bad) == (0, 1, 0)
    await cli(deployment, "spark", "quarantine", "replay", "--all", "--json")
    assert (await held(deployment, [orphan]))[orphan] == ([] if what == "discard" else [0])
    left = f'SELECT count(*) FROM "{deployment.name}".spark_set_aside'
    dsn = deployment.servers.postgres.dsn
    assert await query(dsn, left) == [(1,)]
    with pytest.raises(ConfigError):
        await asyncio.to_thread(AppId(config).begin, Query("another", "run"), 1)
    assert await query(dsn, left) == [(1,)]  # batches of another query do not count
    await asyncio.to_thread(app.begin, query_, 1)
    assert await query(dsn, left) == [(0,)]
