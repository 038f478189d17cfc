"""A log and a database that belong together say so, and nothing is flushed between others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bufstore import (
    BufferConfig,
    BufferedThreadStore,
    ConfigDrift,
    ConfigError,
    LogConfig,
    LogRolledBack,
    MemoryThreadStore,
    PostgresThreadStore,
    StoreUnavailable,
    repair,
)
from bufstore.buffer.prepare import new_target
from bufstore.buffer.target import Kind, Target, check_flushable, check_same, is_proven
from bufstore.memory import MemoryNats
from bufstore.nats.setup import metadata_of, target_of
from bufstore.threads.protocol import kind_of
from helpers import fresh, run_of
from unit.fake_log import run

CONFIG = BufferConfig(
    log=LogConfig(failover_window_s=20.0), retain_after_flush_s=20.0, flush_interval_s=0.05, lease_s=4
)


class Tickets(MemoryThreadStore):
    """An app's own store."""

    store_kind = "tickets"


class Handing:
    """A wrapper that passes everything on to another store."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def opened(inner: MemoryThreadStore, nats: MemoryNats) -> BufferedThreadStore:
    return await BufferedThreadStore.open(inner, nats=nats, config=CONFIG)


async def use(inner: MemoryThreadStore, nats: MemoryNats, thread_id: str, messages: Sequence[Any] = (1,)) -> None:
    async with await opened(inner, nats) as store:
        await store.checkpoint(thread_id, list(messages), run_of(thread_id))
        await store.force_flush(thread_id)


def forgets(inner: MemoryThreadStore) -> None:
    """Remove the name from the database, as if an earlier release had made it."""
    inner.ledger(0)._named = None


def test_the_entries_of_an_apps_own_store_are_flushed_into_no_other() -> None:
    async def main() -> None:
        nats, tickets, thread_id = MemoryNats(), Tickets(), fresh()
        await use(tickets, nats, thread_id)
        for other in (MemoryThreadStore(), Tickets()):
            with pytest.raises(ConfigDrift) as caught:
                await opened(other, nats)
            assert caught.value.field == ("store" if type(other) is MemoryThreadStore else "database")
            assert caught.value.way_out
            assert await other.load_messages(thread_id) is None
        # The same database makes no difference.
        same = MemoryThreadStore()
        same._ledgers[0] = tickets.ledger(0)
        with pytest.raises(ConfigDrift, match=r"store is 'tickets' but 'bufstore.memory'"):
            await opened(same, nats)
        with pytest.raises(ConfigDrift, match=r"the database of stream .* 'tickets'"):
            await opened(same, MemoryNats())
        await use(tickets, nats, thread_id, [1, 2])
        assert await tickets.load_messages(thread_id) == [1, 2]

    run(main())


def test_two_instances_with_a_database_each_do_not_share_a_log() -> None:
    async def main() -> None:
        for _ in range(20):
            nats, databases = MemoryNats(), [MemoryThreadStore(), MemoryThreadStore()]
            ended = await asyncio.gather(*(opened(inner, nats) for inner in databases), return_exceptions=True)
            stores = [s for s in ended if isinstance(s, BufferedThreadStore)]
            refused = [e for e in ended if isinstance(e, ConfigDrift)]
            assert (len(stores), [e.field for e in refused]) == (1, ["database"])
            await stores[0].aclose()

    run(main())


def test_instances_that_begin_at_the_same_time_on_one_database_agree() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        stores = await asyncio.gather(*(opened(inner, nats) for _ in range(4)))
        assert nats.streams["THREADLOG"].target == await inner.ledger(0).target() is not None
        for store in stores:
            await store.aclose()

    run(main())


def test_a_log_and_a_database_of_an_earlier_release_are_given_the_name_by_who_can_prove_it() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        await use(inner, nats, thread_id)
        stream = nats.streams["THREADLOG"]
        stream.target = None
        forgets(inner)
        with pytest.raises(ConfigDrift, match="bufstore log adopt"):  # nothing was purged yet; once this was accepted
            await opened(MemoryThreadStore(), nats)
        assert stream.target is None
        stores = await asyncio.gather(*(opened(inner, nats) for _ in range(3)))
        for store in stores:
            await store.aclose()
        given = stream.target
        assert given is not None
        assert given == await inner.ledger(0).target()
        # A restored copy without the name gets it again: the database from the log, the log from the database.
        forgets(inner)
        await use(inner, nats, thread_id, [1, 2])
        assert await inner.ledger(0).target() == given
        stream.target = None
        await use(inner, nats, thread_id, [1, 2, 3])
        assert stream.target == given

    run(main())


def test_who_meets_another_name_in_the_moment_of_giving_one_gives_way() -> None:
    """Metadata has no compare-and-set: both databases have flushed a part of the log, and open at the same time."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        await use(inner, nats, thread_id)
        stream = nats.streams["THREADLOG"]
        stream.target = None
        forgets(inner)
        opening = asyncio.create_task(opened(inner, nats))
        while stream.target is None:  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0)
        stream.target = Target("threads", "bufstore.memory", "another")
        with pytest.raises(ConfigDrift, match="'another'"):
            await opening

    run(main())


