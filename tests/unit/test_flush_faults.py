"""A fault of one thread or partition delays only that one, and a fault that concerns all parks nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from bufstore.buffer.chain import Watermark
from bufstore.buffer.flush.blame import THREADS_MIN
from bufstore.buffer.flush.flusher_state import FlusherState
from bufstore.buffer.flush.verdict import Verdict, verdict
from bufstore.buffer.ports.ledger import Cursor, Decision, FlushFailed
from bufstore.errors import (
    Closed,
    ConfigError,
    LogRolledBack,
    LogUnavailable,
    MalformedEntry,
    StoreMisconfigured,
    StoreUnavailable,
)
from bufstore.jetstream.messages import AppendUnknown
from bufstore.threads import payload
from bufstore.threads.payload import AnyPayload
from thorough import seldom
from unit.test_flusher import SUBJECTS, Bench, FeedLog, bench, failing, other_partition

GOOD = [f"good{n}" for n in range(20)]
ABOUT_A_STATEMENT = ("P0001", "54000", "44000", "21000", "38001", "XX000", "42501", "42P01", "99999", "25P02", "55P03")


def refused(state: str) -> FlushFailed:
    return FlushFailed(f"Postgres says no (SQLSTATE {state})", verdict(state), cause=state)


async def write(it: Bench, thread_ids: Sequence[str], message: str = "m") -> None:
    for thread_id in thread_ids:
        await it.writer.append([message], thread_id)


def poisonous(change: Any) -> bool:
    return b"\xa6poison" in change.messages


def state_of(it: Bench) -> Any:
    assert it.flusher is not None
    return it.flusher.state


#: What a flush asks, inside its transaction, what it is to write.
Decide = Callable[[Mapping[str, Watermark]], Decision]


def transactions(it: Bench) -> list[int]:
    """Record how many threads each transaction from now on is asked to flush."""
    flush, asked = it.ledger.flush, list[int]()

    async def counted(held: Sequence[Cursor], threads: Sequence[str], decide: Decide, **bounds: int) -> Any:
        asked.append(len(threads))
        return await flush(held, threads, decide, **bounds)

    it.ledger.flush = counted  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize(
    ("error", "stopped"),
    [
        (StoreUnavailable("it is away"), False),
        (LogUnavailable("it is away"), False),
        (AppendUnknown("no answer"), False),
        (StoreMisconfigured("a wrong password"), True),
        (LogRolledBack("it ends too early"), True),
        (FlushFailed("a deadlock", Verdict.RETRY), False),
        (FlushFailed("permission denied for table buffer_waiting", Verdict.DENIED, of_batch=False), True),
        (FlushFailed("read-only", Verdict.STOP), True),
    ],
    ids=lambda value: str(value),
)
def test_an_error_says_whether_it_needs_an_operator(error: Exception, stopped: bool) -> None:
    state = FlusherState()
    state.report(error)
    assert (state.stopped, str(error) in state.trouble) == (stopped, True)


# --- what is about one thread -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sqlstate", ABOUT_A_STATEMENT)
def test_what_the_server_says_of_a_statement_delays_its_own_thread_only(sqlstate: str) -> None:
    async def main(it: Bench) -> None:
        bad = True
        failing(it, lambda c: refused(sqlstate) if bad and c.thread_id == "t" else None)
        await write(it, ["t", *GOOD])
        await it.start()
        assert await it.flushed(*GOOD, within_s=2.0)
        await asyncio.sleep(1)
        assert sqlstate in state_of(it).trouble
        assert not state_of(it).stopped, "the others go on"
        assert not it.ledger.parked.entries
        bad = False
        assert await it.flushed("t", within_s=20.0)
        assert await it.stored() == ["m"]

    bench(main)


@pytest.mark.parametrize(
    "error",
    [
        MalformedEntry("m"),
        ConfigError("c"),
        StoreMisconfigured("s"),
        Closed("c"),
        LogUnavailable("l"),
        OSError("o"),
        asyncio.CancelledError("of something that it awaits"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_what_an_apps_code_raises_for_a_thread_delays_its_own_thread_only(error: BaseException) -> None:
    async def main(it: Bench) -> None:
        bad = True
        failing(it, lambda c: error if bad and c.thread_id == "t" else None)
        await write(it, ["t", *GOOD])
        await it.start()
        assert await it.flushed(*GOOD, within_s=20.0)
        assert type(error).__name__ in state_of(it).trouble
        bad = False
        assert await it.flushed("t", within_s=20.0)
        assert not it.ledger.parked.entries

    bench(main)


def test_no_cancel_but_its_own_ends_the_flushers_loop() -> None:
    async def main(it: Bench) -> None:
        flush, cancelled = it.ledger.flush, 0

        async def once(*arguments: Any, **options: Any) -> Any:
            nonlocal cancelled
            cancelled += 1
            if cancelled == 1:
                raise asyncio.CancelledError
            return await flush(*arguments, **options)

        it.ledger.flush = once  # type: ignore[method-assign]
        await write(it, GOOD)
        await it.start()
        assert await it.flushed(*GOOD, within_s=10.0)
        assert state_of(it).trouble == ""

    bench(main)


def test_rows_that_are_held_cost_the_others_nothing() -> None:
    """One statement finds out which rows are locked, and the waiting threads are tried together."""

    async def main(it: Bench) -> None:
        held = [f"held{n}" for n in range(200)]
        it.ledger.locked.update(held)
        asked = transactions(it)
        await write(it, [*held, *GOOD])
        await it.start()
        assert await it.flushed(*GOOD, within_s=2.0)
        assert asked == [220] or asked[:2] == [220, 200]
        await asyncio.sleep(20)
        assert len(asked) < 15, "together, and each time later"
        await it.writer.append(["more"], GOOD[0])
        assert await it.flushed(GOOD[0], within_s=1.0)
        it.ledger.locked.clear()
        assert await it.flushed(*held, within_s=10.0)
        assert not it.ledger.parked.entries

    bench(main)


def test_what_a_lock_had_wait_is_flushed_as_ever_when_it_is_gone() -> None:
    """Some are tried while the lock may still be held; those that pass are then flushed whole, together."""

    async def main(it: Bench) -> None:
        locked, threads = True, [f"t{n}" for n in range(40)]
        failing(it, lambda c: refused("55P03") if locked and c.thread_id in threads else None)
        await it.start()
        for n in range(20):
            await write(it, threads, str(n))
        await asyncio.sleep(10)
        assert len(it.ledger.waiting.entries) == 800
        asked = transactions(it)
        await asyncio.sleep(60)
        assert max(asked) <= 8, "a lock that stays costs no more, however many wait for it"
        asked.clear()
        locked = False
        assert await it.flushed(*threads, within_s=9.0)
        assert len(asked) < 20, "not entry by entry"
        await write(it, threads, "more")
        assert await it.flushed(*threads, within_s=1.0)
        assert state_of(it).trouble == ""
        # A thread that passed is set aside again like any other.
        locked = True
        for n in range(20):
            await write(it, threads, str(n))
        await asyncio.sleep(10)
        asked.clear()
        await asyncio.sleep(60)
        assert max(asked) <= 8

    bench(main)


# --- too much at once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sqlstate", ["57014", *seldom("53200", "25P04", "25P03", "40001")])
def test_a_window_that_is_too_much_for_its_time_shrinks(sqlstate: str) -> None:
    async def main(it: Bench) -> None:
        apply, sizes = it.world.store.apply, list[int]()

        async def limited(connection: object, batch: Sequence[Any]) -> None:
            sizes.append(len(batch))
            if len(batch) > 30:
                raise refused(sqlstate)
            await apply(connection, batch)

        it.world.store.apply = limited  # type: ignore[method-assign]
        threads = [f"t{n}" for n in range(400)]
        await write(it, threads)
        await it.start()
        assert await it.flushed(*threads, within_s=60.0)
        assert max(sizes) == 400

    bench(main)


def test_an_entry_that_is_too_much_alone_delays_its_own_thread_only() -> None:
    async def main(it: Bench) -> None:
        bad = True
        failing(it, lambda c: refused("57014") if bad and c.thread_id == "t" else None)
        await write(it, ["t", *GOOD])
        await it.start()
        assert await it.flushed(*GOOD, within_s=30.0)
        assert "57014" in state_of(it).trouble
        bad = False
        assert await it.flushed("t", within_s=70.0)

    bench(main)


def test_an_entry_for_which_the_process_has_no_memory_waits_and_is_not_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoder:
        bad = True

        def decode(self, data: bytes) -> AnyPayload:
            if self.bad and b"large" in data:
                raise MemoryError
            return decoder.decode(data)

    async def main(it: Bench) -> None:
        await write(it, ["t"], "large")
        await write(it, GOOD)
        monkeypatch.setattr(payload, "_decoder", without_memory)
        await it.start()
        assert await it.flushed(*GOOD, within_s=30.0)
        assert "memory" in state_of(it).trouble
        without_memory.bad = False
        assert await it.flushed("t", within_s=70.0)
        assert not it.ledger.parked.entries
        assert await it.stored() == ["large"]

    decoder, without_memory = payload._decoder, Decoder()
    bench(main)


@pytest.mark.parametrize("call", ["read back", "write"])
def test_a_waiting_entry_for_which_the_process_has_no_memory_delays_no_other(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the flusher's loop began anew each second, and no other waiting thread had its turn."""

    async def main(it: Bench) -> None:
        no_memory, held = True, True
        flush, first = it.ledger.flush, it.ledger.waiting.first

        async def flush_(cursors: Sequence[Cursor], threads: Sequence[str], decide: Decide, **bounds: int) -> Any:
            if no_memory and call == "write" and any(w.item.thread_id == "t" for w in decide({}).waiting):
                raise MemoryError
            return await flush(cursors, threads, decide, **bounds)

        async def first_(threads: Sequence[str], *bounds: int) -> Any:
            if no_memory and call == "read back" and "t" in threads:
                raise MemoryError
            return await first(threads, *bounds)

        it.ledger.flush, it.ledger.waiting.first = flush_, first_  # type: ignore[method-assign]
        failing(it, lambda c: refused("P0001") if held and c.thread_id in ("t", "u") else None)
        await write(it, ["t", "u"])
        await it.start()
        await asyncio.sleep(20)
        held = False
        assert await it.flushed("u", within_s=20.0)
        assert not [r for r in caplog.records if r.exc_info]
        no_memory = False
        assert await it.flushed("t", within_s=70.0)
        assert not it.ledger.parked.entries

    bench(main)


