"""Real graphs: an agent with a tool, a subgraph and a step that waits for a human; one with a DeltaChannel."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypedDict

from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt


class State(TypedDict, total=False):
    """The agent's state."""

    said: Annotated[list[str], operator.add]
    turns: int
    approved: str


async def _nothing() -> None:
    pass


def assistant(saver: BaseCheckpointSaver[str] | None, on_tool: Callable[[], Awaitable[None]] = _nothing) -> Any:
    """Return the compiled agent. `on_tool` runs inside the subgraph, between two of its steps."""

    async def look_up(state: State) -> State:
        await on_tool()
        return {"said": ["tool: looked up"]}

    async def sum_up(state: State) -> State:
        return {"said": [f"tool: {len(state['said'])} lines"]}

    research = StateGraph(State)
    research.add_node("look_up", look_up)
    research.add_node("sum_up", sum_up)
    research.add_edge(START, "look_up")
    research.add_edge("look_up", "sum_up")

    async def think(state: State) -> State:
        return {"said": ["agent: thinking"], "turns": state.get("turns", 0) + 1}

    async def ask(state: State) -> State:
        return {"approved": interrupt("may I?"), "said": ["agent: asked"]}

    graph = StateGraph(State)
    graph.add_node("think", think)
    graph.add_node("research", research.compile())
    graph.add_node("ask", ask)
    graph.add_edge(START, "think")
    graph.add_edge("think", "research")
    graph.add_edge("research", "ask")
    graph.add_edge("ask", END)
    return graph.compile(checkpointer=saver)


def _written(before: list[str], some: Sequence[list[str]]) -> list[str]:
    return [*(before or []), *(entry for entries in some for entry in entries)]


class Diary(TypedDict):
    """A list that is stored as a history of updates, with a snapshot at every third."""

    entries: Annotated[list[str], DeltaChannel(_written, list, snapshot_frequency=3)]


async def _write(state: Diary) -> Diary:
    return {"entries": [f"entry {len(state['entries'])}"]}


def diary(saver: BaseCheckpointSaver[str]) -> Any:
    """Return a compiled graph with a DeltaChannel."""
    graph = StateGraph(Diary)
    graph.add_node("one", _write)
    graph.add_node("two", _write)
    graph.add_edge(START, "one")
    graph.add_edge("one", "two")
    graph.add_edge("two", END)
    return graph.compile(checkpointer=saver)
