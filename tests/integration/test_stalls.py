"""State that other processes leave behind, lose or forge delays nobody and loses nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeout

from bufstore import Consistency, PostgresThreadStore, ThreadQuarantined
from bufstore.buffer.chain import Watermark
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.places import group_of
from bufstore.buffer.ports.ledger import Cursor, Decision, FlushFailed, NotOwner
from bufstore.jetstream.errors import ConsumerMissing
from bufstore.jetstream.questions import Questions
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.testing.applying import change
from bufstore.threads.lineage import new_parent
from bufstore.threads.model import ThreadChange
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said

#: These tests measure time or wait for timeouts.
pytestmark = pytest.mark.alone


async def test_a_process_that_died_in_the_middle_of_everything_holds_nobody_up(deployment: Deployment) -> None:
    """The dead process left a change of lineage, a run id without a checkpoint, and its share of the partitions."""
    async with deployment.store(append_timeout_s=5.0) as store:
        a, b = fresh(), fresh()
        for thread_id in (a, b):
            await store.save_thread(thread_id)
        seq, _ = await store.buffer.shared.lineage(5)
        await store.buffer.shared.put_lineage(msgspec.msgpack.encode([7, new_parent(a, b), False]), seq, 5)
        await store.buffer.shared.claim_run(run_of(a).run_id, a, 5)
        await store.buffer.shared.renew_member("0dead", 12)
        await store.buffer.shared.announce()

        async def gave_up() -> bool:
            assert store.buffer.flusher is not None
            return len(store.buffer.flusher.state.partitions) < deployment.log.partitions

        await eventually(gave_up)
        threads = [a, b, *(fresh() for _ in range(40))]
        began = time.monotonic()
        await asyncio.gather(*(store.checkpoint(t, [said(0)], run_of(t)) for t in threads))
        assert [await store.load_messages(t) for t in threads] == [[said(0)]] * len(threads)
        assert time.monotonic() - began < 9, "nobody waits for what the dead one held"
        # The dead process's partitions are taken over and flushed when its lease has expired.
        await store.force_flush_all(timeout_s=30)
        for t in threads:
            assert await store.load_messages(t, consistency=Consistency.EVENTUAL) == [said(0)]
        await store.set_parent(b, None)  # completes the dead process's change first
        thread = await store.load_thread(a)
        assert thread is not None
        assert thread.parent_thread_id == b


async def test_acks_move_nothing_and_each_owner_has_a_consumer_of_its_own(deployment: Deployment) -> None:
    """Entries are acknowledged but not flushed. The next owner still gets them: the cursor is in Postgres."""
    async with deployment.store(flush_interval_s=600) as store:
        thread_id = fresh()
        stream = deployment.log.stream
        messages: list[Any] = []
        for n in range(5):
            messages.append(said(n))
            receipt = await store.checkpoint(thread_id, messages, run_of(thread_id))

        async def consumers() -> list[str]:
            return (await store.buffer.session.stream.api(f"CONSUMER.NAMES.{stream}"))["consumers"] or []

        async def acknowledged() -> bool:
            """Acknowledge all groups; true once all are delivered and the server counts none as pending."""
            names = await consumers()
            done = False
            # While partitions are still being taken, a consumer may end at any time, even during the request.
            with suppress(ConsumerMissing, NoRespondersError, NatsTimeout):
                for name in names:
                    info = await store.buffer.session.stream.api(f"CONSUMER.INFO.{stream}.{name}")
                    last = group_of(receipt.thread_seq)
                    if info["delivered"]["stream_seq"] >= last:
                        reply = f"1.{last}.{info['delivered']['consumer_seq']}.{time.time_ns()}.0"
                        ack = f"$JS.ACK.{stream}.{name}.{reply}"
                        await store.buffer.session.connection.client().request(ack, b"+ACK", timeout=1)
                        found = await store.buffer.session.stream.api(f"CONSUMER.INFO.{stream}.{name}")
                        done = found["num_ack_pending"] == 0
            return done

        await eventually(acknowledged)
        # Another owner has the partitions for a moment, so this owner's memory is void.
        await query(deployment.servers.postgres.dsn, f"UPDATE {deployment.name}.buffer_partitions SET term = term + 1")
        await store.force_flush(thread_id)
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == messages

        async def two() -> bool:
            return len(await consumers()) == 2

        async with deployment.store():
            await eventually(two)


async def test_an_entry_that_vanished_from_the_log_stops_its_own_thread_only(deployment: Deployment) -> None:
    deployment.verified = False
    hurt, whole = fresh(), fresh()
    async with deployment.store(flusher=False) as writer:
        seqs = []
        for n in range(4):
            await writer.checkpoint_append(whole, [said(n)], run_of(whole, n))
            receipt = await writer.checkpoint_append(hurt, [said(n)], run_of(hurt, n))
            seqs.append(receipt.thread_seq)
        await writer.buffer.session.stream.api(f"STREAM.MSG.DELETE.{deployment.log.stream}", {"seq": group_of(seqs[2])})
    async with deployment.store() as store:
        await store.force_flush_all()
        for level in Consistency:
            assert await store.load_messages(whole, consistency=level) == [said(n) for n in range(4)]
        with pytest.raises(ThreadQuarantined):
            await store.load_messages(hurt)
        assert await store.load_messages(hurt, quarantined="known") == [said(0), said(1)]
        page = await store.query_threads()
        assert ({t.thread_id for t in page.threads}, page.quarantined) == ({hurt, whole}, {hurt})
        await store.checkpoint(hurt, [said(9)], run_of(hurt))
        assert await store.load_messages(hurt, consistency=Consistency.STRONG) == [said(9)]


# -- the flush transaction itself ------------------------------------------------------------------------------


class Slow(PostgresThreadStore):
    """A store whose next batch waits inside the transaction until it may go on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.entered, self.go = asyncio.Event(), asyncio.Event()

    async def apply(self, connection: Any, batch: Sequence[ThreadChange]) -> None:
        self.entered.set()
        await self.go.wait()
        await super().apply(connection, batch)


