"""Servers that come back as an older copy: a Postgres failover without the last commits, and a restored log."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bufstore import (
    BufferedThreadStore,
    BufstoreError,
    Consistency,
    LogRolledBack,
    ReadNotFresh,
    StoreUnavailable,
    ThreadQuery,
)
from bufstore.buffer.places import group_of
from bufstore.embedded import Servers
from conftest import Deployment
from fault_proxy.proxy import FaultProxy
from helpers import eventually, fresh, healthy, query, run_of
from load import PATIENCE, Load

#: For calls that are not repeated: longer than the machine may pause.
_CALLS = PATIENCE | {"append_timeout_s": 5.0, "read_timeout_s": 5.0}


def _copy(folder: Path, to: Path) -> None:
    """Copy a folder with owners and modes, which Postgres checks."""
    subprocess.run(["cp", "-a", str(folder), str(to)], check=True)


def _put_back(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    _copy(copy, folder)


def _copy_of(server: Any, folder: Path, to: Path) -> Callable[[], None]:
    """Copy a server's data now, and return a function that kills the server and restarts it on the copy."""
    server.stop()
    _copy(folder, to)
    server.start()

    def put_back() -> None:
        server.kill()
        server.stop()
        _put_back(to, folder)
        server.start()

    return put_back


def _copy_of_postgres(servers: Servers, to: Path) -> Callable[[], None]:
    return _copy_of(servers.postgres, servers.postgres.data / "cluster", to)


def _copy_of_nats(servers: Servers, to: Path) -> Callable[[], None]:
    return _copy_of(servers.nats, servers.nats.data / "jetstream", to)


async def test_a_failover_to_a_copy_that_misses_commits_loses_nothing(own_servers: Servers, tmp_path: Path) -> None:
    """The missing commits were acked and reported as flushed; the log still has their entries."""
    deployment = Deployment(own_servers)
    async with deployment.store(**PATIENCE) as one, deployment.store(**PATIENCE) as two:
        load = Load()
        load.write(one, "one")
        load.write(two, "two")
        await load.acknowledged(100)
        fail_over = await asyncio.to_thread(_copy_of_postgres, own_servers, tmp_path / "copy")
        await load.acknowledged(200)
        flushed = await _cursors(deployment)
        await eventually(lambda: _passed(deployment, flushed))  # by then the copy misses commits
        await asyncio.to_thread(fail_over)
        await load.acknowledged(100)
        await load.end()
        await load.check(one)
        await healthy(one)


async def _cursors(deployment: Deployment) -> dict[int, int]:
    sql = f"SELECT partition, cursor_seq FROM {deployment.name}.buffer_partitions"
    return dict(await query(deployment.servers.postgres.dsn, sql))  # type: ignore[arg-type]


async def _passed(deployment: Deployment, before: dict[int, int]) -> bool:
    now = await _cursors(deployment)
    return any(seq > before.get(p, 0) for p, seq in now.items())


@pytest.mark.long  # as long as a cursor stands still
async def test_a_failover_is_noticed_where_nobody_writes_any_more(own_servers: Servers, tmp_path: Path) -> None:
    """No flush meets the older cursor. Still nothing that the copy misses is purged, and it is applied again."""
    deployment = Deployment(own_servers, failover_window_s=8.0)
    brief = {"append_timeout_s": 1.0, "read_timeout_s": 1.0, "retain_after_flush_s": 8.0}
    thread_id = fresh()
    async with deployment.store(**brief) as store:
        await eventually(lambda: _appended(store, thread_id, "a"))
        await store.force_flush(thread_id)
        fail_over = await asyncio.to_thread(_copy_of_postgres, own_servers, tmp_path / "copy")
        await eventually(lambda: _appended(store, thread_id, "b"))
        await store.force_flush(thread_id)
        await asyncio.to_thread(fail_over)

        async def applied_again() -> bool:
            try:
                found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
            except BufstoreError:
                return False
            return found == ["a", "b"]

        await eventually(applied_again)


