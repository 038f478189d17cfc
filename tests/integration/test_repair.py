"""Log and Postgres that no longer fit together: each case is noticed, and `repair` resolves it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from typing import Any

import nats
import psycopg
import pytest

from bufstore import BufferedThreadStore, ConfigError, Consistency, LogRolledBack, NotFound, ThreadQuarantined
from bufstore.buffer.flush import lease
from bufstore.buffer.operate.repair import Repaired
from bufstore.buffer.places import ENTRIES_MAX
from bufstore.embedded import Servers
from bufstore.nats.log import NatsLog
from bufstore.threads.repairing import repair
from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said, writable


async def mend(deployment: Deployment, *, apply: bool = True) -> Repaired:
    return await repair(deployment.inner(), nats=deployment.servers.nats.url, config=deployment.config(), apply=apply)


async def refused(deployment: Deployment, why: str) -> None:
    with pytest.raises(LogRolledBack, match=why):
        async with deployment.store():
            pass
    looked = await mend(deployment, apply=False)
    assert looked.reason is not None
    assert not looked.done


async def append(store: BufferedThreadStore, thread_id: str, *messages: Any) -> None:
    for message in messages:
        await store.checkpoint_append(thread_id, [message], run_of(thread_id))


async def flushed(store: BufferedThreadStore, thread_id: str) -> list[Any] | None:
    await store.force_flush(thread_id)
    return await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)


async def delete_stream(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        await store.buffer.session.stream.api(f"STREAM.DELETE.{deployment.log.stream}")
        deployment.verified = False
    deployment.verified = True


async def pg(deployment: Deployment, sql: str) -> list[tuple[Any, ...]]:
    return await query(deployment.servers.postgres.dsn, sql.format(s=deployment.name))


class Snapshot:
    """A copy of the deployment's schema that can be restored, like a backup of Postgres."""

    _TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = '{s}'"

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    async def take(self) -> None:
        await pg(self._deployment, "CREATE SCHEMA {s}_copy")
        for (table,) in await pg(self._deployment, self._TABLES):
            await pg(self._deployment, f"CREATE TABLE {{s}}_copy.{table} AS TABLE {{s}}.{table}")

    async def restore(self) -> None:
        tables = [t for (t,) in await pg(self._deployment, self._TABLES)]
        await pg(self._deployment, "TRUNCATE " + ", ".join(f"{{s}}.{t}" for t in tables))
        for table in tables:
            await pg(self._deployment, f"INSERT INTO {{s}}.{table} SELECT * FROM {{s}}_copy.{table}")


async def test_nothing_wrong_is_left_as_it_is(deployment: Deployment) -> None:
    assert await mend(deployment) == Repaired(reason=None)
    async with deployment.store() as store:
        await append(store, "t", 1)
        await store.force_flush("t")
        assert await mend(deployment) == Repaired(reason=None)
        await append(store, "t", 2)
    result = await asyncio.to_thread(bufstore_cli, "repair", "--json", **where(deployment))
    assert (result.code, result.json["reason"]) == (0, None)


@pytest.mark.parametrize("bucket", [False, True], ids=["", "with_the_bucket"])
async def test_a_stream_that_is_gone(deployment: Deployment, bucket: bool) -> None:
    async with deployment.store() as store:
        await append(store, "t", 1)
        await store.force_flush("t")
    await delete_stream(deployment)
    if bucket:  # as after NATS has lost its disk; a store that is open would make it anew
        client = await nats.connect(deployment.servers.nats.url)
        await client.jetstream().delete_key_value(deployment.log.bucket)
        await client.close()
    await refused(deployment, "is gone")
    flush = await asyncio.to_thread(bufstore_cli, "flush", "--all", **where(deployment))
    assert (flush.code, "is gone" in flush.err, "setup" in flush.err) == (2, True, False), flush
    shown = await asyncio.to_thread(bufstore_cli, "repair", **where(deployment))
    assert (shown.code, "generation 1" in shown.out) == (1, True), shown
    done = await asyncio.to_thread(bufstore_cli, "repair", "--apply", **where(deployment))
    assert done.code == 0, done
    async with deployment.store() as store:
        receipt = await store.checkpoint_append("t", [2], run_of("t"), expected_version=1)
        assert receipt.thread_seq >= 1 << 40
        assert await flushed(store, "t") == [1, 2]
    assert await mend(deployment) == Repaired(reason=None)


