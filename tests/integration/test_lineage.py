"""Edits and changes of lineage on a buffered store, across instances and before a flush."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bufstore import (
    AlreadyExists,
    BufferedThreadStore,
    Children,
    ConfigError,
    Consistency,
    LineageError,
    LogUnavailable,
    MessageQuery,
    NotFound,
    OutcomeUnknown,
    Run,
    StoreUnavailable,
    ThreadMetadata,
    ThreadQuery,
    TooLarge,
    VersionConflict,
    Visibility,
)
from bufstore.embedded import Servers
from bufstore.jetstream.messages import AppendUnknown, Outgoing
from bufstore.threads.lineage import deletion, new_parent
from conftest import Deployment
from helpers import eventually, fresh, let_all_go, query, run_of, said


async def test_edits_are_read_before_they_are_flushed(deployment: Deployment) -> None:
    async with deployment.store(flush_interval_s=600) as store, deployment.store(flusher=False) as other:
        thread_id = fresh()
        run = run_of(thread_id)
        await store.checkpoint(thread_id, [said(0), said(1)], run)
        await other.save_thread(thread_id, ThreadMetadata(title="t"))
        await store.save_thread_state(thread_id, [1])
        await other.delete_messages(thread_id, ["m0"])
        for reader in (store, other):
            found = await reader.load_checkpoint(thread_id)
            assert found is not None
            assert (found.messages, found.state, found.thread.metadata.title) == ([said(1)], [1], "t")
            assert await reader.load_run(run.run_id) == run
            assert await reader.load_checkpoint(thread_id, consistency=Consistency.EVENTUAL) is None
            assert await reader.load_run(run.run_id, consistency=Consistency.EVENTUAL) is None
        await store.delete_thread(thread_id)
        for reader in (store, other):
            assert await reader.load_checkpoint(thread_id) is None
            assert await reader.load_run(run.run_id) is None
        await other.checkpoint(thread_id, [said(2)], run)
        assert await store.load_messages(thread_id) == [said(2)]
        await store.force_flush(thread_id)
        found = await store.load_checkpoint(thread_id, consistency=Consistency.EVENTUAL)
        assert found == await other.load_checkpoint(thread_id)
        assert found is not None
        assert (found.messages, found.state, found.thread.metadata.title) == ([said(2)], None, None)


async def test_an_edit_is_not_lost_to_writers_on_other_instances(deployment: Deployment) -> None:
    async with deployment.store() as a, deployment.store() as b:
        thread_id = fresh()
        await a.checkpoint(thread_id, [], run_of(thread_id))

        async def edit(store: BufferedThreadStore, name: str) -> None:
            for n in range(10):
                await store.append_messages(thread_id, [{"id": f"{name}{n}"}])
                await store.save_thread_state(thread_id, [name, n])

        await asyncio.gather(edit(a, "a"), edit(b, "b"), edit(a, "c"))
        found = await b.load_checkpoint(thread_id)
        assert found is not None
        assert sorted(m["id"] for m in found.messages) == sorted(f"{s}{n}" for s in "abc" for n in range(10))
        assert found.state[1] == 9


async def test_a_deletion_stays_when_everything_is_delivered_again(deployment: Deployment) -> None:
    thread_id = fresh()
    async with deployment.store() as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.delete_thread(thread_id)
        await store.force_flush(thread_id)
    # Set the cursors back: the new owner is delivered the whole log again.
    await query(
        deployment.servers.postgres.dsn,
        f"UPDATE {deployment.name}.buffer_partitions SET cursor_seq = 0, cursor_id = 0",
    )
    async with deployment.store() as store:
        other = fresh()
        await store.checkpoint(other, [1], run_of(other))
        await store.force_flush_all()
        assert await store.load_thread(thread_id, consistency=Consistency.EVENTUAL) is None
        assert await store.load_thread(thread_id) is None


async def test_parents_are_checked_on_what_is_written_and_not_on_what_is_flushed(deployment: Deployment) -> None:
    async with deployment.store(flush_interval_s=600, consistency=Consistency.EVENTUAL) as store:
        parent, child = fresh(), fresh()
        await store.checkpoint(parent, [], run_of(parent))
        await store.checkpoint(child, [], run_of(child, parent_thread_id=parent))
        assert await store.load_thread(child) is None, "not flushed"
        with pytest.raises(LineageError):
            await store.checkpoint(parent, [], run_of(parent, 1, parent_thread_id=child))
        with pytest.raises(LineageError):
            await store.set_parent(parent, child)


async def test_tombstones_are_read_by_pages(deployment: Deployment) -> None:
    async with deployment.store() as store:
        ledger = store.buffer.ledger
        names = sorted(fresh() for _ in range(5))
        for name in names:
            await store.save_thread(name)
            await store.delete_thread(name)
        await store.force_flush_all()
        end = 1 + max([(await ledger.watermark(name)).flushed_seq for name in names])
        found: list[str] = []
        while page := await ledger.tombstones(end, found[-1] if found else "", 2):
            found += [name for _, name in page]
            assert [seq for seq, _ in page] == [(await ledger.watermark(name)).flushed_seq for _, name in page]
        assert found == names
        last = (await ledger.watermark(names[-1])).flushed_seq
        assert names[-1] not in [name for _, name in await ledger.tombstones(last, "", 10)]


async def test_what_builds_on_a_tombstone_that_is_buried_meanwhile_is_flushed(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment.store() as one, deployment.store(flusher=False) as two:
        await one.checkpoint("dead", [1], run_of("dead"))
        await one.delete_thread("dead")
        partition = one.buffer.subjects.partition("dead")
        await one.save_thread(next(t for n in range(99) if one.buffer.subjects.partition(t := f"o{n}") == partition))
        await one.force_flush_all()
        await let_all_go(one)
        stream = two.buffer.session.stream
        ledger, publish = one.buffer.ledger, stream.publish
        tombstone = (await ledger.watermark("dead")).flushed_seq, "dead"

        async def burying(message: Any, timeout_s: float) -> int:
            monkeypatch.undo()
            await one.buffer.log.fence(tombstone[0] + 1)
            await ledger.bury([tombstone])
            assert (await ledger.watermark("dead")).flushed_seq == 0
            return await publish(message, timeout_s)

        monkeypatch.setattr(stream, "publish", burying)
        await two.checkpoint_append("dead", [2], run_of("dead"))
        assert await one.load_messages("dead", consistency=Consistency.STRONG) == [2]
        assert await ledger.quarantined() == 0


@pytest.mark.long  # ten seconds
async def test_a_tombstone_goes_when_the_log_has_purged_past_it(deploy: Callable[..., Deployment]) -> None:
    """A tombstone stays before that, and when its thread is written again or named in quarantine."""
    deployment = deploy(failover_window_s=8.0)
    short = {"retain_after_flush_s": 8, "append_timeout_s": 4.0, "read_timeout_s": 4.0}
    names = f"SELECT thread_id FROM {deployment.name}.buffer_threads ORDER BY thread_id"

    async def rows() -> list[str]:
        return [t for (t,) in await query(deployment.servers.postgres.dsn, names)]

    async with deployment.store(**short) as store:
        dead, parked, back = "a dead", "b parked", "c back"
        for thread_id in (dead, parked, back):
            await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.delete_thread(thread_id)
        await store.checkpoint(back, [2], run_of(back))
        await store.force_flush_all()
        assert await rows() == [dead, parked, back]
        await query(
            deployment.servers.postgres.dsn,
            f"INSERT INTO {deployment.name}.buffer_quarantine (seq, hash, thread_id, cause, messages) "
            f"VALUES (1, '', '{parked}', '', '')",
        )
        # The entry at a cursor stays, so every partition gets a later entry.
        for n in range(40):
            await store.checkpoint(f"d{n:02}", [n], run_of(f"d{n:02}"))

        async def buried() -> bool:
            return dead not in await rows()

        await eventually(buried, 60)
        assert (await rows())[:2] == [parked, back]
        await store.checkpoint(dead, [3], run_of(dead))
        await store.force_flush_all()
        assert await store.load_messages(dead, consistency=Consistency.EVENTUAL) == [3]
        await query(deployment.servers.postgres.dsn, f"DELETE FROM {deployment.name}.buffer_quarantine")


async def test_lineage_holds_across_instances(deployment: Deployment) -> None:
    async with deployment.store() as a, deployment.store() as b:
        for _ in range(3):
            x, y = fresh(), fresh()
            for thread_id in (x, y):
                await a.save_thread(thread_id)
            outcomes = await asyncio.gather(a.set_parent(x, y), b.set_parent(y, x), return_exceptions=True)
            assert sum(isinstance(o, LineageError) for o in outcomes) == 1
            outcomes = await asyncio.gather(
                a.delete_thread(x, children=Children.CASCADE), b.set_parent(y, x), return_exceptions=True
            )
            found = [await a.load_thread(t) for t in (x, y)]
            assert found[0] is None
            assert found[1] is None or found[1].parent_thread_id is None


async def test_a_write_that_another_instance_has_overtaken_sets_no_parent(deployment: Deployment) -> None:
    """Regression: whether it repeats another, or is refused, was judged by what its own instance had written last."""
    async with deployment.store() as first, deployment.store(flusher=False) as second:
        parent, whole, appended, refused = fresh("parent"), fresh("whole"), fresh("appended"), fresh("refused")
        await first.checkpoint(parent, [], run_of(parent))
        for thread_id in (whole, appended, refused):
            await second.checkpoint(thread_id, [said(0)], run_of(thread_id), idempotency_key="second's")
        for thread_id, messages in ((whole, [said(0), said(1)]), (appended, [said(1)])):
            run = run_of(thread_id, 1, parent_thread_id=parent)
            write = "checkpoint" if thread_id == whole else "checkpoint_append"
            await getattr(first, write)(thread_id, messages, run, idempotency_key="k")
            await first.set_parent(thread_id, None)
            assert (await getattr(second, write)(thread_id, messages, run, idempotency_key="k")).repeated
        await first.checkpoint_append(refused, [said(1)], run_of(refused))
        run = run_of(refused, 1, parent_thread_id=parent)
        with pytest.raises(VersionConflict):
            await second.checkpoint_append(refused, [said(2)], run, expected_version=1)
        await first.checkpoint_append(refused, [said(3)], run_of(refused))
        with pytest.raises(AlreadyExists):
            await second.checkpoint_append(refused, [said(3)], run)
        for thread_id in (whole, appended, refused):
            thread = await first.load_thread(thread_id)
            assert thread is not None
            assert thread.parent_thread_id is None


async def test_a_checkpoint_that_is_too_large_or_of_anothers_run_sets_no_parent(deployment: Deployment) -> None:
    async with deployment.store() as store:
        parent, thread_id = fresh("parent"), fresh()
        run = run_of(thread_id, 1, parent_thread_id=parent)
        await store.checkpoint(parent, [], run_of(parent))
        await store.checkpoint(thread_id, [], run_of(thread_id))
        with pytest.raises(AlreadyExists):
            await store.checkpoint(thread_id, [said(1)], msgspec.structs.replace(run, run_id=run_of(parent).run_id))
        with pytest.raises(TooLarge):
            await store.checkpoint(thread_id, ["x" * deployment.log.entry_bytes_max], run)
        thread = await store.load_thread(thread_id)
        assert thread is not None
        assert thread.parent_thread_id is None
        with pytest.raises(LineageError):
            await store.checkpoint(thread_id, [said(1)], run_of(thread_id, 2, parent_thread_id=fresh()))
        await store.checkpoint(
            parent, [said(1)], msgspec.structs.replace(run_of(parent), run_id=run_of(thread_id, 2).run_id)
        )


async def test_parents_named_on_two_instances_at_once_make_no_cycle(deployment: Deployment) -> None:
    async with deployment.store() as a, deployment.store() as b:
        for _ in range(5):
            x, y = fresh(), fresh()
            for thread_id in (x, y):
                await a.checkpoint(thread_id, [], run_of(thread_id))
            outcomes = await asyncio.gather(
                a.checkpoint(x, [1], run_of(x, 1, parent_thread_id=y)),
                b.checkpoint(y, [1], run_of(y, 1, parent_thread_id=x)),
                return_exceptions=True,
            )
            assert sorted(type(o).__name__ for o in outcomes) == ["LineageError", "Receipt"]
            threads = [await b.load_thread(t) for t in (x, y)]
            assert [t.parent_thread_id for t in threads if t is not None].count(None) == 1


async def test_a_deletion_whose_process_died_before_it_was_marked_takes_nothing_that_was_written_since(
    deployment: Deployment,
) -> None:
    async with deployment.store() as store:
        deleted, kept, other = fresh(), fresh(), fresh()
        for thread_id in (deleted, kept, other):
            await store.checkpoint(thread_id, [1], run_of(thread_id))
        bases = {t: (await store.buffer.reads.joined(t))[0].watermark.applied_id for t in (deleted, kept)}
        # One deletion was carried out and its thread written again; the other was not begun before its next write.
        await store.delete_thread(deleted)
        for thread_id in (deleted, kept):
            await store.checkpoint(thread_id, [2], run_of(thread_id))
            seq, _ = await store.buffer.shared.lineage(5)
            begun = deletion(thread_id, Children.REJECT)
            await store.buffer.shared.put_lineage(msgspec.msgpack.encode([7, begun, False, bases[thread_id]]), seq, 5)
            await store.set_parent(other, thread_id)
            assert await store.load_messages(thread_id) == [2]
            assert msgspec.msgpack.decode((await store.buffer.shared.lineage(5))[1])[2], "it stops nobody else"


@pytest.mark.parametrize("kind", ["parent", "detach"])
async def test_what_another_began_is_finished_first(deployment: Deployment, kind: str) -> None:
    """The other process died right after it stored its record."""
    async with deployment.store() as store:
        top, middle, low = fresh(), fresh(), fresh()
        for thread_id in (top, middle, low):
            await store.save_thread(thread_id)
        await store.set_parent(low, middle)
        begun = new_parent(middle, top) if kind == "parent" else deletion(middle, Children.DETACH)
        seq, _ = await store.buffer.shared.lineage(5)
        await store.buffer.shared.put_lineage(msgspec.msgpack.encode([7, begun, False]), seq, 5)
        if kind == "parent":
            with pytest.raises(LineageError):
                await store.set_parent(top, low)
            thread = await store.load_thread(middle)
            assert thread is not None
            assert thread.parent_thread_id == top
        else:
            with pytest.raises(NotFound):
                await store.set_parent(middle, top)
            thread = await store.load_thread(low)
            assert thread is not None
            assert thread.parent_thread_id is None


async def test_a_thread_in_quarantine_can_be_deleted(deployment: Deployment) -> None:
    async with deployment.store() as store:
        thread_id = fresh()
        run = run_of(thread_id)
        await store.checkpoint(thread_id, [said(0)], run)
        await store.buffer.log.publish(Outgoing(store.buffer.subjects.of(thread_id), b"garbage"), 5)

        async def parked() -> bool:
            return await store.quarantined() > 0

        await eventually(parked)
        await store.delete_thread(thread_id)
        assert await store.load_thread(thread_id) is None
        await store.checkpoint_append(thread_id, [said(1)], run, expected_version=0)
        assert await store.load_messages(thread_id) == [said(1)]


class CheckpointsOnly:
    """An app's own store, written before edits existed."""

    def __init__(self, inner: Any) -> None:
        self.load_checkpoint, self.load_run, self.apply = inner.load_checkpoint, inner.load_run, inner.apply