@pytest.mark.long
async def test_a_copy_that_misses_more_than_the_log_still_has_is_noticed(own_servers: Servers, tmp_path: Path) -> None:
    deployment = Deployment(own_servers, failover_window_s=1.0)
    deployment.verified = False
    brief = {"append_timeout_s": 0.5, "read_timeout_s": 0.5, "retain_after_flush_s": 1.0}
    thread_id = fresh()
    async with deployment.store(**brief) as store:
        await eventually(lambda: _appended(store, thread_id, "a"))
        await store.force_flush(thread_id)
        applied = f"SELECT thread_id, applied_id FROM {deployment.name}.buffer_threads"
        before = await query(own_servers.postgres.dsn, applied)
        fail_over = await asyncio.to_thread(_copy_of_postgres, own_servers, tmp_path / "copy")
        for n in range(3):
            await eventually(lambda n=n: _appended(store, thread_id, f"{n}"))  # type: ignore[misc]
            await store.force_flush(thread_id)
            await eventually(lambda: _only_last(store, thread_id))
        await asyncio.to_thread(fail_over)
        await eventually(lambda: _troubled(store, "no longer holds the entry at the cursor"))
        # Nothing is overwritten until an operator decides.
        assert await query(own_servers.postgres.dsn, applied) == before


@pytest.mark.long  # fifteen seconds
async def test_a_postgres_restored_to_before_what_was_settled_counts_as_away_until_it_is_flushed_again(
    own_servers: Servers, tmp_path: Path
) -> None:
    """Settled entries are no longer looked up in the log: no process, running or new, may read the old state."""
    deployment = Deployment(own_servers, failover_window_s=4.0)
    brief = {"append_timeout_s": 2.0, "read_timeout_s": 2.0}
    delta, whole, other, new = fresh("delta"), fresh("whole"), fresh("other"), fresh("new")
    async with deployment.store(**brief) as store:
        for thread_id in (delta, whole):
            await eventually(lambda t=thread_id: _appended(store, t, "a"))  # type: ignore[misc]
        await store.force_flush_all()
    restore = await asyncio.to_thread(_copy_of_postgres, own_servers, tmp_path / "copy")
    async with deployment.store(flusher=False, **brief) as runs:
        async with deployment.store(**brief) as store:
            for thread_id in (delta, whole):
                await eventually(lambda t=thread_id: _appended(store, t, "b"))  # type: ignore[misc]
            below = await store.buffer.log.end(5.0)
            await eventually(lambda: _appended(store, other, "o"))
            await eventually(lambda: _settled(store, below))
        deployment.verified = False
        await runs.buffer.log.let_go({})
        await asyncio.to_thread(restore)
        async with deployment.store(flusher=False, **brief) as starts:
            for reader in (runs, starts):
                found = {
                    "fresh": await _outcome(reader.load_messages(delta)),
                    "strong": await _outcome(reader.load_messages(delta, consistency=Consistency.STRONG)),
                    "list": await _outcome(reader.query_threads(ThreadQuery())),
                    "write": await _outcome(reader.checkpoint_append(delta, ["c"], run_of(delta))),
                }
                assert all(isinstance(f, (StoreUnavailable, ReadNotFresh)) for f in found.values()), found
                await eventually(lambda r=reader: _says(r, delta, "flushed again"))  # type: ignore[misc]
                await eventually(lambda r=reader: _only_writes(r, "flushed again"))  # type: ignore[misc]
            # Entries that need nothing of Postgres are accepted, and count.
            await starts.checkpoint(whole, ["all", "new"], run_of(whole))
            await starts.checkpoint(new, ["n"], run_of(new))
            async with deployment.store(**brief) as store:
                assert await eventually(lambda: _messages(runs, delta)) == ["a", "b"]
                assert await eventually(lambda: _messages(starts, delta)) == ["a", "b"]
                assert await starts.load_messages(whole) == ["all", "new"]
                await runs.checkpoint_append(delta, ["c"], run_of(delta))
                await store.force_flush_all()
                assert await store.load_messages(delta) == ["a", "b", "c"]
                assert await store.load_messages(other) == ["o"]
                assert await store.load_messages(new) == ["n"]
                report = await store.verify()
                assert (report.ok, report.quarantined) == (True, 0), report.findings


