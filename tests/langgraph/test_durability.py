"""With durability="async", LangGraph runs on while its writes wait; how much waits, and how long, is bounded."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph

from bufstore import BufstoreError
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver
from fault_proxy.proxy import FaultProxy
from langgraph_savers import Place, config

_STEPS, _THREADS, _BYTES = 12, 4, 50_000
_MAX = 1 << 19


class _State(TypedDict, total=False):
    steps: Annotated[int, operator.add]
    notes: list[str]


@pytest.fixture
async def proxy(servers: Servers) -> AsyncIterator[FaultProxy]:
    """A fault proxy in front of NATS."""
    async with FaultProxy("127.0.0.1", servers.nats.port, protocol="nats") as running:
        yield running


def _place(servers: Servers, proxy: FaultProxy) -> Place:
    place = Place(servers)
    place.nats = servers.nats.url.replace(f":{servers.nats.port}", f":{proxy.port}")
    return place


def _counter(saver: AsyncBufferedSaver, on_step: Callable[[int], None]) -> Any:
    """A graph of many quick steps, each of which changes a large value."""

    async def step(state: _State) -> _State:
        on_step(state["steps"])
        return {"steps": 1, "notes": [chr(97 + state["steps"] % 26) * _BYTES]}

    graph = StateGraph(_State)
    graph.add_node("step", step)
    graph.add_edge(START, "step")
    graph.add_conditional_edges("step", lambda state: END if state["steps"] >= _STEPS else "step", ["step", END])
    return graph.compile(checkpointer=saver)


def _watched(saver: AsyncBufferedSaver) -> list[int]:
    """Return a list that collects the bytes waiting for the log after each arrival."""
    backlog, seen = saver.engine.all[0].backlog, [0]
    backlog.bytes_max = _MAX
    enter = backlog.enter

    def entered(size: int) -> int:
        cost = enter(size)
        seen.append(backlog.bytes)
        return cost

    backlog.enter = entered  # type: ignore[method-assign]
    return seen


async def _run(saver: AsyncBufferedSaver, on_step: Callable[[int], None]) -> list[Any]:
    graph = _counter(saver, on_step)
    options: Any = {"recursion_limit": 2 * _STEPS}
    runs = (graph.ainvoke({"steps": 0}, config(f"t{n}") | options, durability="async") for n in range(_THREADS))
    return await asyncio.gather(*runs, return_exceptions=True)


async def test_a_slow_log_bounds_what_waits_and_nothing_is_lost(servers: Servers, proxy: FaultProxy) -> None:
    place, ahead = _place(servers, proxy), 0

    async with place.saver(append_timeout_s=30.0) as saver:
        seen = _watched(saver)

        def on_step(step: int) -> None:
            nonlocal ahead
            ahead = max(ahead, step if saver.engine.all[0].backlog.full else 0)

        proxy.to_server.bytes_per_s = 4 << 20
        ended = await _run(saver, on_step)
        proxy.heal()
        assert [run["steps"] for run in ended] == [_STEPS] * _THREADS
        assert ahead > 1, "the graphs went on while their writes waited for room"
        assert _MAX <= max(seen) < _MAX + 2 * _BYTES
        assert saver.engine.all[0].backlog.bytes == 0
    async with place.plain() as plain:
        for n in range(_THREADS):
            found = [item async for item in plain.alist(config(f"t{n}"))]
            assert len(found) == _STEPS + 2
            assert found[0].checkpoint["channel_values"]["steps"] == _STEPS


async def test_a_log_that_goes_away_ends_every_call_in_time(servers: Servers, proxy: FaultProxy) -> None:
    timeout_s = 1.5
    async with _place(servers, proxy).saver(append_timeout_s=timeout_s) as saver:
        seen, longest = _watched(saver), 0.0
        aput = saver.aput

        async def timed(*args: Any) -> Any:
            nonlocal longest
            began = time.monotonic()
            try:
                return await aput(*args)
            finally:
                longest = max(longest, time.monotonic() - began)

        saver.aput = timed  # type: ignore[method-assign]

        def on_step(step: int) -> None:
            if step == 3:
                proxy.to_server.hold()

        ended = await _run(saver, on_step)
        proxy.heal()
        assert all(isinstance(error, BufstoreError) for error in ended), ended
        assert max(seen) < _MAX + 2 * _BYTES
        # Its own time, behind that of waiting for room; the rest is for a machine that stands still.
        assert timeout_s <= longest < 2 * timeout_s + 10
        assert saver.engine.all[0].backlog.bytes == 0
        assert not saver.engine.all[0].backlog.full
