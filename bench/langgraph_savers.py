"""LangGraph's savers: ours, its own for Postgres, that one without its lock, and its own in memory."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psycopg
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from bench.contestant import Contestant, Place, text
from bufstore import BufferConfig, LogConfig
from bufstore.langgraph import AsyncBufferedSaver, PostgresCheckpointStore

#: Connections of each saver.
_POOL = 16


class Saver(Contestant):
    """Base: a step is a checkpoint with one changed message and a count, and the writes of its task."""

    saver: BaseCheckpointSaver[str]

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._at: dict[str, Any] = {}

    async def step(self, thread: str, number: int) -> Any:
        at = self._at.get(thread) or {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        version = self.saver.get_next_version(None if number == 0 else f"{number:032}", None)
        changed: dict[str, Any] = {"messages": version, "count": version}
        values = {"messages": [text(number)], "count": number}
        made = {**empty_checkpoint(), "v": 4, "channel_versions": changed, "channel_values": values}
        metadata: Any = {"source": "loop", "step": number, "parents": {}}
        at = self._at[thread] = await self.saver.aput(at, made, metadata, changed)  # type: ignore[arg-type]
        await self.saver.aput_writes(at, [("messages", text(number + 1)), ("count", number + 1)], f"task-{number}")

    async def react(self, label: str, threads: int, turns: int, durability: Any) -> float:
        """Return how long `turns` turns of a whole ReAct graph take on each of `threads` concurrent threads."""
        graph = react().compile(checkpointer=self.saver)

        async def talk(thread: str) -> None:
            for turn in range(turns):
                asked = {"messages": [HumanMessage(text(turn)[:1024])]}
                config: Any = {"configurable": {"thread_id": thread}}
                await graph.ainvoke(asked, config, durability=durability)

        began = time.perf_counter()
        await asyncio.gather(*(talk(f"{label}-{number}") for number in range(threads)))
        return time.perf_counter() - began

    async def flush(self) -> None:
        """Wait until everything is in Postgres."""


class OurSaver(Saver):
    """AsyncBufferedSaver. `options` are those of BufferConfig."""

    def __init__(self, place: Place, **options: Any) -> None:
        super().__init__(place)
        log = LogConfig(
            stream=f"LOG-{place.name}", bucket=f"hot-{place.name}", subject=place.name, max_bytes=place.log_bytes
        )
        self._config = BufferConfig(log=log, **({"append_timeout_s": 30.0} | options))

    async def open(self) -> None:
        name = self.place.name
        store = PostgresCheckpointStore(self.place.dsn, schema=name, buffer_schema=f"{name}_b", pool_size=_POOL)
        self.saver = self._ours = await AsyncBufferedSaver.open(store, nats=self.place.nats, config=self._config)

    async def close(self) -> None:
        await self._ours.aclose()

    async def flush(self) -> None:
        await self._ours.force_flush(timeout_s=600)


class PlainSaver(Saver):
    """AsyncPostgresSaver on a pool. `unlocked`: a semaphore as large as the pool replaces its lock."""

    server = "postgres"

    def __init__(self, place: Place, *, unlocked: bool = False) -> None:
        super().__init__(place)
        self._unlocked = unlocked

    async def open(self) -> None:
        name = f"{self.place.name}_{'unlocked' if self._unlocked else 'plain'}"
        async with await psycopg.AsyncConnection.connect(self.place.dsn, autocommit=True) as connection:
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {name}")
        self._pool = AsyncConnectionPool(
            make_conninfo(self.place.dsn, options=f"-c search_path={name}"),
            min_size=_POOL,
            max_size=_POOL,
            open=False,
            kwargs={"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row},
        )
        await self._pool.open(wait=True)
        saver = AsyncPostgresSaver(self._pool)  # type: ignore[arg-type]
        await saver.setup()
        if self._unlocked:
            saver.lock = asyncio.Semaphore(_POOL)  # type: ignore[assignment]
        self.saver = saver

    async def close(self) -> None:
        await self._pool.close()


class MemorySaver(Saver):
    """InMemorySaver, a new one for each load: the cost of LangGraph without durability."""

    async def load(self, callers: int, seconds: float, label: str) -> dict[str, float]:
        self.saver = InMemorySaver()
        return await super().load(callers, seconds, label)

    async def react(self, label: str, threads: int, turns: int, durability: Any) -> float:
        self.saver = InMemorySaver()
        return await super().react(label, threads, turns, durability)


def react() -> StateGraph[Any, Any, Any, Any]:
    """Return an agent that calls a tool once and answers; no model, so that only the graph and the saver take time."""

    async def agent(state: MessagesState) -> MessagesState:
        if isinstance(state["messages"][-1], ToolMessage):
            return {"messages": [AIMessage(text(1)[:1024])]}
        call = {"name": "look", "args": {}, "id": f"call-{len(state['messages'])}"}
        return {"messages": [AIMessage(text(2)[:1024], tool_calls=[call])]}

    async def tools(state: MessagesState) -> MessagesState:
        (call,) = _calls(state)
        return {"messages": [ToolMessage(text(3)[:1024], tool_call_id=call["id"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", tools)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", lambda state: "tools" if _calls(state) else END, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph


def _calls(state: MessagesState) -> list[Any]:
    last: Any = state["messages"][-1]
    return list(last.tool_calls)