@pytest.mark.long
async def test_a_postgres_restored_to_before_the_first_flush_is_noticed_where_the_log_is_purged(
    own_servers: Servers, tmp_path: Path
) -> None:
    """The restored cursors name no entry that the log could lack. A process without a flusher notices it too."""
    deployment = Deployment(own_servers, failover_window_s=2.0)
    deployment.verified = False
    brief = {"append_timeout_s": 1.0, "read_timeout_s": 1.0, "retain_after_flush_s": 2.0}
    thread_id = fresh()
    async with deployment.store(**brief):
        pass
    restore = await asyncio.to_thread(_copy_of_postgres, own_servers, tmp_path / "copy")
    async with deployment.store(flusher=False, **brief) as runs:
        async with deployment.store(**brief) as store:
            for n in range(3):
                await eventually(lambda n=n: _appended(store, thread_id, f"{n}"))  # type: ignore[misc]
                await store.force_flush(thread_id)
                await eventually(lambda: _only_last(store, thread_id))
            await eventually(lambda: _appended(store, fresh(), "o"))
            await store.force_flush_all()
            await eventually(lambda: _nothing(store, thread_id))
        assert await eventually(lambda: _messages(runs, thread_id)) == ["0", "1", "2"]
        await runs.buffer.log.let_go({})
        await asyncio.to_thread(restore)
        await eventually(lambda: _says(runs, thread_id, "nothing of it was flushed"))
        with pytest.raises(LogRolledBack, match="nothing of it was flushed"):
            async with deployment.store(**brief):
                pass


async def _nothing(store: BufferedThreadStore, thread_id: str) -> bool:
    return not [m.seq async for _, m in store.buffer.log.scan(threads=[thread_id])]


async def _outcome(call: Awaitable[object]) -> object:
    """Return the call's result, or its error when Postgres is away."""
    try:
        return await call
    except (StoreUnavailable, ReadNotFresh) as e:
        return e


async def _says(store: BufferedThreadStore, thread_id: str, why: str) -> bool:
    return why in str(await _outcome(store.load_messages(thread_id)))


async def _settled(store: BufferedThreadStore, position: int) -> bool:
    return await store.buffer.log.settled() > position


async def _messages(store: BufferedThreadStore, thread_id: str) -> Any:
    try:
        return await store.load_messages(thread_id)
    except (StoreUnavailable, ReadNotFresh):
        return None


async def _appended(store: BufferedThreadStore, thread_id: str, message: str) -> bool:
    try:
        await store.checkpoint_append(thread_id, [message], run_of(thread_id), idempotency_key=message)
    except BufstoreError:
        return False
    return True


async def _only_last(store: BufferedThreadStore, thread_id: str) -> bool:
    return len([m.seq async for _, m in store.buffer.log.scan(threads=[thread_id])]) == 1


async def _troubled(store: BufferedThreadStore, why: str) -> bool:
    return why in (await store.health()).flusher


async def _only_writes(store: BufferedThreadStore, why: str) -> bool:
    """Whether a store's health says that it takes writes, and why it does not read."""
    health = await store.health()
    return (health.can_write, health.can_read, health.ok) == (True, False, False) and why in health.read_trouble


async def test_a_log_restored_from_an_older_copy_takes_no_writes(own_servers: Servers, tmp_path: Path) -> None:
    """Neither a process that saw more of the log nor a new one writes: Postgres would take the entries for old ones."""
    deployment = Deployment(own_servers)
    deployment.verified = False
    old, new = fresh("old"), fresh("new")
    async with deployment.store(**_CALLS) as store:
        await store.checkpoint(old, ["a"], run_of(old))
        await store.force_flush(old)
        restore = await asyncio.to_thread(_copy_of_nats, own_servers, tmp_path / "copy")
        for n in range(5):
            await eventually(lambda n=n: _appended(store, old, f"{n}"))  # type: ignore[misc]
        await store.force_flush(old)
        await asyncio.to_thread(restore)

        async def refused() -> bool:
            try:
                await store.checkpoint(new, ["b"], run_of(new))
            except LogRolledBack:
                return True
            except BufstoreError:
                return False
            raise AssertionError("a log that went back has taken a write")

        await eventually(refused)
    with pytest.raises(LogRolledBack, match=" ends at "):
        async with deployment.store(**_CALLS) as store:
            await store.checkpoint(new, ["b"], run_of(new))


