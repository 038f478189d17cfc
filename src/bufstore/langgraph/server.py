"""The saver as LangGraph's server opens it: ``"checkpointer": {"path": "bufstore.langgraph.server:checkpointer"}``."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from bufstore.config import BufferConfig
from bufstore.errors import ConfigError
from bufstore.langgraph.engine import DEFAULT_LOG
from bufstore.langgraph.postgres.store import BUFFER_SCHEMA
from bufstore.langgraph.saver import AsyncBufferedSaver

__all__ = ["checkpointer"]

#: The settings that may be left out, with their defaults.
_DEFAULTS = {
    "BUFSTORE_NATS": "nats://127.0.0.1:4222",
    "BUFSTORE_LANGGRAPH_BUFFER_SCHEMA": BUFFER_SCHEMA,
    "BUFSTORE_LANGGRAPH_STREAM": DEFAULT_LOG.stream,
    "BUFSTORE_LANGGRAPH_BUCKET": DEFAULT_LOG.bucket,
    "BUFSTORE_LANGGRAPH_SUBJECT": DEFAULT_LOG.subject,
    "BUFSTORE_LANGGRAPH_LANES": "1",
}


@asynccontextmanager
async def checkpointer() -> AsyncIterator[AsyncBufferedSaver]:
    """Open a saver for the life of the server, from the environment: see docs/LANGGRAPH.md.

    Raises ConfigError without BUFSTORE_POSTGRES and for lanes that are no number, and what `AsyncBufferedSaver.open`
    raises.
    """
    postgres = os.environ.get("BUFSTORE_POSTGRES")
    if not postgres:
        raise ConfigError(
            "BUFSTORE_POSTGRES is not set: set it to the connection string of the database with LangGraph's tables"
        )
    nats, buffer_schema, stream, bucket, subject, lanes = (
        os.environ.get(name) or default for name, default in _DEFAULTS.items()
    )
    if not (lanes.isascii() and lanes.isdecimal() and len(lanes) < 4):
        raise ConfigError(f"BUFSTORE_LANGGRAPH_LANES must be a number, not {lanes[:9]!r}")
    log = replace(DEFAULT_LOG, stream=stream, bucket=bucket, subject=subject, lanes=int(lanes))
    async with AsyncBufferedSaver.from_conn_string(
        postgres,
        nats,
        schema=os.environ.get("BUFSTORE_LANGGRAPH_SCHEMA") or None,
        buffer_schema=buffer_schema,
        config=BufferConfig(log=log),
    ) as saver:
        yield saver