class Two:
    """Two owners' ledgers on the same tables; the first one's store waits."""

    def __init__(self, deployment: Deployment) -> None:
        dsn, schema = deployment.servers.postgres.dsn, deployment.name
        self.slow = Slow(dsn, schema=schema, pool_size=2)
        self.plain = PostgresThreadStore(dsn, schema=schema, pool_size=2)
        # Postgres ends a transaction that stands still for two thirds of the lease: these stand still longer.
        self.first, self.second = (PostgresLedger(dsn, s, schema=schema, lease_s=60) for s in (self.slow, self.plain))

    async def __aenter__(self) -> Two:
        for part in (self.slow, self.plain, self.first, self.second):
            await part.open()
        await self.plain.setup()
        await self.first.setup()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.slow.go.set()
        for part in (self.slow, self.plain, self.first, self.second):
            await part.aclose()


async def _flush(ledger: PostgresLedger, cursor: Cursor, thread_id: str, seq: int) -> Mapping[str, Watermark]:
    """Flush one entry with the id `seq`, and return the watermarks that the flush found."""
    found: dict[str, Watermark] = {}

    def decide(rows: Mapping[str, Watermark]) -> Decision:
        found.update(rows)
        before = rows.get(thread_id, Watermark())
        batch = [change(thread_id, before.version, [seq], run_of(thread_id))]
        after = Cursor(cursor.partition, cursor.term, seq, seq)
        return Decision(batch, {thread_id: Watermark(seq, seq, before.version + 1, b"")}, cursors=[after])

    await ledger.flush([cursor], [thread_id], decide)
    return found


