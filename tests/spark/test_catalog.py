"""``CREATE TABLE … USING threadlog`` and ``USING bufstore``: permanent tables, with no login in the catalog."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest

from conftest import Deployment
from helpers import JAVA_OPTIONS, fresh, query, run_of, said
from spark.jobs import QUICK, ended, environment, held, job, settings_of, write


def located(deployment: Deployment, **more: str) -> str:
    """Return the OPTIONS of a table that does not name its servers."""
    pairs = {"stream": deployment.log.stream} | more
    return "OPTIONS (" + ", ".join(f"{name} '{value}'" for name, value in pairs.items()) + ")"


def login_of(deployment: Deployment) -> tuple[dict[str, str], dict[str, str]]:
    """Return the servers' addresses without a login, and with it."""
    settings = settings_of(deployment)
    nats = urlsplit(settings["nats"])
    assert nats.password
    open_ = {"nats": f"nats://{nats.hostname}:{nats.port}"}
    return open_, {"natsUrl": settings["nats"], "postgresUrl": settings["postgres"]}


async def test_tables_of_the_catalog(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    """The table names the log, and the login is given to each read."""
    threads, log, messages = [fresh() for _ in range(3)], f"log_{deployment.name}", f"messages_{deployment.name}"
    await write(deployment, threads, range(2))
    place, login = login_of(deployment)
    given = ", ".join(f"{name} = '{value}'" for name, value in login.items())
    nats = f"natsUrl = '{login['natsUrl']}'"

    def asked() -> tuple[Any, Any, Any, Any]:
        spark.sql(f"CREATE TABLE {log} USING threadlog {located(deployment, **place)} COMMENT 'the log'")
        at = {"schema": deployment.name, "table": "messages", "postgres": "host=/nowhere"} | place
        spark.sql(f"CREATE TABLE {messages} USING bufstore {located(deployment, **at)}")
        counted = f"SELECT thread_id, max(version) AS version FROM {log} WITH ({nats}) GROUP BY thread_id"
        versions = {row.thread_id: row.version for row in spark.sql(counted).collect()}
        number = spark.sql(f"SELECT max(message.number) FROM {messages} WITH ({given})").collect()[0][0]
        narrowed = spark.read.options(**login, threads=f'["{threads[0]}"]').table(messages).count()
        with pytest.raises(Exception, match="refused the credentials"):
            spark.sql(f"SELECT * FROM {log}").collect()
        return versions, number, narrowed, spark.table(log).columns

    versions, number, narrowed, columns = await asyncio.to_thread(asked)
    assert versions == dict.fromkeys(threads, 2)
    assert (number, narrowed, columns[0]) == (1, 2, "position")

    def stream() -> Any:
        read = spark.readStream.option("natsUrl", login["natsUrl"]).option("startingPosition", "earliest").table(log)
        query = read.writeStream.format("memory").queryName(f"seen_{deployment.name}").trigger(availableNow=True)
        return query.option("checkpointLocation", str(tmp_path / "ck")).start()

    await ended(await asyncio.to_thread(stream))
    assert await asyncio.to_thread(spark.table(f"seen_{deployment.name}").count) == 6


@pytest.mark.long  # a Java for each session
@pytest.mark.parametrize("lasting", [False, True])
async def test_a_table_takes_its_servers_from_the_drivers_environment(
    deployment: Deployment, tmp_path: Path, lasting: bool
) -> None:
    """With Hive's catalog the tables exist in the next session too."""
    thread = fresh()
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread, [said(n) for n in range(3)], run_of(thread))
    settings = settings_of(deployment)
    env = environment(BUFSTORE_NATS=settings["nats"], BUFSTORE_POSTGRES=settings["postgres"])
    make = [
        f"CREATE TABLE log USING threadlog {located(deployment)}",
        f"CREATE TABLE messages USING bufstore {located(deployment, schema=deployment.name, table='messages')}",
    ]
    read = ["SELECT thread_id, version FROM log", "SELECT message.text FROM messages ORDER BY message.number"]
    conf = QUICK | {"spark.sql.warehouse.dir": str(tmp_path / "tables")}
    if lasting:
        conf |= {
            "spark.sql.catalogImplementation": "hive",
            "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} -Dderby.stream.error.file={tmp_path}/derby.log",
            "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={tmp_path}/catalog;create=true",
        }
    rows: list[Any] = []
    for statements in (make, read) if lasting else (make + read,):
        code, found = await job("sql", env, spark=conf, statements=statements)
        assert code == 0, found
        rows += found["rows"]
    assert rows == [[], [], [[thread, 3]], [[said(n)["content"]] for n in range(3)]]