async def test_a_store_for_checkpoints_refuses_what_it_would_leave_out(deployment: Deployment) -> None:
    async with deployment.inner() as inner:
        await inner.setup()
        dsn = deployment.servers.postgres.dsn
        async with deployment.store(CheckpointsOnly(inner), postgres=dsn, schema=deployment.name) as store:
            thread_id = fresh()
            await store.checkpoint(thread_id, [said(0), {"visibility": "internal"}], run_of(thread_id))
            for call in (
                store.save_thread(thread_id),
                store.save_thread_state(thread_id, 1),
                store.create_run(Run(run_id=fresh(), thread_id=thread_id)),
                store.delete_thread(thread_id),
                store.query_threads(),
            ):
                with pytest.raises(ConfigError):
                    await call
            page = await store.query_messages(thread_id, MessageQuery(visibility=Visibility.INTERNAL))
            assert [r.seq for r in page.records] == [2]
            assert await store.load_message(thread_id, "m0") is not None
            assert [r.seq for r in await store.load_message_range(thread_id, 2, 9)] == [2]


async def test_a_list_without_postgres_says_so(own_servers: Servers) -> None:
    deployment = Deployment(own_servers)
    async with deployment.store(read_timeout_s=5) as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.query_threads(ThreadQuery(id_prefix=thread_id))
        own_servers.postgres.stop()
        with pytest.raises(StoreUnavailable):
            await store.query_threads(consistency=Consistency.EVENTUAL)
        own_servers.postgres.start()


