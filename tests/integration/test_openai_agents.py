"""A session of the OpenAI Agents SDK on a buffered store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from agents import Agent, Model, ModelResponse, RunConfig, Runner, Usage
from agents.memory import OpenAIResponsesCompactionSession, Session, SessionSettings
from openai.types.responses import ResponseOutputMessage, ResponseOutputText

from bufstore import (
    BufferConfig,
    BufferedThreadStore,
    Consistency,
    InvalidRecord,
    MemoryThreadStore,
    OutcomeUnknown,
    StoreUnavailable,
)
from bufstore.memory import MemoryNats
from bufstore.openai_agents import BufferedSession
from helpers import fresh

Items = list[Any]


@pytest.fixture(params=["memory", "servers"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[BufferedThreadStore]:
    if request.param == "memory":
        async with await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats()) as store:
            yield store
    else:
        async with request.getfixturevalue("deployment").store() as store:
            yield store


@pytest.fixture
def session(store: BufferedThreadStore) -> BufferedSession:
    return BufferedSession(fresh("session"), store)


def said(n: int) -> Any:
    return {"role": "user", "content": f"item {n}"}


class Echo(Model):
    """A model that answers with the number of items it was given."""

    async def get_response(self, system_instructions: str | None, input: str | Items, *_: Any, **__: Any) -> Any:
        text = ResponseOutputText(annotations=[], text=f"{len(input)} items", type="output_text")
        message = ResponseOutputMessage(
            id="__fake_id__", content=[text], role="assistant", status="completed", type="message"
        )
        return ModelResponse(output=[message], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


async def test_a_run_remembers_the_runs_before_it(session: BufferedSession) -> None:
    assert isinstance(session, Session)
    agent, untraced = Agent(name="echo", model=Echo()), RunConfig(tracing_disabled=True)
    answers = [(await Runner.run(agent, "hello", session=session, run_config=untraced)).final_output for _ in range(3)]
    assert answers == ["1 items", "3 items", "5 items"]
    assert len(await session.get_items()) == 6


async def test_items_come_back_in_order_and_the_last_ones_with_a_limit(session: BufferedSession) -> None:
    assert await session.get_items() == []
    assert await session.pop_item() is None
    await session.clear_session()
    await session.add_items([])
    await session.add_items([said(0), said(1)])
    await session.add_items([said(2), said(2)])
    assert await session.get_items() == [said(0), said(1), said(2), said(2)]
    for limit, wanted in ((0, []), (1, [said(2)]), (3, [said(1), said(2), said(2)]), (9, await session.get_items())):
        assert await session.get_items(limit) == wanted
    few = BufferedSession(session.session_id, session._store, session_settings=SessionSettings(limit=1))
    assert await few.get_items() == [said(2)]


async def test_items_are_popped_replaced_and_cleared(session: BufferedSession) -> None:
    await session.add_items([said(n) for n in range(3)])
    assert await session.pop_item() == said(2)
    await session.replace_items([said(7), said(8)])
    await session.replace_items([said(9)])
    assert await session.get_items() == [said(9)]
    await session.clear_session()
    assert await session.get_items() == []
    await session.add_items([said(1)])
    assert await session.get_items() == [said(1)]


async def test_what_is_no_list_of_items_and_no_session_is_refused(session: BufferedSession) -> None:
    """Regression: the keys of an item, or the letters of a text, became items."""
    for wrong in (said(0), "ab", b"ab", bytearray(b"ab"), None, 5):
        with pytest.raises(InvalidRecord, match="a list of items"):
            await session.add_items(cast(Any, wrong))
    await session._store.append_messages(session.session_id, ["of the app", {"id": "m"}])
    for call in (session.get_items, session.pop_item):
        with pytest.raises(InvalidRecord, match="no session wrote"):
            await call()


async def test_callers_at_once_lose_nothing_and_pop_each_item_once(session: BufferedSession) -> None:
    other = BufferedSession(session.session_id, session._store)
    await asyncio.gather(*((session, other)[n % 2].add_items([said(n), said(100 + n)]) for n in range(20)))
    items: Items = await session.get_items()
    texts = [item["content"] for item in items]
    assert sorted(texts) == sorted(f"item {n}" for n in [*range(20), *range(100, 120)])
    # Items that were added together stay together.
    assert all(int(a[5:]) + 100 == int(b[5:]) for a, b in zip(texts[::2], texts[1::2], strict=True))
    popped: Items = await asyncio.gather(*((session, other)[n % 2].pop_item() for n in range(41)))
    assert sorted(item["content"] for item in popped if item is not None) == sorted(texts)


def lose_the_first_answer(
    session: BufferedSession, method: str, monkeypatch: pytest.MonkeyPatch, *, stored: bool
) -> None:
    """The first call of this method of the store gets no answer. `stored`: it took effect anyway."""
    call: Callable[..., Any] = getattr(session._store, method)
    lost: list[str] = []

    async def losing(thread_id: str, what: Items) -> Any:
        if lost:
            return await call(thread_id, what)
        lost.append(thread_id)
        if stored:
            await call(thread_id, what)
        raise OutcomeUnknown(thread_id, "token")

    monkeypatch.setattr(session._store, method, losing)


@pytest.mark.parametrize("stored", [True, False])
async def test_a_lost_answer_adds_items_once(
    session: BufferedSession, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    lose_the_first_answer(session, "append_messages", monkeypatch, stored=stored)
    await session.add_items([said(1)])
    assert await session.get_items() == [said(1)]


@pytest.mark.parametrize("stored", [True, False])
async def test_a_lost_answer_pops_one_item(
    session: BufferedSession, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    await session.add_items([said(n) for n in range(3)])
    lose_the_first_answer(session, "delete_messages", monkeypatch, stored=stored)
    assert await session.pop_item() == said(2)
    assert await session.get_items() == [said(0), said(1)]


async def test_a_session_id_may_be_as_long_as_a_threads(store: BufferedThreadStore) -> None:
    session = BufferedSession("s" * 1024, store)
    await session.replace_items([said(1)])
    assert await session.get_items() == [said(1)]


async def test_popping_does_not_wait_for_a_flush_whatever_the_stores_level() -> None:
    options = BufferConfig(flusher=False)
    level = Consistency.EVENTUAL
    async with await BufferedThreadStore.open(
        MemoryThreadStore(), nats=MemoryNats(), config=options, consistency=level
    ) as store:
        session = BufferedSession(fresh("session"), store)
        await session.add_items([said(n) for n in range(3)])
        async with asyncio.timeout(10):
            assert [await session.pop_item() for _ in range(3)] == [said(2), said(1), said(0)]


class Away(MemoryThreadStore):
    """A store that does not answer while `away`."""

    away = False

    async def load_checkpoint(self, thread_id: str) -> Any:
        if self.away:
            raise StoreUnavailable("it does not answer")
        return await super().load_checkpoint(thread_id)


@pytest.mark.parametrize("flushed", [True, False])
async def test_a_session_goes_on_while_postgres_is_away(flushed: bool) -> None:
    """Regression: only what a checkpoint had begun was read from the log alone."""
    inner, nats = Away(), MemoryNats()
    async with await BufferedThreadStore.open(inner, nats=nats) as store:
        session = BufferedSession(fresh("session"), store)
        await session.add_items([said(0), said(1)])
        if flushed:
            await store.force_flush_all()
        inner.away = True
        async with await BufferedThreadStore.open(inner, nats=nats, config=BufferConfig(flusher=False)) as another:
            other = BufferedSession(session.session_id, another)
            assert await other.get_items() == [said(0), said(1)]
            await other.add_items([said(2)])
            await session.add_items([said(3)])
            assert await other.pop_item() == said(3)
        inner.away = False
        await store.force_flush_all()
        assert await session.get_items() == [said(0), said(1), said(2)]


async def test_a_compaction_replaces_the_list_in_one_entry(session: BufferedSession) -> None:
    """Regression: the SDK cleared the session before it added the compacted items, and a crash in between lost all."""

    async def clear_session() -> None:
        raise AssertionError("it must not be cleared")

    class Transformed(BufferedSession):
        """Would store items in a form of its own."""

    await session.add_items([said(0), said(1)])
    session.clear_session = clear_session  # type: ignore[method-assign]
    compacting = OpenAIResponsesCompactionSession(session.session_id, session, client=cast(Any, object()))
    await compacting._replace_underlying_session_items(output_items=[said(7)], previous_items=[said(0), said(1)])
    assert await session.get_items() == [said(7)]
    assert not await Transformed(session.session_id, session._store)._atomic_replace_items([said(8)])
    assert await session.get_items() == [said(7)]