async def test_a_lost_log_whose_bucket_has_settings_that_the_command_line_does_not_know(deployment: Deployment) -> None:
    """The main such setting is the number of replicas (test_cluster.py), which a single server does not have."""
    deployment.verified = False
    async with deployment.store() as store:
        await append(store, "t", 1)
        await store.force_flush("t")
        bucket = f"KV_{deployment.log.bucket}"
        await store.buffer.shared._stream.api(f"STREAM.UPDATE.{bucket}", await _deletable(store) | {"max_age": 10**12})
        await store.buffer.session.stream.api(f"STREAM.DELETE.{deployment.log.stream}")
    shown = await asyncio.to_thread(bufstore_cli, "repair", **where(deployment))
    assert (shown.code, "generation 1" in shown.out) == (1, True), shown


@pytest.mark.parametrize("gone", [False, True])
async def test_a_log_that_lost_what_only_an_archive_has(deployment: Deployment, gone: bool) -> None:
    """Regression: the log went on, gave the archived positions anew, and purged what came there unarchived."""
    deployment.verified = False
    async with deployment.store(flusher=False) as store:
        await append(store, "t", 1)
        end = await store.buffer.log.end(5)
        await store.buffer.ledger.set_archived(end + 1)
    if not gone:
        assert await mend(deployment) == Repaired(reason=None), "the archive ends with the log"
        async with deployment.store(flusher=False) as store:
            await store.buffer.ledger.set_archived(end + 1 + ENTRIES_MAX)
    else:
        await delete_stream(deployment)
    await refused(deployment, "an archive has")
    done = await mend(deployment, apply=True)
    assert (done.done, done.applied) == (True, 0 if gone else 1)
    async with deployment.store() as store:
        receipt = await store.checkpoint_append("t", [2], run_of("t"))
        assert receipt.thread_seq >= 1 << 40
        await store.force_flush("t")
    assert await mend(deployment) == Repaired(reason=None)


@pytest.mark.parametrize("needed", [True, False])
async def test_a_repair_says_what_no_archive_has(deploy: Callable[..., Deployment], needed: bool) -> None:
    """Regression: it did not where a log was archived that need not be (`LogConfig.archive`)."""
    deployment = deploy(archive=needed)
    async with deployment.store() as store:
        await append(store, "t", 1, 2)
        await store.force_flush("t")
        archived = await store.buffer.log.end(5) + 1
        await store.buffer.ledger.set_archived(archived)
    deployment.verified = False
    await pg(deployment, "UPDATE {s}.buffer_partitions SET cursor_id = 1 WHERE cursor_id <> 0")
    assert (await mend(deployment, apply=False)).unarchived_from is None
    await pg(deployment, "UPDATE {s}.buffer_archive SET position = 1024")
    shown = await asyncio.to_thread(bufstore_cli, "repair", **where(deployment))
    assert (shown.code, "no archive has the log from position 1024 on" in shown.out) == (1, True), shown


class Backup:
    """A copy of NATS' files."""

    def __init__(self, servers: Servers) -> None:
        self._nats = servers.nats

    def take(self) -> None:
        self._nats.stop()
        self._copy(self._nats.data, self._nats.data.with_name("older"))
        self._nats.start()

    def restore(self) -> None:
        self._nats.stop()
        self._copy(self._nats.data.with_name("older"), self._nats.data)
        self._nats.start()

    @staticmethod
    def _copy(producer: Any, target: Any) -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(producer, target)