def test_many_entries_that_are_each_too_much_alone_leave_the_others_their_time() -> None:
    """They were tried one after the other, each for as long as a statement may take: together, without a pause."""

    async def main(it: Bench) -> None:
        loop, flush = asyncio.get_running_loop(), it.ledger.flush
        large = {f"large-{n}" for n in range(8)}

        async def slow(held: Any, threads: Any, decide: Any, **options: Any) -> Any:
            if large & set(threads):
                await asyncio.sleep(30)
                raise refused("57014")
            return await flush(held, threads, decide, **options)

        it.ledger.flush = slow  # type: ignore[method-assign]
        await write(it, [*sorted(large), GOOD[0]])
        await it.start()
        await asyncio.sleep(2500)
        waited = []
        for _ in range(200):
            began = loop.time()
            await write(it, [GOOD[0]])
            assert await it.flushed(GOOD[0], within_s=5000.0)
            waited.append(loop.time() - began)
            await asyncio.sleep(5)
        assert max(waited) < 70, "two tries"
        assert sum(w for w in waited if w > 5) < 0.5 * (sum(waited) + 5 * len(waited)), "of all that time"

    bench(main)


@pytest.mark.long
def test_an_entry_that_is_too_much_alone_is_tried_seldom_also_when_more_is_written_behind_it() -> None:
    async def main(it: Bench) -> None:
        bad, tries = True, 0

        def tried(change: Any) -> FlushFailed | None:
            nonlocal tries
            tries += bad and change.thread_id == "t"
            return refused("57014") if bad and change.thread_id == "t" else None

        failing(it, tried)
        await write(it, ["t", *GOOD])
        await it.start()
        assert await it.flushed(*GOOD, within_s=30.0)
        for _ in range(600):
            await write(it, ["t", GOOD[0]])
            await asyncio.sleep(1)
        assert tries < 40
        bad = False
        assert await it.flushed("t", GOOD[0], within_s=70.0)

    bench(main)


