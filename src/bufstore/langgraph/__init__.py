"""LangGraph's checkpoints through the log: swap one class.

    from bufstore.langgraph import AsyncBufferedSaver

    async with AsyncBufferedSaver.from_conn_string(postgres, nats) as saver:
        graph = builder.compile(checkpointer=saver)

See docs/LANGGRAPH.md. Needs the extra ``bufstore[langgraph]``.
"""

from bufstore.errors import ConcurrentWriter
from bufstore.langgraph.blocking_saver import BufferedSaver
from bufstore.langgraph.memory_store import MemoryCheckpointStore
from bufstore.langgraph.postgres.store import PostgresCheckpointStore
from bufstore.langgraph.saver import DEFAULT_LOG, AsyncBufferedSaver

__all__ = [
    "DEFAULT_LOG",
    "AsyncBufferedSaver",
    "BufferedSaver",
    "ConcurrentWriter",
    "MemoryCheckpointStore",
    "PostgresCheckpointStore",
]
