"""Before and after a batch: which query may write under an app id, and whether a repeated batch is the same one.

A repeated row is recognized by its number (docs/adr/0014). Other rows under old numbers are not: a query with a new
checkpoint folder begins at batch 0 again, and a source that cannot be replayed gives other rows for a batch. Both would
be dropped silently; both are found here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from bufstore.errors import ConfigError, InvalidRecord
from bufstore.spark.config import SinkConfig
from bufstore.spark.process_loop import loop
from bufstore.spark.sink.row_writer import RowCounts
from bufstore.spark.sink.spark_ledger import Holder, SparkLedger

_log = logging.getLogger(__name__)

T = TypeVar("T")


def begin(config: SinkConfig, query_id: str, batch_id: int) -> Holder:
    """Take the app id for a batch. Raises ConfigError, with both ways out, when another query has it."""

    async def taking(ledger: SparkLedger) -> Holder:
        await ledger.setup()
        return await ledger.begin(config.app_id, query_id, batch_id)

    holder = _with_ledger(config, taking)
    if holder.query_id != query_id or batch_id < holder.batch_id:
        raise ConfigError(
            f"app id {config.app_id!r} has written batch {holder.batch_id} of query "
            f"{holder.query_id or '(unknown)'}, and this is batch {batch_id} of query {query_id or '(unknown)'}. Its "
            "rows would be taken for repeats. Either continue with the checkpoint folder of that query, or give this "
            "query an app id of its own."
        )
    return holder


def was_done(config: SinkConfig, holder: Holder, batch_id: int, fingerprint: Callable[[], int]) -> bool:
    """Whether the batch was done before. Raises ConfigError when it was, with other rows: nothing of it is written.

    `fingerprint` sums up the present rows; it is called only when the sum is needed.
    """
    if holder.batch_id != batch_id or holder.fingerprint is None:
        return False
    if holder.fingerprint == fingerprint():
        return True
    raise ConfigError(
        f"batch {batch_id} of app id {config.app_id!r} was done before with other rows: its new rows would be "
        "taken for repeats. Either the source cannot be replayed (cache or copy it), or a query with a new "
        "checkpoint folder has the app id of an old one: give it its own app id."
    )


def end(config: SinkConfig, batch_id: int, outcome: RowCounts, fingerprint: int) -> None:
    """Note that a batch is done. Raises InvalidRecord for bad rows that fail it."""
    _log.info("batch %d of %s: %s", batch_id, config.app_id, outcome, extra={"action": "spark_batch"})
    check_bad(config, outcome)
    rows = outcome.written + outcome.repeated + outcome.bad

    async def noting(ledger: SparkLedger) -> None:
        await ledger.done(config.app_id, batch_id, fingerprint, rows, outcome.repeated, outcome.bad)

    _with_ledger(config, noting)


def check_bad(config: SinkConfig, outcome: RowCounts) -> None:
    """Raise InvalidRecord for bad rows, when they fail the batch."""
    if outcome.bad and config.bad_rows == "fail":
        raise InvalidRecord(
            f"{outcome.bad} rows cannot become checkpoints ({outcome.behind} rows behind them in their threads wait, "
            "all others are written); correct them at the source in the same order, or set bad_rows='quarantine': "
            f"{'; '.join(outcome.reasons)}"
        )


def setup(config: SinkConfig) -> None:
    _with_ledger(config, SparkLedger.setup)


def _with_ledger(config: SinkConfig, work: Callable[[SparkLedger], Awaitable[T]]) -> T:
    async def working() -> T:
        ledger = SparkLedger(config.postgres, config.schema)
        await ledger.open()
        try:
            return await work(ledger)
        finally:
            await ledger.aclose()

    return loop().run(working())