def test_an_entry_that_costs_the_connection_delays_its_own_thread_only() -> None:
    """The entry ends the session, or gets no answer; Postgres answers everything else."""

    async def main(it: Bench) -> None:
        apply, bad = it.world.store.apply, True

        async def hanging(connection: object, batch: Sequence[Any]) -> None:
            if bad and any(change.thread_id == "t" for change in batch):
                await asyncio.sleep(30)
                raise StoreUnavailable("no answer from Postgres: the time ran out")
            await apply(connection, batch)

        it.world.store.apply = hanging  # type: ignore[method-assign]
        await write(it, ["t", *GOOD])
        await it.start()
        assert await it.flushed(*GOOD, within_s=300.0)
        assert "the time ran out" in state_of(it).trouble
        bad = False
        assert await it.flushed("t", within_s=100.0)
        assert not it.ledger.parked.entries

    bench(main)


@pytest.mark.parametrize("sqlstate", ["40001", "58P01", "08001", "53400"])
def test_what_sounds_like_the_server_but_is_about_one_thread_delays_that_only(sqlstate: str) -> None:
    """For example in a trigger that asks another server, or in a function whose library is gone."""

    async def main(it: Bench) -> None:
        bad = True
        failing(it, lambda c: refused(sqlstate) if bad and c.thread_id == "t" else None)
        await write(it, ["t", *GOOD])
        await it.start()
        assert await it.flushed(*GOOD, within_s=30.0)
        assert sqlstate in state_of(it).trouble
        bad = False
        assert await it.flushed("t", within_s=70.0)
        assert not it.ledger.parked.entries

    bench(main)


