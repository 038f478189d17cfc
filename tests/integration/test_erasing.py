"""Erasing a thread on real servers removes its content from NATS' disk and from all tables."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from bufstore import Consistency, PostgresThreadStore
from bufstore.buffer.places import group_of
from bufstore.embedded import Servers
from bufstore.spark.sink.spark_ledger import SparkLedger, row_key
from conftest import Deployment
from helpers import fresh, query, run_of
from integration.test_operator_cli import cli


class Picky(PostgresThreadStore):
    """Refuses messages with a mark, as a table's constraint would."""

    async def apply(self, connection: Any, batch: Any) -> None:
        if any(b"poison" in m for c in batch for m in c.messages):
            await connection.execute("SELECT 1/0")
        await super().apply(connection, batch)


def on_disk(servers: Servers, mark: str) -> bool:
    """True when any file of NATS contains the mark."""
    return any(mark.encode() in file.read_bytes() for file in servers.nats.data.rglob("*") if file.is_file())


async def tables_with(deployment: Deployment, mark: str) -> list[str]:
    """Return the deployment's tables that have the mark in a row."""
    dsn, schema = deployment.servers.postgres.dsn, deployment.name
    tables = [t for (t,) in await query(dsn, "SELECT tablename FROM pg_tables WHERE schemaname = %s", schema)]
    found = []
    for table in tables:
        looked = f"SELECT 1 FROM {schema}.{table} AS r WHERE r::text LIKE %s OR r::text LIKE %s LIMIT 1"
        if await query(dsn, looked, f"%{mark}%", f"%{mark.encode().hex()}%"):
            found.append(table)
    return found


async def test_the_content_of_an_erased_thread_is_nowhere_any_more(
    deploy: Callable[..., Deployment], servers: Servers
) -> None:
    deployment = deploy(failover_window_s=8.0)
    gone, other, mark, large = fresh(), fresh(), fresh("secret"), fresh("large")
    ledger = SparkLedger(servers.postgres.dsn, deployment.name)
    await ledger.open()
    try:
        await ledger.setup()
        for thread_id in (gone, other):
            row = {"thread_id": thread_id, "messages": f"{mark}-{thread_id}"}
            await ledger.quarantine("app", 0, 1, row, "no", row_key("app", 0, row, 1))
    finally:
        await ledger.aclose()
    inner = Picky(servers.postgres.dsn, schema=deployment.name, pool_size=4)
    async with deployment.store(inner) as store:
        for thread_id in (gone, other):
            for n in range(3):
                await store.checkpoint(thread_id, [f"{mark}-{thread_id}"] * (n + 1), run_of(thread_id, n))
        # Stored in several messages, because it exceeds the largest message.
        await store.checkpoint(gone, [large + "x" * (3 << 20)], run_of(gone, 3))
        await store.checkpoint(gone, [f"{mark}-{gone}", "poison"], run_of(gone, 4))
        await store.force_flush_all()
        assert await store.quarantined() == 1
        assert on_disk(servers, f"{mark}-{gone}")
        assert on_disk(servers, large)
        assert "buffer_quarantine" in await tables_with(deployment, gone)

        erasure = await store.erase(gone)
        assert (erasure.log_messages, erasure.quarantined, erasure.set_aside) == (5, 1, 1)
        assert not on_disk(servers, f"{mark}-{gone}")
        assert not on_disk(servers, large)
        # The id stays there, so that entries which are delivered again take no effect.
        assert await tables_with(deployment, gone) == ["buffer_threads"]
        assert await tables_with(deployment, f"{mark}-{gone}") == []

        assert on_disk(servers, f"{mark}-{other}")
        assert await store.load_messages(other, consistency=Consistency.STRONG) == [f"{mark}-{other}"] * 3
        assert await store.load_checkpoint(gone) is None
        await store.checkpoint(gone, ["new"], run_of(gone, 9))
        await store.force_flush(gone)
    async with deployment.store(inner=Picky(servers.postgres.dsn, schema=deployment.name)) as store:
        assert await store.load_messages(gone) == ["new"]


@pytest.mark.long
async def test_threads_that_share_groups_with_an_erased_one_lose_nothing(
    deploy: Callable[..., Deployment], servers: Servers
) -> None:
    deployment = deploy(failover_window_s=8.0)
    gone, others, mark = fresh(), [fresh() for _ in range(12)], fresh("secret")
    short = {"append_timeout_s": 3.0, "read_timeout_s": 3.0}
    async with deployment.store(**short) as store, deployment.store(flusher=False, **short) as reader:
        for n in range(3):
            threads = (gone, *others)
            await asyncio.gather(*(store.checkpoint_append(t, [f"{mark}-{t}-{n}"], run_of(t, n)) for t in threads))
        # The reader caches these groups before the thread is erased.
        assert all([len(await reader.load_messages(t)) == 3 for t in others])
        shared = {group_of(m.seq) async for _, m in store.buffer.log.scan(threads=[gone])}
        assert shared & {group_of(m.seq) async for _, m in store.buffer.log.scan(threads=others)}

        assert (await store.erase(gone)).log_messages == 3
        assert not on_disk(servers, f"{mark}-{gone}")
        assert not shared & {group_of(m.seq) async for _, m in store.buffer.log.scan()}
        whole = {t: [f"{mark}-{t}-{n}" for n in range(3)] for t in others}
        for at, said in ((reader, "behind"), (store, "further")):
            for t in others:
                assert await at.load_messages(t, consistency=Consistency.STRONG) == whole[t]
                await at.checkpoint_append(t, [said], run_of(t, 4), expected_version=len(whole[t]))
                whole[t].append(said)
        await store.force_flush_all()
        assert await store.quarantined() == 0
        assert (await reader.verify()).ok


@pytest.mark.long  # each erasure waits for the failover window
async def test_erasing_from_the_command_line(deploy: Callable[..., Deployment], servers: Servers) -> None:
    deployment = deploy(failover_window_s=8.0)
    gone, mark = fresh(), fresh("secret")
    async with deployment.store() as store:
        await store.checkpoint(gone, [mark], run_of(gone))
        done = await cli(deployment, "erase", gone, "--json")
        assert (done.code, done.json["erased"][0]["log_messages"]) == (0, 1), done
        assert not on_disk(servers, mark)
        again = await cli(deployment, "erase", gone)
        assert (again.code, "nothing" in again.out) == (1, True), again


@pytest.mark.long
async def test_a_thread_that_is_not_erased_keeps_no_other_from_it(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy(failover_window_s=8.0)
    gone, parent, child = fresh(), fresh(), fresh()
    async with deployment.store() as store:
        for thread_id in (gone, parent):
            await store.checkpoint(thread_id, ["x"], run_of(thread_id))
        await store.checkpoint(child, ["x"], run_of(child, parent_thread_id=parent))
        await store.force_flush_all()
        done = await cli(deployment, "erase", parent, gone, "--json")
        assert done.code == 1, done
        assert [(e["thread_ids"], e["log_messages"]) for e in done.json["erased"]] == [([gone], 1)]
        (failed,) = done.json["failed"]
        assert (failed["thread_id"], failed["error"]) == (parent, "LineageError")
        assert "children" in failed["message"]
        assert await store.load_messages(parent) == ["x"]
        human = await cli(deployment, "erase", parent)
        assert (human.code, f"{parent!r}: not erased" in human.out) == (1, True), human
        wrong = await cli(deployment, "erase", parent, "", "--children", "cascade")
        assert (wrong.code, "empty" in wrong.err) == (2, True), wrong
        assert await store.load_messages(parent) == ["x"], "what is no id is found out before anything is erased"
