"""LangGraph's own conformance suite, in full, with more and less frequent flushes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from langgraph.checkpoint.conformance import checkpointer_test, validate

from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver
from langgraph_savers import Place
from thorough import seldom

#: The number of its tests by capability, as of langgraph-checkpoint-conformance 0.0.2.
TESTS = {
    "put": 17,
    "put_writes": 10,
    "get_tuple": 10,
    "list": 16,
    "delete_thread": 5,
    "delete_for_runs": 7,
    "copy_thread": 8,
    "prune": 8,
}


async def _conforms(servers: Servers | None, flush: float, lanes: int = 1) -> None:
    @checkpointer_test(name="AsyncBufferedSaver")
    async def fresh() -> AsyncIterator[AsyncBufferedSaver]:
        async with Place(servers, lanes=lanes).saver(flush=flush) as saver:
            yield saver

    report = (await validate(fresh)).to_dict()
    failures = [f for result in report["results"].values() for f in result["failures"]]
    assert not failures
    assert {name: result["tests_passed"] for name, result in report["results"].items()} == TESTS
    assert report["conformance_level"] == "FULL"


@pytest.mark.parametrize("lanes", [1, *seldom(2)])
@pytest.mark.parametrize("flush", [0.3, *seldom(0, 1)])
async def test_it_passes_on_real_servers(servers: Servers, flush: float, lanes: int) -> None:
    await _conforms(servers, flush, lanes)


@pytest.mark.parametrize(("flush", "lanes"), [(0, 1), (0.3, 1), (0.3, 2), (1, 1)])
async def test_it_passes_in_memory(flush: float, lanes: int) -> None:
    await _conforms(None, flush, lanes)
