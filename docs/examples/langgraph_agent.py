"""An agent with a tool, a subgraph and a question to a human; kill it, or Postgres, at any moment, and go on:

python docs/examples/langgraph_agent.py POSTGRES NATS THREAD ask        # begins, and stops at the question
python docs/examples/langgraph_agent.py POSTGRES NATS THREAD go-on      # after a kill: from the last step on
python docs/examples/langgraph_agent.py POSTGRES NATS THREAD yes        # answers the question
"""

import asyncio
import os
import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from bufstore import BufferConfig
from bufstore.langgraph import DEFAULT_LOG, AsyncBufferedSaver

#: How long a process waits for Postgres when it starts and ends.
CONFIG = BufferConfig(log=DEFAULT_LOG, flush_timeout_s=3.0)


@tool
async def look_up_booking(passenger: str) -> str:
    """Find the passenger's booking."""
    print("looking up …", flush=True)
    await asyncio.sleep(float(os.environ.get("TOOL_SECONDS", "0")))
    return f"{passenger}: flight BS 35, one bag"


async def agent(state: MessagesState) -> MessagesState:
    """Where a model would decide: look something up first, then say what is next."""
    if isinstance(state["messages"][-1], ToolMessage):
        return {"messages": [AIMessage("Your bag was left in Zürich. I can have it sent.")]}
    call = {"name": "look_up_booking", "args": {"passenger": "Ada"}, "id": "call-1"}
    return {"messages": [AIMessage("", tool_calls=[call])]}


async def price(state: MessagesState) -> MessagesState:
    """The first step of the subgraph."""
    return {"messages": [AIMessage("That is 40 francs.")]}


async def approve(state: MessagesState) -> MessagesState:
    """The second: a human answers, maybe days later and in another process."""
    answer = interrupt("Send the bag for 40 francs?")
    return {"messages": [HumanMessage(answer)]}


def builder() -> StateGraph[Any, Any, Any, Any]:
    """The graph."""
    shipping = StateGraph(MessagesState)
    shipping.add_node("price", price)
    shipping.add_node("approve", approve)
    shipping.add_edge(START, "price")
    shipping.add_edge("price", "approve")

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([look_up_booking]))
    graph.add_node("shipping", shipping.compile())
    graph.add_edge(START, "agent")
    graph.add_conditional_edges(
        "agent", lambda state: "tools" if state["messages"][-1].tool_calls else "shipping", ["tools", "shipping"]
    )
    graph.add_edge("tools", "agent")
    graph.add_edge("shipping", END)
    return graph


async def main(postgres: str, nats: str, thread_id: str, what: str) -> None:
    """One run, from the question, from where it was killed, or from the answer on."""
    start = {"ask": {"messages": [HumanMessage("Where is my bag?")]}, "go-on": None}
    async with AsyncBufferedSaver.from_conn_string(postgres, nats, config=CONFIG) as saver:
        graph = builder().compile(checkpointer=saver)
        result = await graph.ainvoke(
            start[what] if what in start else Command(resume=what),
            {"configurable": {"thread_id": thread_id}},
            durability="sync",
        )
        for message in result["messages"]:
            print(f"{message.type}: {message.content}")
        for question in result.get("__interrupt__", ()):
            print(f"question: {question.value}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