async def test_a_log_that_lost_its_end(own_servers: Servers) -> None:
    """Entries of the log that Postgres lacks are flushed; those that Postgres applied beyond the log's end are kept."""
    deployment = Deployment(own_servers)
    unflushed, both, new = "unflushed", "both", "new"
    backup = Backup(own_servers)
    async with deployment.store(flusher=False) as store:
        await append(store, both, 1, 2)
        await append(store, unflushed, *range(30))
        await store.buffer.log.fill()
    backup.take()
    # The other thread's row is locked: its entries stay unflushed while Postgres moves past them.
    async with Held(deployment, unflushed), deployment.store() as store:
        await append(store, both, 3)
        await append(store, new, "n")
        await store.force_flush(new)
        assert await flushed(store, both) == [1, 2, 3]
        await store.buffer.flusher.aclose()  # type: ignore[union-attr]
    backup.restore()
    looked = await mend(deployment, apply=False)
    assert (looked.applied, looked.parked, looked.done) == (30, 0, False)
    await refused(deployment, "ends at")
    done = await mend(deployment)
    assert (done.applied, done.parked, done.done) == (30, 0, True)
    async with deployment.store() as store:
        await append(store, both, 4)
        await append(store, unflushed, 30)
        assert await flushed(store, both) == [1, 2, 3, 4]
        assert await flushed(store, unflushed) == list(range(31))
        assert await flushed(store, new) == ["n"]


async def test_a_log_older_than_what_postgres_remembers_rewinds_no_thread(own_servers: Servers) -> None:
    """Regression: what is parked because it may be applied was applied once more by the replay that is advised."""
    deployment = Deployment(own_servers)
    whole, deltas = "whole", "deltas"
    backup = Backup(own_servers)
    async with deployment.store() as store:
        for n in range(1, 40):
            await store.checkpoint(whole, list(range(n)), run_of(whole))
            await append(store, deltas, n)
            if n == 3:
                await store.force_flush_all()
                await asyncio.to_thread(backup.take)
                await writable(store)
        expected = {whole: list(range(39)), deltas: list(range(1, 40))}
        assert {t: await flushed(store, t) for t in expected} == expected
        deployment.verified = False  # it would find what the backup lacks
        await asyncio.to_thread(backup.restore)
    done = await eventually(lambda: _mended(deployment))
    assert (done.applied, done.parked) == (0, 6)
    deployment.verified = True
    async with deployment.store() as store:
        outcomes = [o for t in expected for o in await store.quarantine.replay_thread(t)]
        assert {o.outcome.value for o in outcomes} == {"superseded"}
        assert all("applied already" in o.reason for o in outcomes)
        assert {t: await _known(store, t) for t in expected} == expected
        with pytest.raises(ThreadQuarantined):
            await append(store, deltas, 40)
        assert await store.quarantine.discard([o.seq for o in outcomes]) == len(outcomes)
        await append(store, deltas, 40)
        assert await flushed(store, deltas) == [*expected[deltas], 40]


class Held:
    """Another session's lock on a thread's row."""

    def __init__(self, deployment: Deployment, thread_id: str) -> None:
        self._deployment, self._thread_id = deployment, thread_id

    async def __aenter__(self) -> None:
        schema = self._deployment.name
        await pg(
            self._deployment,
            "INSERT INTO {s}.buffer_threads (thread_id, flushed_seq, applied_id, version, ring) "
            f"VALUES ('{self._thread_id}', 0, 0, 0, '') ON CONFLICT DO NOTHING",
        )
        self._connection = await psycopg.AsyncConnection.connect(self._deployment.servers.postgres.dsn)
        await self._connection.execute(
            f"SELECT * FROM {schema}.buffer_threads WHERE thread_id = %s FOR UPDATE",  # type: ignore[arg-type]
            (self._thread_id,),
        )

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()


