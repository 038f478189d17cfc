"""LangGraph's checkpoints through the log: swap one class.

    from bufstore.langgraph import AsyncBufferedSaver

    async with AsyncBufferedSaver.from_conn_string(postgres, nats) as saver:
        graph = builder.compile(checkpointer=saver)

See docs/LANGGRAPH.md. Needs the extra ``bufstore[langgraph]``.
"""

from typing import TYPE_CHECKING

from bufstore import _lazy

if TYPE_CHECKING:
    from bufstore.errors import ConcurrentWriter as ConcurrentWriter
    from bufstore.langgraph.blocking_saver import BufferedSaver as BufferedSaver
    from bufstore.langgraph.engine import DEFAULT_LOG as DEFAULT_LOG
    from bufstore.langgraph.memory_store import MemoryCheckpointStore as MemoryCheckpointStore
    from bufstore.langgraph.postgres.store import PostgresCheckpointStore as PostgresCheckpointStore
    from bufstore.langgraph.saver import AsyncBufferedSaver as AsyncBufferedSaver
else:
    __all__, __getattr__, __dir__ = _lazy.names(
        __name__,
        {
            "bufstore.errors": ("ConcurrentWriter",),
            "bufstore.langgraph.blocking_saver": ("BufferedSaver",),
            "bufstore.langgraph.engine": ("DEFAULT_LOG",),
            "bufstore.langgraph.memory_store": ("MemoryCheckpointStore",),
            "bufstore.langgraph.postgres.store": ("PostgresCheckpointStore",),
            "bufstore.langgraph.saver": ("AsyncBufferedSaver",),
        },
    )
