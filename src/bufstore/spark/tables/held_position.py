"""Holds a position, so that any number of reads see the same state while the log and Postgres go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field

from bufstore.config import Secretive
from bufstore.spark.config import Deployment
from bufstore.spark.connection_options import connection_options
from bufstore.spark.process_loop import loop
from bufstore.spark.tables.lane_logs import logs_at
from bufstore.spark.tables.moment import Moment
from bufstore.spark.tables.table_options import TableOptions


@dataclass(frozen=True, repr=False)
class HeldPosition(Secretive):
    """What `hold_position` holds."""

    #: The first position that is not read, of each lane, the first lane's first.
    positions: Sequence[int]
    #: The options for ``spark.read.format("bufstore").options(**held.options)``; they contain the logins.
    options: Mapping[str, str] = field(metadata={"secret": True})


@contextmanager
def hold_position(deployment: Deployment) -> Iterator[HeldPosition]:
    """Hold the position at which the log ends now: in the block, each read with the options shows threads, runs and
    messages as they were at that position, whatever is written and flushed meanwhile. With several lanes it is one
    position of each lane, and these are no common moment.

    A transaction of Postgres holds the position, and keeps what it sees from being cleaned up: hold it no longer than
    you need it. Also hold it for less than `retain_after_flush_s`, because what the log holds above Postgres must stay
    in the log. Raises StoreUnavailable, LogUnavailable.
    """
    stack = AsyncExitStack()

    async def begin() -> HeldPosition:
        read = TableOptions(
            nats=deployment.server,
            postgres=deployment.postgres,
            schema=deployment.schema,
            stream=deployment.stream,
            table="threads",
            columns=(),
        )
        moment = await stack.enter_async_context(Moment(read.postgres, read.schema))
        snapshot = await moment.export()
        logs = await logs_at(read, moment)  # after the snapshot was exported
        positions = [one.until for one in logs.by_lane.values()]
        options = connection_options(read.nats) | {
            "stream": read.stream,
            "postgresUrl": read.postgres,
            "schema": read.schema,
            "endingPosition": ",".join(map(str, positions)),
            "postgresSnapshot": snapshot,
        }
        return HeldPosition(positions, options)

    try:
        yield loop().run(begin())
    finally:
        loop().run(stack.aclose())