@pytest.mark.parametrize("error", [refused("53100"), StoreUnavailable("the connection to Postgres was lost")])
def test_a_server_that_can_be_read_and_not_written_is_no_thread_s_fault(error: Exception) -> None:
    async def main(it: Bench) -> None:
        apply, tries, bad = it.world.store.apply, 0, True

        async def full(connection: object, batch: Sequence[Any]) -> None:
            nonlocal tries
            tries += 1
            if bad:
                raise error
            await apply(connection, batch)

        it.world.store.apply = full  # type: ignore[method-assign]
        threads = [f"t{n}" for n in range(300)]
        await write(it, threads)
        await it.start()
        await asyncio.sleep(120)
        assert tries < 300, "tried again slowly, not thread by thread"
        bad = False
        assert await it.flushed(*threads, within_s=15.0)
        assert not it.ledger.parked.entries

    bench(main)


# --- faults that concern all ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sqlstate", ["23502", *seldom("P0001", "42P01")])
def test_what_is_refused_to_all_parks_nothing_and_mends_by_itself(sqlstate: str) -> None:
    """For example a new NOT NULL column, a trigger that always raises, or a missing table."""

    async def main(it: Bench) -> None:
        bad = True
        failing(it, lambda c: refused(sqlstate) if bad else None)
        threads = [f"t{n}" for n in range(500)]
        await write(it, threads)
        await it.start()
        for n in range(30):
            await asyncio.sleep(1)
            await it.writer.append(["later"], f"new{n}")
        assert not it.ledger.parked.entries
        assert sqlstate in state_of(it).trouble
        assert state_of(it).stopped
        bad = False
        assert await it.flushed(*threads, *(f"new{n}" for n in range(30)), within_s=10.0)
        await asyncio.sleep(1)
        assert (state_of(it).trouble, state_of(it).stopped) == ("", False)
        assert not it.ledger.parked.entries

    bench(main)


