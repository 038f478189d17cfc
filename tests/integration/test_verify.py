"""The self-check finds each kind of damage, and reports nothing on a live system."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from bufstore import OutcomeUnknown, ReadNotFresh, Unavailable
from bufstore.buffer.flush import idle, retention
from bufstore.buffer.places import group_of
from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said
from integration.test_quarantine import picky, poisoned

#: A flusher whose lease has expired would repair some of the damage before it is found.
pytestmark = pytest.mark.alone

DAMAGES = {
    "watermark <= log": "UPDATE {s}.buffer_threads SET flushed_seq = flushed_seq + 1000 WHERE thread_id = %s",
    "watermark applied": "UPDATE {s}.buffer_threads SET applied_id = applied_id + 1 WHERE thread_id = %s",
    "cursor flushed": "UPDATE {s}.buffer_threads SET flushed_seq = flushed_seq - 1 WHERE thread_id = %s",
    "version": "DELETE FROM {s}.messages WHERE thread_id = %s AND seq = 0",
    "cursor <= log": "UPDATE {s}.buffer_partitions SET cursor_seq = 1000000 WHERE cursor_seq > 0 AND %s <> ''",
    "cursor entry": "UPDATE {s}.buffer_partitions SET cursor_id = 7 WHERE cursor_seq > 0 AND %s <> ''",
    "progress <= cursor": "UPDATE {s}.buffer_partitions SET cursor_seq = 1, cursor_id = 0 WHERE %s <> ''",
}


@pytest.mark.parametrize("rule", DAMAGES)
async def test_each_kind_of_damage_is_found(
    deploy: Callable[..., Deployment], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The flusher would notice and repair a cursor that went back; keep it from that until the test has looked.
    deployment = deploy(failover_window_s=6000.0)
    monkeypatch.setattr(retention, "_INTERVAL_S", 600.0)
    monkeypatch.setattr(idle, "_INTERVAL_S", 600.0)
    deployment.verified = False
    async with deployment.store() as store:
        thread_id, other = fresh(), fresh()
        for n in range(3):
            for t in (thread_id, other):
                await store.checkpoint(t, [said(i) for i in range(n + 1)], run_of(t))
        await store.force_flush_all()
        report = await store.verify()
        assert report.ok, report.findings
        assert (report.threads, report.unflushed_entries, len(report.members)) == (2, 0, 1)
        await query(deployment.servers.postgres.dsn, DAMAGES[rule].format(s=deployment.name), thread_id)
        report = await store.verify()
        assert rule in {f.rule for f in report.findings}
        assert {f.thread_id for f in report.findings} <= {None, thread_id, other}
        assert report.wrong == len(report.findings)
        result = await asyncio.to_thread(bufstore_cli, "verify", "--json", **where(deployment))
        assert result.code == 1
        assert rule in {f["rule"] for f in result.json["findings"]}
        shown = await asyncio.to_thread(bufstore_cli, "verify", **where(deployment))
        assert (shown.code, rule in shown.out) == (1, True), shown


@pytest.mark.long
@pytest.mark.parametrize("rule", ["settled <= cursor", *(rule for rule in DAMAGES if rule != "progress <= cursor")])
async def test_damage_below_the_floor_is_found(deploy: Callable[..., Deployment], rule: str) -> None:
    deployment = deploy(failover_window_s=8.0)
    deployment.verified = False
    short = {"append_timeout_s": 4.0, "read_timeout_s": 4.0}
    threads = [fresh() for _ in range(3)]
    async with deployment.store(**short) as store:
        for n in range(3):
            await asyncio.gather(*(store.checkpoint(t, [said(i) for i in range(n + 1)], run_of(t)) for t in threads))
        await store.force_flush_all()
        last = max([(await store.checkpoint_append(t, [said(3)], run_of(t))).thread_seq for t in threads])
        other = fresh()
        await store.checkpoint(other, [said(0)], run_of(other))

        async def settled() -> bool:
            return await store.buffer.log.settled() > last

        await eventually(settled, 60)
    async with deployment.store(flusher=False, **short) as store:
        report = await store.verify()
        assert report.ok, report.findings
        assert (report.threads, report.unflushed_entries) == (4, 0)
        damage = DAMAGES.get(rule, "UPDATE {s}.buffer_partitions SET cursor_seq = 1, cursor_id = 0 WHERE %s <> ''")
        await query(deployment.servers.postgres.dsn, damage.format(s=deployment.name), threads[0])
        report = await store.verify()
        assert rule in {f.rule for f in report.findings}
        assert {f.thread_id for f in report.findings} <= {None, threads[0]}


async def test_a_chain_that_lost_an_entry_is_found(deployment: Deployment) -> None:
    deployment.verified = False
    async with deployment.store(flusher=False) as store:
        thread_id = fresh()
        seqs = []
        for n in range(4):
            receipt = await store.checkpoint(thread_id, [said(i) for i in range(n + 1)], run_of(thread_id))
            seqs.append(receipt.thread_seq)
        assert (await store.verify()).ok
        await store.buffer.session.stream.api(f"STREAM.MSG.DELETE.{deployment.log.stream}", {"seq": group_of(seqs[1])})
    # A new process has not seen the entry; another process would not notice that it is missing.
    async with deployment.store(flusher=False) as store:
        report = await store.verify()
        assert [(f.rule, f.thread_id) for f in report.findings] == [("chain", thread_id)]
        assert str(seqs[2]) in report.findings[0].detail


async def test_a_thread_that_went_on_without_a_discarded_entry_is_checked_like_others(deployment: Deployment) -> None:
    deployment.verified = False
    thread_id = fresh()
    async with deployment.store(picky(deployment), flush_interval_s=600) as store:
        await poisoned(store, thread_id)
        await store.force_flush_all()
        await store.quarantine.discard([p.seq for p in await store.quarantine.page(thread_id=thread_id)])
        await store.checkpoint(thread_id, [said(5)], run_of(thread_id, 5))
        await store.force_flush(thread_id)
    async with deployment.store(flusher=False) as store:
        receipts = [await store.checkpoint_append(thread_id, [said(n)], run_of(thread_id, n)) for n in (6, 7, 8)]
        lost = group_of(receipts[1].thread_seq)
        await store.buffer.session.stream.api(f"STREAM.MSG.DELETE.{deployment.log.stream}", {"seq": lost})
    async with deployment.store(flusher=False) as store:
        report = await store.verify()
        assert [(f.rule, f.thread_id) for f in report.findings] == [("chain", thread_id)]


async def test_a_log_that_is_not_the_one_that_postgres_knows_is_found(deployment: Deployment) -> None:
    deployment.verified = False
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush_all()
    await query(deployment.servers.postgres.dsn, f"UPDATE {deployment.name}.buffer_log SET epoch = 1")
    found = await asyncio.to_thread(bufstore_cli, "verify", "--json", **where(deployment))
    assert (found.code, found.json["findings"][0]["rule"]) == (1, "log and Postgres")
    assert "Postgres knows epoch 1" in found.json["findings"][0]["detail"]
    shown = await asyncio.to_thread(bufstore_cli, "verify", **where(deployment))
    assert "log and Postgres" in shown.out
    status = await asyncio.to_thread(bufstore_cli, "status", "--json", **where(deployment))
    assert status.code == 1
    assert "Postgres knows epoch 1" in status.json["write_trouble"]


@pytest.mark.parametrize("command", [["status"], ["verify"], ["quarantine", "list"], ["quarantine", "replay", "--all"]])
async def test_a_look_at_another_schema_is_an_error_and_makes_nothing(
    deployment: Deployment, command: list[str]
) -> None:
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
    wrong = f"{deployment.name}x"
    result = await asyncio.to_thread(bufstore_cli, *command, **{**where(deployment), "BUFSTORE_SCHEMA": wrong})
    assert result.code == 2
    assert f"schema '{wrong}'" in result.err
    schemas = await query(deployment.servers.postgres.dsn, "SELECT 1 FROM pg_namespace WHERE nspname = %s", wrong)
    assert not schemas


@pytest.mark.parametrize("command", ["status", "verify"])
async def test_a_lost_log_is_not_taken_for_one_that_was_never_there(deployment: Deployment, command: str) -> None:
    deployment.verified = False
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush_all()
        await store.buffer.session.stream.api(f"STREAM.DELETE.{deployment.log.stream}")
    result = await asyncio.to_thread(bufstore_cli, command, **where(deployment))
    assert result.code == 2
    assert "is gone" in result.err
    assert "bufstore repair" in result.err


@pytest.mark.parametrize("command", [["status"], ["verify"], ["quarantine", "list"]])
async def test_a_mistyped_log_is_not_taken_for_one_that_is_lost(deployment: Deployment, command: list[str]) -> None:
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush_all()
    wrong = {**where(deployment), "BUFSTORE_STREAM": f"{deployment.log.stream}x"}
    result = await asyncio.to_thread(bufstore_cli, *command, **wrong)
    assert (result.code, "is gone" in result.err) == (2, False), result
    assert f"log is '{deployment.log.stream}'" in result.err


async def test_quarantine_replay_and_discard_are_no_damage(deployment: Deployment) -> None:
    inner = picky(deployment)
    async with deployment.store(inner, flush_interval_s=600) as store:
        replayed, discarded, healed, broken = (fresh() for _ in range(4))
        for thread_id in (replayed, discarded, healed, broken):
            await poisoned(store, thread_id)
        await store.checkpoint(healed, [said(0)], run_of(healed))
        await store.force_flush_all()
        inner.mended = True
        await store.quarantine.replay_thread(replayed)
        await store.quarantine.discard([p.seq for p in await store.quarantine.page(thread_id=discarded)])
        report = await store.verify()
        assert report.ok, report.findings
        assert (report.threads, report.quarantined) == (4, 6)
        await store.checkpoint_append(discarded, [said(5)], run_of(discarded))
        await store.force_flush(discarded)
        assert await store.load_messages(discarded) == [said(0), said(5)]


async def test_a_busy_system_shows_nothing_wrong(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy(failover_window_s=1.0)
    short = {"append_timeout_s": 0.5, "read_timeout_s": 0.5, "retain_after_flush_s": 1.0}
    chance = random.Random(3)
    async with deployment.store(**short) as one, deployment.store(**short) as two:
        threads = [fresh() for _ in range(200)]
        stop = asyncio.Event()

        # A write gives up after half a second and drops its connection, which may happen here on a slow disk.
        async def write(store: Any) -> None:
            while not stop.is_set():
                thread_id = chance.choice(threads)
                with contextlib.suppress(Unavailable, ReadNotFresh, OutcomeUnknown):
                    await store.checkpoint(thread_id, [said(i) for i in range(chance.randint(1, 9))], run_of(thread_id))

        async def look() -> None:
            began = asyncio.get_running_loop().time()
            looks = 0
            while looks < 2 or asyncio.get_running_loop().time() - began < 4:
                with contextlib.suppress(Unavailable, ReadNotFresh):
                    report = await one.verify()
                    assert report.ok, report.findings
                    looks += 1
            stop.set()

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for store in (one, two):
                for _ in range(8):
                    tasks.create_task(write(store))
            tasks.create_task(look())

        async def quiet() -> bool:
            with contextlib.suppress(Unavailable, ReadNotFresh):
                return (await one.verify()).unflushed_entries == 0
            return False

        await eventually(quiet)
    result = await asyncio.to_thread(bufstore_cli, "verify", "--json", **where(deployment))
    assert (result.code, result.json["ok"], result.json["wrong"]) == (0, True, 0)