async def test_a_deletion_that_took_its_place_is_not_said_to_have_failed(deployment: Deployment) -> None:
    """Another instance's change may carry out the deletion at any time, so its outcome is unknown."""
    async with deployment.store() as a, deployment.store(flusher=False) as b:
        thread_id, other = fresh(), fresh()
        for t in (thread_id, other):
            await a.checkpoint(t, [said(0)], run_of(t))

        async def fail(*_: object) -> Any:
            raise LogUnavailable("NATS is lost between the record and the edit")

        a._lineage._carry_out = fail  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknown):
            await a.delete_thread(thread_id)
        assert await b.load_messages(thread_id) == [said(0)]
        await b.delete_thread(other)
        assert await b.load_messages(thread_id) is None


@pytest.mark.parametrize("stored", [True, False])
async def test_a_deletion_that_was_answered_is_not_done_again(deployment: Deployment, stored: bool) -> None:
    """The mark that it is done gets lost, or its answer; the next change must not delete what was written since."""
    async with deployment.store() as a, deployment.store(flusher=False) as b:
        thread_id, other = fresh(), fresh()
        for t in (thread_id, other):
            await a.checkpoint(t, [said(0)], run_of(t))
        put, calls = a.buffer.shared.put_lineage, 0

        async def put_badly(record: bytes, expected: int, timeout_s: float) -> int:
            nonlocal calls
            calls += 1
            if calls != 2:
                return await put(record, expected, timeout_s)
            if stored:
                await put(record, expected, timeout_s)
            raise AppendUnknown("the test dropped the mark or its answer")

        a.buffer.shared.put_lineage = put_badly  # type: ignore[method-assign]
        await a.delete_thread(thread_id)
        assert calls > 1
        await a.checkpoint(thread_id, [said(1)], run_of(thread_id, 1))
        await b.delete_thread(other)
        assert await b.load_messages(thread_id) == [said(1)]
