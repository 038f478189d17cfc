"""A log and a database that belong together say so, and nothing is flushed between others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
from bufstore.buffer.target import Kind, Target, check_flushable, check_same
from bufstore.memory import MemoryNats
from bufstore.nats.setup import metadata_of, said_by, target_of
from bufstore.threads.protocol import kind_of
from helpers import fresh, run_of
from unit.fake_log import run

CONFIG = BufferConfig(
    log=LogConfig(failover_window_s=20.0), retain_after_flush_s=20.0, flush_interval_s=0.05, lease_s=4
)

TARGET = Target("threads", "app", "x")


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


def test_a_database_without_the_name_is_given_the_logs_if_it_has_flushed_some_of_it() -> None:
    """An earlier release made the database, or a restored copy is from before it had the name."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        await use(inner, nats, thread_id)
        given = await inner.ledger(0).target()
        inner.ledger(0)._named = None
        with pytest.raises(ConfigDrift, match="bufstore repair"):  # nothing was purged yet
            await opened(MemoryThreadStore(), nats)
        stores = await asyncio.gather(*(opened(inner, nats) for _ in range(3)))
        for store in stores:
            await store.aclose()
        assert await inner.ledger(0).target() == given == nats.streams["THREADLOG"].target is not None
        await use(inner, nats, thread_id, [1, 2])

    run(main())


@pytest.mark.parametrize("found", ["says nothing", "knows the generation"])
def test_a_database_that_turns_out_to_be_another_one_gets_nothing_and_holds_nobody_up(found: str) -> None:
    """The database was away when the store was opened, so only the flusher can find out."""

    async def main() -> None:
        nats, right, wrong, thread_id = MemoryNats(), MemoryThreadStore(), MemoryThreadStore(), fresh()
        await use(right, nats, thread_id)
        ledger = wrong.ledger(0)
        if found == "knows the generation":
            await ledger.set_epoch(0)
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


def test_a_command_takes_no_log_that_is_flushed_into_another_kind_of_store() -> None:
    ours = kind_of(PostgresThreadStore)
    check_flushable("LOG", Target("threads", "bufstore.postgres", "x"), ours)
    for named, says in (
        (Target("threads", "app", "x"), "do it in a process that opens that store"),
        (Target("else", "bufstore.postgres", "x"), "domain is 'else'"),
    ):
        with pytest.raises(ConfigDrift, match=says):
            check_flushable("LOG", named, ours)


def test_what_a_log_says_of_its_target_comes_back() -> None:
    target = new_target(Kind("threads", "app"), "LOG-1")
    assert target.id != new_target(Kind("threads", "app"), "LOG-1").id
    assert target.stream == "LOG-1"
    assert target_of(metadata_of(LogConfig(), 0, target)) == target
    check_same("LOG", target, None)
    check_same("LOG", target, target)


@pytest.mark.parametrize("damage", [*sorted(metadata_of(LogConfig(), 0, TARGET)), {"epoch": "x"}, {"partitions": ""}])
def test_a_log_whose_metadata_somebody_has_damaged_is_refused(damage: str | dict[str, str]) -> None:
    metadata = metadata_of(LogConfig(), 0, TARGET)
    if isinstance(damage, str):
        del metadata[damage]
    else:
        metadata |= {f"bufstore.{name}": value for name, value in damage.items()}
    with pytest.raises(ConfigDrift) as caught:
        said_by({"name": "LOG", "metadata": metadata})
    assert caught.value.way_out
    assert caught.value.what == "stream LOG"


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}, {"metadata": {"somebody's": "own"}}])
def test_a_stream_that_is_no_log_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(ConfigDrift, match="did not create"):
        said_by({"name": "LOG"} | metadata)