def test_what_is_mended_in_the_middle_of_a_transaction_is_no_entrys_fault() -> None:
    """The first threads of a transaction are refused and the others accepted, as if the first were poison."""

    async def main(it: Bench) -> None:
        left = 10

        def mended_midway(change: Any) -> FlushFailed | None:
            nonlocal left
            if not probing:
                return refused("23502")
            left -= 1
            return refused("23502") if left >= 0 else None

        probing, flush = False, it.ledger.flush

        async def flushing(*args: Any, probe: int = 0, **more: Any) -> Any:
            nonlocal probing
            probing = probe > 0
            return await flush(*args, probe=probe, **more)

        it.ledger.flush = flushing  # type: ignore[method-assign]
        failing(it, mended_midway)
        threads = [f"t{n}" for n in range(40)]
        await write(it, threads)
        await it.start()
        assert await it.flushed(*threads, within_s=10.0)
        assert not it.ledger.parked.entries
        assert await it.stored("t0") == ["m"]

    bench(main)


def test_what_is_refused_to_all_parks_next_to_nothing_also_where_threads_come_one_by_one() -> None:
    async def main(it: Bench) -> None:
        bad = True
        failing(it, lambda c: refused("23502") if bad else None)
        await it.start()
        threads = [f"t{n}" for n in range(30)]
        for thread_id in threads:
            await write(it, [thread_id])
            await asyncio.sleep(30)
        assert len(it.ledger.parked.entries) < THREADS_MIN, "so many may be to blame themselves"
        assert "23502" in state_of(it).trouble
        bad = False
        assert await it.flushed(*threads, within_s=10.0)

    bench(main)


def test_poison_now_and_then_is_parked_while_anything_else_is_taken_now_and_then() -> None:
    async def main(it: Bench) -> None:
        failing(it, lambda c: refused("23514") if poisonous(c) else None)
        await it.start()
        for n in range(30):
            await write(it, [f"t{n}"], "poison")
            await write(it, ["good"])
            assert await it.flushed(f"t{n}", within_s=10.0)
        assert len(it.ledger.parked.entries) == 30

    bench(main)


def test_code_of_an_app_that_raises_for_all_parks_nothing() -> None:
    async def main(it: Bench) -> None:
        bad = True
        error = FlushFailed("the store's apply() raised KeyError", Verdict.SUSPECT)
        failing(it, lambda c: error if bad else None)
        await write(it, GOOD)
        await it.start()
        await asyncio.sleep(600)
        assert not it.ledger.parked.entries
        assert state_of(it).stopped
        bad = False
        assert await it.flushed(*GOOD, within_s=10.0)

    bench(main)


def test_few_threads_of_poison_are_parked_though_there_is_nothing_else() -> None:
    async def main(it: Bench) -> None:
        failing(it, lambda c: refused("23514") if poisonous(c) else None)
        few = [f"t{n}" for n in range(THREADS_MIN - 1)]
        await write(it, few, "poison")
        await it.start()
        assert await it.flushed(*few, within_s=2.0)
        assert len(it.ledger.parked.entries) == len(few)

    bench(main)


def test_many_threads_of_poison_and_nothing_else_wait_for_others_that_are_taken() -> None:
    """The fault may concern everybody, until the store accepts more entries of other threads."""

    async def main(it: Bench) -> None:
        failing(it, lambda c: refused("23514") if poisonous(c) else None)
        many = [f"t{n}" for n in range(10)]
        await write(it, many, "poison")
        await it.start()
        await asyncio.sleep(60)
        assert not it.ledger.parked.entries
        await write(it, GOOD)
        assert await it.flushed(*GOOD, within_s=2.0)
        assert await it.flushed(*many, within_s=10.0)
        assert len(it.ledger.parked.entries) == 10
        await asyncio.sleep(1)
        assert state_of(it).trouble == ""

    bench(main)


def test_poison_behind_good_entries_of_its_own_threads_is_known_for_what_it_is() -> None:
    async def main(it: Bench) -> None:
        failing(it, lambda c: refused("23514") if poisonous(c) else None)
        threads = [f"t{n}" for n in range(40)]
        for message in ("good", "poison", "behind it"):
            await write(it, threads, message)
        await it.start()
        assert await it.flushed(*threads, within_s=60.0)
        assert len(it.ledger.parked.entries) == 80
        assert await it.stored("t7") == ["good"]

    bench(main)


def test_a_storm_of_poison_among_more_good_threads_is_parked_at_once() -> None:
    async def main(it: Bench) -> None:
        failing(it, lambda c: refused("23514") if poisonous(c) else None)
        bad = [f"t{n}" for n in range(15)]
        await write(it, bad, "poison")
        await write(it, GOOD)
        await it.start()
        assert await it.flushed(*bad, *GOOD, within_s=2.0)
        assert len(it.ledger.parked.entries) == 15

    bench(main)


