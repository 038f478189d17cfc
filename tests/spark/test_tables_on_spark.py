"""Threads, runs and messages as tables of Spark: DataFrames, SQL, plans."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bufstore.spark import hold_position
from conftest import Deployment
from helpers import run_of, said
from spark.jobs import settings_of, where

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


async def written(deployment: Deployment) -> None:
    """Write ten threads of two agents with three messages each, half of them only to the log."""
    for numbers, flushed in ((range(5), True), (range(5, 10), False)):
        async with deployment.store(flusher=flushed) as store:
            for n in numbers:
                run = run_of(f"t-{n}", agent_id=("ada", "bob")[n % 2])
                await store.checkpoint(f"t-{n}", [said(i) for i in range(3)], run)
            if flushed:
                await store.force_flush_all()


def options(deployment: Deployment, table: str, **more: str) -> dict[str, str]:
    found = settings_of(deployment)
    where = {"natsUrl": found["nats"], "postgresUrl": found["postgres"]}
    return where | {name: found[name] for name in ("schema", "stream")} | {"table": table} | more


async def test_questions_about_all_that_was_acknowledged(spark: Any, deployment: Deployment) -> None:
    await written(deployment)

    def ask() -> tuple[list[Any], list[Any], list[Any]]:
        frames = {}
        for table in ("threads", "runs", "messages"):
            frames[table] = spark.read.format("bufstore").options(**options(deployment, table)).load()
        per_agent = (
            frames["messages"].join(frames["threads"], "thread_id").groupBy("agent_id").count().orderBy("agent_id")
        )
        words = frames["messages"].select("thread_id", "message.*").where("number = 2").select("role", "text", "id")
        runs = frames["runs"].where("agent_id = 'ada'").select("run_id").orderBy("run_id")
        return per_agent.collect(), words.distinct().collect(), runs.collect()

    per_agent, words, runs = await asyncio.to_thread(ask)
    assert [tuple(row) for row in per_agent] == [("ada", 15), ("bob", 15)]
    assert [tuple(row) for row in words] == [("user", said(2)["content"], "m2")]
    assert [row.run_id for row in runs] == [f"run-0-of-t-{n}" for n in range(0, 10, 2)]


@pytest.mark.parametrize("pushing", ["true", "false"])
async def test_no_question_takes_rows_from_another_one(spark: Any, deployment: Deployment, pushing: str) -> None:
    """Two questions to one DataFrame, or view, one after the other or in one query."""
    await written(deployment)
    given = ", ".join(f"{name} '{value}'" for name, value in options(deployment, "messages").items())

    def ask() -> list[int]:
        said = spark.read.format("bufstore").options(**options(deployment, "messages")).load()
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW said USING bufstore OPTIONS ({given})")
        return [
            said.where("thread_id = 't-7'").count(),
            said.count(),
            said.where("changed_at < timestamp'2020-01-01'").count(),
            said.where("message.number = 1").count(),
            said.where("message.number = 1").union(said.where("thread_id = 't-7'")).count(),
            *(spark.sql(f"SELECT * FROM said WHERE {one}").count() for one in ("thread_id IN ('t-1', 'x')", "true")),
        ]

    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, pushing)
    try:
        assert await asyncio.to_thread(ask) == [3, 30, 0, 10, 13, 3, 30]
    finally:
        spark.conf.set(PUSHDOWN, before)


async def test_tables_at_one_position_fit_together(spark: Any, deployment: Deployment) -> None:
    await written(deployment)

    def count(**more: str) -> tuple[int, int]:
        tables = ("threads", "messages")
        read = {t: spark.read.format("bufstore").options(**more | {"table": t}).load() for t in tables}
        return read["threads"].selectExpr("sum(version)").collect()[0][0], read["messages"].count()

    with hold_position(where(deployment)) as held:
        assert "natsUrl" not in repr(held)
        async with deployment.store() as store:
            await store.checkpoint_append("t-0", [said(n) for n in range(3, 9)], run_of("t-0"))
            await store.force_flush_all()
        assert await asyncio.to_thread(lambda: count(**held.options)) == (30, 30)
    assert await asyncio.to_thread(lambda: count(**options(deployment, ""))) == (36, 36)


async def test_a_plan_of_a_table_shows_no_login(
    spark: Any, deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    await written(deployment)
    given = options(deployment, "threads")
    login = given["natsUrl"].split("@")[0].rpartition(":")[2]
    assert login

    def plan() -> None:
        df = spark.read.format("bufstore").options(**given).load()
        df.where("thread_id = 't-1'").explain(True)
        print(df._jdf.queryExecution().toString())
        pairs = ", ".join(f"{name} '{value}'" for name, value in given.items())
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW shown USING bufstore OPTIONS ({pairs})")
        spark.sql("SELECT * FROM shown").explain(True)

    await asyncio.to_thread(plan)
    said = capsys.readouterr().out
    assert "thread_id" in said
    assert login not in said
    assert given["postgresUrl"] not in said
