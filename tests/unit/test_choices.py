"""A str instead of an enum's member or of a list, or a mistyped one, must not mean something else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from bufstore import (
    BufferConfig,
    BufferedThreadStore,
    ConfigError,
    Consistency,
    InvalidId,
    InvalidQuery,
    LogConfig,
    MemoryThreadStore,
    MessageQuery,
    RunQuery,
    repair,
)
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore
from bufstore.mailbox import MemoryMailboxStore
from bufstore.memory import MemoryNats
from bufstore.notify import NatsNotifier
from bufstore.spark import restore
from bufstore.spark.analytics import coalescing, lag
from bufstore.spark.config import SinkConfig
from bufstore.tokens import Policy, TokensConfig
from bufstore.types import Quarantined, check_choice
from unit.fake_log import run

STRONG: Any = "strong"
MISTYPED: Any = "foo"


def test_an_error_says_what_there_is() -> None:
    for level in Consistency:
        assert check_choice(level, Consistency, "consistency", InvalidQuery) is level
        with pytest.raises(InvalidQuery, match=f"must be .*Consistency.{level.name}.*, not '{level.value}'"):
            check_choice(level.value, Consistency, "consistency", InvalidQuery)
    assert check_choice("known", Quarantined, "quarantined", InvalidQuery) == "known"
    for wrong in ("foo", None, ["raise"]):
        with pytest.raises(ConfigError, match="quarantined must be 'raise' or 'known', not"):
            check_choice(wrong, Quarantined, "quarantined", ConfigError)


async def refused(call: Awaitable[object], said: str) -> None:
    with pytest.raises(InvalidQuery, match=said):
        await call


def test_each_read_refuses_a_level_that_is_none() -> None:
    async def main() -> None:
        async with await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats()) as store:
            named: list[Callable[..., Awaitable[object]]] = [
                store.load_checkpoint, store.load_thread, store.load_messages, store.load_run, store.latest_run,
                store.load_thread_state, store.query_messages,
            ]  # fmt: skip
            for wrong in ("strong", "", 0):
                for read in named:
                    await refused(read("t", consistency=wrong), "Consistency.STRONG")
                for query in (store.query_runs, store.query_threads):
                    await refused(cast(Any, query)(consistency=wrong), "Consistency.STRONG")
                await refused(store.load_message("t", "m", consistency=cast(Any, wrong)), "Consistency.STRONG")
                await refused(store.load_message_range("t", 1, 2, consistency=cast(Any, wrong)), "Consistency.STRONG")
            for read in named[:-1]:
                await refused(read("t", quarantined="foo"), "'raise' or 'known', not 'foo'")
            await refused(store.delete_thread("t", children=cast(Any, "cascade")), "Children.CASCADE")
            await refused(store.query_messages("t", MessageQuery(order=MISTYPED)), "Order.NEWEST_FIRST")
            await refused(store.query_messages("t", MessageQuery(visibility=MISTYPED)), "Visibility.INTERNAL")
            await refused(store.query_runs(RunQuery(status=MISTYPED)), "RunStatus.DONE")
            assert await store.load_messages("t", consistency=Consistency.STRONG, quarantined="known") is None

    run(main())


def test_who_opens_something_hears_that_a_level_is_none() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"Consistency\.STRONG"):
            await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats(), consistency=STRONG)
        with pytest.raises(ConfigError, match=r"Consistency\.STRONG"):
            await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats(), consistency=STRONG)
        for option in ("new_threads", "on_conflict"):
            with pytest.raises(ConfigError, match=f"{option} must be '"):
                await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats(), **{option: MISTYPED})
        with pytest.raises(ConfigError, match=r"Hints\.NONE"):
            await NatsNotifier.open("nats://127.0.0.1:1", hints=cast(Any, "none"))

    asyncio.run(main())


def test_a_saver_and_a_store_refuse_what_names_the_wrong_thing() -> None:
    async def main() -> None:
        archived = BufferConfig(log=LogConfig(archive=True))
        with pytest.raises(ConfigError, match="nothing can archive a saver's log"):
            await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats(), config=archived)
        saver = await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats())
        with pytest.raises(ValueError, match="unknown strategy 'keep_all'"):
            await saver.aprune(["t"], strategy="keep_all")
        with pytest.raises(InvalidId, match="writes need the id of a checkpoint"):
            await saver.aput_writes({"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, [("a", 1)], "task")
        assert await saver.aget_tuple({"configurable": {"thread_id": "t"}}) is None
        await saver.aclose()
        async with await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats()) as store:
            receipt = await store.append_messages("t", [{"id": "1"}])
            with pytest.raises(ConfigError, match="the receipt is of thread 't', not 'u'"):
                await store.load_messages("u", at_least=receipt)
        for lane in (-1, 1):
            with pytest.raises(ConfigError, match=f"there is no lane {lane}: LogConfig.lanes is 1"):
                await repair(MemoryThreadStore(), nats=MemoryNats(), lane=lane)

    run(main())


@pytest.mark.parametrize("policy", [p.value for p in Policy])
def test_a_policy_is_no_text(policy: Any) -> None:
    with pytest.raises(ConfigError, match=r"TokensConfig.policy must be Policy.QUEUE, Policy.REPLACE or Policy.REFUSE"):
        TokensConfig(policy=policy)


def test_a_status_is_no_text() -> None:
    async def main() -> None:
        async with MemoryMailboxStore() as store:
            await store.enqueue("t", b"x")
            for statuses in ({"dead"}, "dead", [None]):
                await refused(store.list_dispatches("t", cast(Any, statuses)), "Status.DEAD")
            assert await store.list_dispatches("t", ()) == []

    run(main())


def test_jobs_refuse_what_they_do_not_know() -> None:
    needed: Any = {"nats": "h", "postgres": "dbname=x", "app_id": "a"}
    for name in ("mode", "bad_rows"):
        with pytest.raises(ConfigError, match=f"SinkConfig.{name} must be '.*, not 'foo'"):
            SinkConfig(**needed | {name: "foo"})
    with pytest.raises(ConfigError, match="into must be 'postgres' or 'log', not 'foo'"):
        restore(cast(Any, None), "path", cast(Any, None), into=MISTYPED)
    with pytest.raises(ConfigError, match="by must be 'partition'"):
        lag(cast(Any, None), cast(Any, None), MISTYPED)
    with pytest.raises(ConfigError, match="window_s must be a positive number"):
        coalescing(cast(Any, None), 0)


def test_ids_are_a_list_and_not_the_letters_of_one() -> None:
    async def main() -> None:
        async with await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats()) as store:
            await store.append_messages("t", [{"id": "1"}, {"id": "2"}, {"id": "12"}])
            wrong: Any
            for wrong in ("12", b"12", 12):
                with pytest.raises(InvalidId, match="message_ids must be a list of ids, not "):
                    await store.delete_messages("t", wrong)
                with pytest.raises(InvalidId, match="thread_ids must be a list of ids, not "):
                    await store.bulk.learn_new(wrong)
            for wrong in ("", "a\0b", "\ud800", 12):
                with pytest.raises(InvalidId):
                    await store.bulk.learn_new(["t", wrong])
            assert await store.load_messages("t") == [{"id": "1"}, {"id": "2"}, {"id": "12"}]
            await store.delete_messages("t", iter(["12"]))  # type: ignore[arg-type]
            assert await store.load_messages("t") == [{"id": "1"}, {"id": "2"}]
        saver = await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats())
        with pytest.raises(InvalidId, match="run_ids must be a list of ids, not str"):
            await saver.adelete_for_runs("12")
        with pytest.raises(InvalidId, match="thread_ids must be a list of ids, not str"):
            await saver.aprune("12", strategy="delete")
        await saver.aclose()

    run(main())
    with pytest.raises(InvalidId, match="threads must be a list of ids, not str"):
        restore(cast(Any, None), "path", cast(Any, None), threads="12")