async def test_two_flushes_of_one_new_thread_take_turns(deployment: Deployment) -> None:
    """There is no row to lock yet, and each must see what the other has written."""
    async with Two(deployment) as two:
        thread_id = fresh()
        (one,), (other,) = await two.first.take([0], "a"), await two.second.take([1], "b")
        held = asyncio.create_task(_flush(two.first, one, thread_id, 5))
        await asyncio.wait_for(two.slow.entered.wait(), 10)
        with pytest.raises(FlushFailed) as waits:
            await _flush(two.second, other, thread_id, 6)
        assert waits.value.verdict is Verdict.LOCKED
        two.slow.go.set()
        assert (await held).get(thread_id) == Watermark()
        assert (await _flush(two.second, other, thread_id, 6))[thread_id] == Watermark(5, 5, 1, b"")
        assert await two.plain.load_messages(thread_id) == [5, 6]


async def test_an_owner_that_was_replaced_commits_nothing_however_late_it_comes(deployment: Deployment) -> None:
    async with Two(deployment) as two:
        thread_id = fresh()
        (old,) = await two.first.take([0], "a")
        (new,) = await two.second.take([0], "b")
        assert new.term == old.term + 1
        two.slow.go.set()
        with pytest.raises(NotOwner):
            await _flush(two.first, old, thread_id, 5)
        assert await two.plain.load_thread(thread_id) is None
        assert await two.second.watermark(thread_id) == Watermark()
        await _flush(two.second, new, thread_id, 5)
        with pytest.raises(NotOwner):
            await _flush(two.first, old, thread_id, 6)
        assert await two.plain.load_messages(thread_id) == [5]


async def test_an_owner_that_stops_inside_its_transaction_is_not_overtaken(deployment: Deployment) -> None:
    """The successor gets that partition after the transaction's end, and starts behind its commit; others at once."""
    async with Two(deployment) as two:
        thread_id = fresh()
        (old,) = await two.first.take([0], "a")
        held = asyncio.create_task(_flush(two.first, old, thread_id, 5))
        await asyncio.wait_for(two.slow.entered.wait(), 10)
        assert [cursor.partition for cursor in await two.second.take([0, 1], "b")] == [1]
        two.slow.go.set()
        await held
        (new,) = await two.second.take([0], "b")
        assert (new.term, new.seq, new.id) == (old.term + 1, 5, 5)
        assert (await _flush(two.second, new, thread_id, 6))[thread_id].flushed_seq == 5
        assert await two.plain.load_messages(thread_id) == [5, 6]


async def test_a_write_whose_answer_came_while_the_loop_was_busy_is_stored(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its time was over before the answer was read, and the caller was told that nobody knows."""
    loop, ask = asyncio.get_running_loop(), Questions.ask

    def ask_and_compute(questions: Questions, subjects: Sequence[str], *more: Any) -> str:
        if subjects[0].startswith(deployment.name):
            loop.call_soon(time.sleep, 1.2)
        return ask(questions, subjects, *more)

    async with deployment.store(append_timeout_s=1.0) as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        with monkeypatch.context() as busy:
            busy.setattr(Questions, "ask", ask_and_compute)
            receipt = await store.checkpoint("t", [said(0), said(1)], run_of("t"))
        assert not receipt.repeated


@pytest.mark.parametrize("call", ["read", "list", "run", "checkpoint", "append"])
async def test_a_call_during_which_the_loop_stands_still_past_its_time_ends_well(
    deployment: Deployment, call: str
) -> None:
    """Regression: an app that computed for long on its loop had its other calls fail, as if servers were away."""
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush_all()
    async with deployment.store(append_timeout_s=1.0, read_timeout_s=1.0) as store:
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "read": lambda: store.load_messages("t"),
            "list": store.query_threads,
            "run": lambda: store.load_run("unknown"),
            "checkpoint": lambda: store.checkpoint("t", [said(0), said(1)], run_of("t", 1)),
            "append": lambda: store.append_messages("t", [said(1)]),
        }
        calling = asyncio.ensure_future(calls[call]())
        await asyncio.sleep(0)
        time.sleep(1.3)  # noqa: ASYNC251 - as an app's code does
        await calling