@pytest.mark.long
async def test_both_went_on_after_the_log_had_gone_back(own_servers: Servers) -> None:
    """Postgres was down when the first writer came back, so it was noticed late: no acknowledged entry is dropped."""
    deployment = Deployment(own_servers)
    backup = Backup(own_servers)
    deltas, whole, fine = "deltas", "whole", "fine"
    async with deployment.store() as store:
        for t in (deltas, whole, fine):
            await append(store, t, 1)
        await store.force_flush_all()
    backup.take()
    async with deployment.store() as store:
        for t in (deltas, whole):
            await append(store, t, 2, 3)
        await store.force_flush_all()
    backup.restore()
    own_servers.postgres.stop()
    deployment.verified = False
    async with deployment.store(flush_timeout_s=1) as store:
        await store.checkpoint(fine, [1, 2], run_of(fine))
        await store.checkpoint(whole, ["all", "new"], run_of(whole))
        await store.checkpoint(deltas, ["other"], run_of(deltas))
        await append(store, deltas, "and more")
        own_servers.postgres.start()
        await eventually(lambda: _rolled_back(store))
        with pytest.raises(LogRolledBack):
            await append(store, fine, 3)
    deployment.verified = True
    await asyncio.sleep(0)
    done = await eventually(lambda: _mended(deployment))
    assert (done.applied, done.parked) == (4, 0)
    async with deployment.store() as store:
        expected = {fine: [1, 2], whole: ["all", "new"], deltas: ["other", "and more"]}
        assert {t: await store.load_messages(t) for t in expected} == expected


async def _known(store: BufferedThreadStore, thread_id: str) -> list[Any] | None:
    return await store.load_messages(thread_id, quarantined="known")


async def _rolled_back(store: BufferedThreadStore) -> bool:
    return "repair" in (await store.health()).flusher


async def _mended(deployment: Deployment) -> Repaired | None:
    try:
        return await mend(deployment)
    except ConfigError:  # the closed store is still listed as a flusher for a moment
        return None


@pytest.mark.long  # ten seconds
async def test_a_postgres_restored_from_a_copy_older_than_the_log_reaches(deploy: Callable[..., Deployment]) -> None:
    """The loss is reported: deltas without a base go to quarantine, a full checkpoint is applied."""
    deployment = deploy(failover_window_s=8.0)
    snapshot = Snapshot(deployment)
    delta, whole = fresh("delta"), fresh("whole")
    short = {"retain_after_flush_s": 8.0}
    async with deployment.store() as store:
        await append(store, delta, 1)
        await append(store, whole, 1)
        await store.force_flush_all()
        await snapshot.take()
    async with deployment.store(**short) as store:
        await append(store, delta, 2, 3)
        await append(store, whole, 2, 3)
        await store.force_flush_all()
        await eventually(lambda: _purged(store, delta, whole), 60)
    deployment.verified = False
    async with deployment.store(flusher=False) as store:
        await append(store, delta, 4)
        await append(store, whole, 4)
        await store.checkpoint(whole, [said(n) for n in range(9)], run_of(whole))
    await snapshot.restore()
    looked = await mend(deployment, apply=False)
    assert looked.reason is not None and "no longer holds the entry" in looked.reason
    done = await mend(deployment)
    assert done.done
    assert done.parked >= 1
    deployment.verified = True
    async with deployment.store() as store:
        with pytest.raises(ThreadQuarantined):
            await store.load_messages(delta)
        assert await _known(store, delta) == [1]
        await store.checkpoint(delta, [1, 2, 3, 4], run_of(delta))
        assert await flushed(store, delta) == [1, 2, 3, 4]
        assert await store.load_messages(whole) == [said(n) for n in range(9)]


async def _purged(store: BufferedThreadStore, *threads: str) -> bool:
    left = [m.subject async for _, m in store.buffer.log.scan(threads=threads)]
    return len(left) == len(set(left))