def test_a_log_that_is_named_while_somebody_makes_sure_is_still_his() -> None:
    """Nothing is flushed yet, and another instance on the same database is a moment faster."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with await BufferedThreadStore.open(inner, nats=nats, config=replace(CONFIG, flusher=False)) as store:
            await store.checkpoint(thread_id, [1], run_of(thread_id))
        stream, ledger = nats.streams["THREADLOG"], inner.ledger(0)
        stream.target = None
        forgets(inner)
        there = ledger.cursors

        async def overtaken() -> Any:
            if stream.target is None:
                stream.target = await ledger.claim(0, new_target(kind_of(inner)))
            return await there()

        ledger.cursors = overtaken  # type: ignore[method-assign]
        await use(inner, nats, thread_id, [1, 2])
        assert stream.target == await ledger.target() is not None

    run(main())


@pytest.mark.parametrize("found", ["says nothing", "knows the generation", "of an earlier release"])
def test_a_database_that_turns_out_to_be_another_one_gets_nothing_and_holds_nobody_up(found: str) -> None:
    """The database was away when the store was opened, so only the flusher can find out."""

    async def main() -> None:
        nats, right, wrong, thread_id = MemoryNats(), MemoryThreadStore(), MemoryThreadStore(), fresh()
        await use(right, nats, thread_id)
        ledger = wrong.ledger(0)
        if found == "knows the generation":
            await ledger.set_epoch(0)
        if found == "of an earlier release":
            nats.streams["THREADLOG"].target = None
            forgets(right)
        there = ledger.setup

        async def away(away_s: float | None = None) -> None:
            raise StoreUnavailable("it is away")

        ledger.setup = away  # type: ignore[method-assign]
        async with await opened(wrong, nats) as misled:
            ledger.setup = there  # type: ignore[method-assign]
            await asyncio.sleep(10)
            assert "database" in (await misled.health()).flusher
            with pytest.raises(LogRolledBack, match="database"):
                await misled.checkpoint(thread_id, [2], run_of(thread_id))
            async with await opened(right, nats) as store:
                for n in range(20):
                    await store.checkpoint(f"t{n}", [n], run_of(f"t{n}"))
                await asyncio.sleep(10)
                await store.force_flush_all()
                assert (await store.statistics()).flusher.partitions == tuple(range(8))
        assert await wrong.load_messages(thread_id) is None
        assert await ledger.cursors() == {}

    run(main())


def test_an_empty_database_in_the_place_of_a_lost_one_is_refused_until_a_repair() -> None:
    async def main() -> None:
        nats, lost, empty, thread_id = MemoryNats(), MemoryThreadStore(), MemoryThreadStore(), fresh()
        await use(lost, nats, thread_id)
        with pytest.raises(ConfigDrift, match="bufstore repair"):
            await opened(empty, nats)
        found = await repair(empty, nats=nats, config=CONFIG)
        assert found.reason is not None
        assert "another database" in found.reason
        with pytest.raises(ConfigDrift, match=r"store is 'bufstore.memory' but 'tickets'"):
            await repair(Tickets(), nats=nats, config=CONFIG, apply=True)
        await asyncio.sleep(60)  # by then the members are gone
        assert (await repair(empty, nats=nats, config=CONFIG, apply=True)).applied == 1
        await use(empty, nats, "another")
        assert nats.streams["THREADLOG"].target == await empty.ledger(0).target()
        assert await empty.load_messages(thread_id) == [1]
        for ask in (repair(lost, nats=nats, config=CONFIG), opened(lost, nats)):
            with pytest.raises((ConfigDrift, LogRolledBack)):
                await ask

    run(main())


def test_a_repair_keeps_the_name_of_the_database() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        await use(inner, nats, thread_id)
        before = nats.streams.pop("THREADLOG").target
        await asyncio.sleep(60)
        assert (await repair(inner, nats=nats, config=CONFIG, apply=True)).done
        await use(inner, nats, thread_id, [1, 2])
        assert nats.streams["THREADLOG"].target == before == await inner.ledger(0).target()

    run(main())


def test_the_kind_of_a_store_does_not_hang_on_its_class() -> None:
    class Impossible:
        store_kind = "two words"

    assert kind_of(PostgresThreadStore).store == "bufstore.postgres"
    assert kind_of(MemoryThreadStore()).store == "bufstore.memory"
    assert kind_of(object()) == kind_of(Handing(object())) == Kind("threads", "app")
    assert kind_of(Handing(MemoryThreadStore())).store == "app", "what it adds, the inner store alone would leave out"
    with pytest.raises(ConfigError, match=r"Impossible\.store_kind"):
        kind_of(Impossible())


def test_a_command_takes_no_log_that_does_not_say_what_it_is_flushed_into() -> None:
    ours = kind_of(PostgresThreadStore)
    check_flushable("LOG", Target("threads", "bufstore.postgres", "x"), ours)
    for named, says in (
        (None, "bufstore log adopt"),
        (Target("threads", "app", "x"), "run this in a process that opens that store"),
        (Target("else", "bufstore.postgres", "x"), "domain is 'else'"),
    ):
        with pytest.raises(ConfigDrift, match=says):
            check_flushable("LOG", named, ours)


def test_what_a_log_says_of_its_target_comes_back() -> None:
    target = new_target(Kind("threads", "app"))
    assert target.id != new_target(Kind("threads", "app")).id
    assert target_of(metadata_of(LogConfig(), 0, target)) == target
    assert target_of(metadata_of(LogConfig(), 0)) is None
    check_same("LOG", target, None)
    check_same("LOG", target, target)


def test_a_database_of_which_the_named_log_shows_nothing_is_not_the_one() -> None:
    assert not is_proven(known=True, flushed=False, log_begun=False, log_named=True)
    assert not is_proven(known=False, flushed=False, log_begun=True, log_named=False)
    assert is_proven(known=False, flushed=False, log_begun=False, log_named=False)