@pytest.mark.long
async def test_a_table_that_is_dropped_takes_nothing_with_it(spark: Any, deployment: Deployment) -> None:
    """Nothing of the log or of Postgres is removed: flushed, unflushed or unrelated."""
    threads, names = [fresh() for _ in range(3)], [f"{what}_{deployment.name}" for what in ("log", "messages", "runs")]
    await write(deployment, threads, range(2))
    await held(deployment, threads)
    await write(deployment, threads[1:], range(2, 4))
    place, login = login_of(deployment)
    at = {"schema": deployment.name, "postgres": "host=/nowhere"} | place

    def make() -> None:
        spark.sql(f"CREATE TABLE {names[0]} USING threadlog {located(deployment, **place)}")
        for name, table in zip(names[1:], ("messages", "runs"), strict=True):
            spark.sql(f"CREATE TABLE {name} USING bufstore {located(deployment, table=table, **at)}")

    def counted() -> list[int]:
        options = [{"natsUrl": login["natsUrl"]}, login, login]
        return [spark.read.options(**o).table(name).count() for name, o in zip(names, options, strict=True)]

    def dropped() -> list[bool]:
        for name, how in zip(names, ("", "PURGE", ""), strict=True):
            spark.sql(f"DROP TABLE {name} {how}")
        return [spark.catalog.tableExists(name) for name in names]

    await asyncio.to_thread(make)
    assert await asyncio.to_thread(counted) == [10, 10, 3]
    before = await all_there_is(deployment)
    assert await asyncio.to_thread(dropped) == [False] * 3
    assert await all_there_is(deployment) == before
    await asyncio.to_thread(make)
    assert await asyncio.to_thread(counted) == [10, 10, 3]


async def all_there_is(deployment: Deployment) -> dict[str, Any]:
    """Return the log's state and all rows in Postgres."""
    client = await nats.connect(deployment.servers.nats.url)
    try:
        stream = json.loads((await client.request(f"$JS.API.STREAM.INFO.{deployment.log.stream}", timeout=5)).data)
    finally:
        await client.close()
    dsn, schema = deployment.servers.postgres.dsn, deployment.name
    tables = await query(dsn, "SELECT tablename FROM pg_tables WHERE schemaname = %s", schema)
    rows = {name: await query(dsn, f'SELECT t::text FROM "{schema}"."{name}" AS t ORDER BY 1') for (name,) in tables}
    assert stream["state"]["messages"]
    assert rows["messages"]
    state = {name: stream["state"][name] for name in ("messages", "first_seq", "last_seq")}
    return rows | state | {"created": stream["created"]}


@pytest.mark.long
async def test_no_login_gets_into_a_catalog_or_a_plan(
    spark: Any, deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    await write(deployment, [fresh()], range(1))
    place, login = login_of(deployment)
    secret = urlsplit(login["natsUrl"]).password
    assert secret
    name = f"secret_{deployment.name}"

    def tried() -> None:
        for format_, given in (
            ("threadlog", {"natsUrl": login["natsUrl"]}),
            ("threadlog", {"nats": login["natsUrl"]}),
            ("threadlog", place | {"user": "me", "password": "hush"}),
            ("threadlog", place | {"Token": "hush"}),
            ("bufstore", place | {"table": "runs", "postgresUrl": "postgresql://me:hush@h/db"}),
        ):
            with pytest.raises(Exception, match="contains a login, which everybody") as refused:
                spark.sql(f"CREATE TABLE {name} USING {format_} {located(deployment, **given)}")
            assert "hush" not in str(refused.value)
            assert secret not in str(refused.value)
        assert not spark.catalog.tableExists(name)
        spark.sql(f"CREATE TABLE {name} USING threadlog {located(deployment, **place)}")
        df = spark.sql(f"SELECT * FROM {name} WITH (natsUrl = '{login['natsUrl']}')")
        df.explain(True)
        print(df._jdf.queryExecution().toString())
        print(df.schema.json())
        spark.sql(f"DESCRIBE TABLE EXTENDED {name}").show(100, False)

    await asyncio.to_thread(tried)
    shown = capsys.readouterr().out
    assert "thread_id" in shown
    assert secret not in shown


async def test_a_table_has_the_columns_that_it_was_made_with(spark: Any, deployment: Deployment) -> None:
    await write(deployment, [fresh()], range(1))
    place, login = login_of(deployment)
    some, named = f"some_{deployment.name}", f"named_{deployment.name}"

    def asked() -> Any:
        spark.sql(f"CREATE TABLE {some} USING threadlog {located(deployment, columns='position, bytes', **place)}")
        spark.sql(f"CREATE TABLE {named} (position bigint) USING threadlog {located(deployment, **place)}")
        read = spark.read.option("natsUrl", login["natsUrl"])
        with pytest.raises(Exception, match="make the table without naming its columns"):
            read.table(named).collect()
        with pytest.raises(Exception, match="make the table without naming its columns"):
            read.option("columns", "bytes").table(some).collect()
        return spark.read.option("natsUrl", login["natsUrl"]).table(some).collect()

    (row,) = await asyncio.to_thread(asked)
    assert set(row.asDict()) == {"position", "bytes"}