# --- taking partitions ------------------------------------------------------------------------------------------


def test_taking_a_partition_takes_no_time_of_the_others() -> None:
    """Postgres hangs each time it is asked for a partition; owned partitions are flushed all the same."""

    async def main(it: Bench) -> None:
        await it.start()
        other = other_partition("t")
        await write(it, ["t", other])
        assert await it.flushed("t", other)
        lost = it.flusher._owned[SUBJECTS.partition("t")]  # type: ignore[union-attr]

        async def hangs(partitions: Sequence[int], owner: str) -> list[Cursor]:
            await asyncio.sleep(30)
            raise StoreUnavailable("no answer in time")

        take, it.ledger.take = it.ledger.take, hangs  # type: ignore[method-assign]
        lost.doubt = "the test says so"
        for n in range(100):
            await it.writer.append([n], other)
            assert await it.flushed(other, within_s=1.0)
        it.ledger.take = take  # type: ignore[method-assign]
        await it.writer.append(["x"], "t")
        assert await it.flushed("t", within_s=60.0)

    bench(main)


def test_a_partition_whose_consumer_is_slow_to_be_made_delays_no_other() -> None:
    async def main(it: Bench) -> None:
        slow, other = {SUBJECTS.partition("t")}, other_partition("t")

        class SometimesSlow(FeedLog):
            async def feed(self, partition: int, *arguments: Any) -> Any:
                if partition in slow:
                    await asyncio.sleep(6)
                    raise StoreUnavailable("its leader is away")
                return await super().feed(partition, *arguments)

        it.log.kind = SometimesSlow
        await it.start()
        await write(it, ["t", other])
        for n in range(60):
            await it.writer.append([n], other)
            assert await it.flushed(other, within_s=1.0)
        slow.clear()
        assert await it.flushed("t", within_s=20.0)

    bench(main)


def test_what_somebody_has_to_configure_is_tried_again_less_and_less_often() -> None:
    """Regression: each partition was taken twice a second, and so had its term raised in Postgres, without end."""

    async def main(it: Bench) -> None:
        take, taken = it.ledger.take, list[int]()

        async def counted(partitions: Sequence[int], owner: str) -> list[Cursor]:
            taken.extend(partitions)
            return await take(partitions, owner)

        it.ledger.take = counted  # type: ignore[method-assign]
        it.log.refuse_feed = dict.fromkeys(range(4), ConfigError("NATS does not permit this"))
        await write(it, ["t"])
        await it.start()
        await asyncio.sleep(60)
        assert all(5 < taken.count(partition) < 12 for partition in range(4)), taken
        assert "does not permit" in state_of(it).trouble
        it.log.refuse_feed = {}
        assert await it.flushed("t", within_s=16.0)
        taken.clear()
        it.log.refuse_feed = dict.fromkeys(range(4), LogUnavailable("no answer"))
        it.flusher._owned[SUBJECTS.partition("t")].doubt = "the test says so"  # type: ignore[union-attr]
        await asyncio.sleep(10)
        assert len(taken) > 15, "what may pass by itself is tried as ever"

    bench(main)


def test_a_partition_whose_row_is_held_is_taken_when_it_is_free_and_said_so_meanwhile() -> None:
    async def main(it: Bench) -> None:
        take, held = it.ledger.take, {SUBJECTS.partition("t")}

        async def without_held(partitions: Sequence[int], owner: str) -> list[Cursor]:
            return await take([p for p in partitions if p not in held], owner)

        it.ledger.take = without_held  # type: ignore[method-assign]
        other = other_partition("t")
        await write(it, ["t", other])
        await it.start()
        assert await it.flushed(other, within_s=2.0)
        await asyncio.sleep(5)
        assert f"partition {SUBJECTS.partition('t')} " in state_of(it).trouble
        held.clear()
        assert await it.flushed("t", within_s=1.0)
        await asyncio.sleep(2)
        assert state_of(it).trouble == ""

    bench(main)
