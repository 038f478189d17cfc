"""Holds a position, so that any number of reads see the same state while the log and Postgres go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field

from bufstore.config import Secretive
from bufstore.nats.ranges import LogReader
from bufstore.spark.config import Deployment
from bufstore.spark.connection_options import connection_options
from bufstore.spark.process_loop import loop
from bufstore.spark.source.log_scan import patiently
from bufstore.spark.tables.moment import Moment
from bufstore.spark.tables.table_scan import end_behind


@dataclass(frozen=True, repr=False)
class HeldPosition(Secretive):
    """What `hold_position` holds."""

    #: The first position that is not read.
    position: int
    #: The options for ``spark.read.format("bufstore").options(**held.options)``; they contain the logins.
    options: Mapping[str, str] = field(metadata={"secret": True})


@contextmanager
def hold_position(deployment: Deployment) -> Iterator[HeldPosition]:
    """Hold the position at which the log ends now: in the block, each read with the options shows threads, runs and
    messages as they were at that position, whatever is written and flushed meanwhile.

    A transaction of Postgres holds the position, and keeps what it sees from being cleaned up: hold it no longer than
    you need it. Also hold it for less than `retain_after_flush_s`, because what the log holds above Postgres must stay
    in the log. Raises StoreUnavailable, LogUnavailable.
    """
    stack = AsyncExitStack()

    async def begin() -> HeldPosition:
        moment = await stack.enter_async_context(Moment(deployment.postgres, deployment.schema))
        snapshot, ledger = await moment.export(), await moment.ledger()
        reader = LogReader(deployment.server, deployment.stream)
        await reader.open()
        try:
            log = await patiently(reader.look)  # after the snapshot was exported
        finally:
            await reader.aclose()
        position = end_behind(ledger, log)
        return HeldPosition(
            position,
            connection_options(deployment.server)
            | {
                "stream": deployment.stream,
                "postgresUrl": deployment.postgres,
                "schema": deployment.schema,
                "endingPosition": str(position),
                "postgresSnapshot": snapshot,
            },
        )

    try:
        yield loop().run(begin())
    finally:
        loop().run(stack.aclose())