async def test_a_log_that_went_back_and_grew_again_is_refused_by_who_has_seen_more(
    own_servers: Servers, tmp_path: Path
) -> None:
    """Another process has written to the restored log first, so that it is as long as before."""
    deployment = Deployment(own_servers)
    deployment.verified = False
    mine, other = fresh("mine"), fresh("other")
    server = own_servers.nats
    async with FaultProxy("127.0.0.1", server.port, protocol="nats") as proxy:
        url = server.url.replace(f":{server.port}", f":{proxy.port}")
        async with deployment.store(nats=url, flusher=False, **_CALLS) as store:
            await store.checkpoint(mine, ["a"], run_of(mine))
            restore = await asyncio.to_thread(_copy_of_nats, own_servers, tmp_path / "copy")
            await eventually(lambda: _appended(store, mine, "lost"))
            proxy.refuse = True
            await asyncio.to_thread(restore)
            async with deployment.store(flusher=False, **_CALLS) as faster:
                end = await store_end(faster)
                await faster.checkpoint(other, ["b"], run_of(other))
                proxy.refuse = False

                async def refused() -> bool:
                    try:
                        await store.checkpoint_append(mine, ["c"], run_of(mine))
                    except LogRolledBack as e:
                        return "went back" in str(e)
                    except BufstoreError:
                        return False
                    raise AssertionError("a log that went back has taken a write")

                await eventually(refused)
                assert await store_end(faster) == end + 1


async def store_end(store: BufferedThreadStore) -> int:
    return group_of(await store.buffer.log.end(5.0))


async def test_writers_go_on_when_the_log_was_purged_by_hand(deployment: Deployment) -> None:
    deployment.verified = False
    thread_id = fresh()
    async with deployment.store(**_CALLS) as store, deployment.store(flusher=False, **_CALLS) as app:
        await store.checkpoint(thread_id, ["a"], run_of(thread_id))
        await app.checkpoint(thread_id, ["a", "b"], run_of(thread_id))
        await store.force_flush(thread_id)
        await store.buffer.session.stream.api(f"STREAM.PURGE.{deployment.log.stream}")
        for writer in (app, store):
            other = fresh()
            await eventually(lambda w=writer, t=other: _appended(w, t, "c"))  # type: ignore[misc]
            await eventually(lambda w=writer: _appended(w, thread_id, f"{id(w)}"))  # type: ignore[misc]
            assert await writer.load_messages(other) == ["c"]
        await store.force_flush(thread_id)
        found: Any = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
        assert found == ["a", "b", f"{id(app)}", f"{id(store)}"]


@pytest.mark.long
async def test_log_and_postgres_restored_from_copies_meet_where_the_log_ends(
    own_servers: Servers, tmp_path: Path
) -> None:
    """The copy of Postgres is older: entries of the log's copy above its cursors are applied again."""
    deployment = Deployment(own_servers)
    thread_id = fresh()
    async with deployment.store(**PATIENCE) as store:
        await eventually(lambda: _appended(store, thread_id, "a"))
        await store.force_flush(thread_id)
        fail_over = await asyncio.to_thread(_copy_of_postgres, own_servers, tmp_path / "postgres")
        for n in range(5):
            await eventually(lambda n=n: _appended(store, thread_id, f"{n}"))  # type: ignore[misc]
        await store.force_flush(thread_id)
        restore = await asyncio.to_thread(_copy_of_nats, own_servers, tmp_path / "nats")
        await eventually(lambda: _appended(store, thread_id, "gone with both copies"))
        await store.force_flush(thread_id)
    await asyncio.to_thread(fail_over)
    await asyncio.to_thread(restore)
    async with deployment.store(**PATIENCE) as store:
        await store.force_flush(thread_id)
        found: Any = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
        assert found == ["a", "0", "1", "2", "3", "4"]