async def test_an_older_copy_of_postgres_or_stream_is_told_by_the_generation(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await append(store, "t", 1)
        await store.force_flush("t")
    await pg(deployment, "UPDATE {s}.buffer_log SET epoch = 5")
    await refused(deployment, "the stream is an older one")
    assert (await mend(deployment)).epoch == 6
    async with deployment.store() as store:
        await append(store, "t", 2)
        assert await flushed(store, "t") == [1, 2]
    await pg(deployment, "UPDATE {s}.buffer_log SET epoch = 3")
    await refused(deployment, "Postgres is an older copy")
    assert (await mend(deployment)).epoch == 7
    async with deployment.store() as store:
        await append(store, "t", 3)
        assert await flushed(store, "t") == [1, 2, 3]


async def test_a_lost_hot_bucket_is_made_anew_and_needs_no_repair(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await append(store, "t", 1)
        await store.buffer.shared._stream.api(f"STREAM.UPDATE.KV_{deployment.log.bucket}", await _deletable(store))
        await store.buffer.shared._stream.api(f"STREAM.DELETE.KV_{deployment.log.bucket}")
        await append(store, "t", 2)
        await store.checkpoint("u", [1], run_of("u", 7))
        assert await store.load_run(run_of("u", 7).run_id) == run_of("u", 7)
        assert await flushed(store, "t") == [1, 2]
    assert await mend(deployment) == Repaired(reason=None)


async def _deletable(store: BufferedThreadStore) -> dict[str, Any]:
    info = await store.buffer.shared._stream.api(f"STREAM.INFO.{store.buffer.shared._stream.name}")
    config: dict[str, Any] = info["config"]
    return config


async def test_a_repair_that_was_interrupted_is_begun_anew(deployment: Deployment) -> None:
    """After an interruption at any step the log is refused, and a second repair ends like an uninterrupted one."""
    async with deployment.store() as store:
        await append(store, "t", 1)
        await store.force_flush("t")
    async with deployment.store(flusher=False) as store:
        await append(store, "t", 2)
        await append(store, "u", 1)
        deployment.verified = False
    await pg(deployment, "UPDATE {s}.buffer_log SET epoch = 1")

    class Stopped(Exception):
        pass

    remove = NatsLog.remove

    async def stop(self: NatsLog) -> None:
        raise Stopped

    NatsLog.remove = stop  # type: ignore[method-assign]
    try:
        with pytest.raises(Stopped):
            await mend(deployment)
    finally:
        NatsLog.remove = remove  # type: ignore[method-assign]
    await refused(deployment, "begun and not finished")
    done = await mend(deployment)
    assert (done.applied, done.parked, done.epoch) == (0, 0, 3)
    deployment.verified = True
    async with deployment.store() as store:
        assert await flushed(store, "t") == [1, 2]
        assert await flushed(store, "u") == [1]


async def test_a_repair_beside_a_live_flusher_is_refused(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_PULSE_S", 6.0)  # the flusher is in this process, which may stand still
    deployment.verified = False
    async with deployment.store() as store:
        await append(store, "t", 1)
        await store.force_flush("t")
        await pg(deployment, "UPDATE {s}.buffer_log SET epoch = 5")
        with pytest.raises(ConfigError, match="stop all of them"):
            await mend(deployment)


async def test_a_mistyped_name_is_not_taken_for_a_log_that_is_gone(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await append(store, "t", 1)
        await store.force_flush("t")
    wrong = {**where(deployment), "BUFSTORE_STREAM": f"{deployment.log.stream}x"}
    result = await asyncio.to_thread(bufstore_cli, "repair", "--apply", **wrong)
    assert result.code == 2
    assert deployment.log.stream in result.err
    async with deployment.store() as store:
        assert await store.load_messages("t") == [1]


async def test_what_the_store_refuses_is_parked_by_a_repair(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await append(store, "t", 1)
        await store.force_flush("t")
    async with deployment.store(flusher=False) as store:
        await append(store, "t", 2, "poison", 3)
        deployment.verified = False
    await pg(deployment, "ALTER TABLE {s}.messages ADD CHECK (position('poison' in encode(payload, 'escape')) = 0)")
    await pg(deployment, "UPDATE {s}.buffer_log SET epoch = 1")
    done = await mend(deployment)
    assert (done.applied, done.parked) == (1, 2)
    async with deployment.store() as store:
        assert await _known(store, "t") == [1, 2]
        (first, _) = await store.quarantine.page()
        assert first.cause
        with pytest.raises(NotFound):
            await store.quarantine.show(1 << 50)
