"""Drains a huge backlog: the executors of a Spark job are flushers until everything in the log now is in Postgres.

A flusher takes whole partitions, and a thread never leaves its partition. So Spark needs to shuffle nothing, and the
promises of a flusher (watermarks, cursors, quarantine, fencing) still hold: beside the app's flushers, which hand over
a fair share of the partitions; beside another drain; and after a crash, which costs no more than a lease.
docs/adr/0016 says why Spark does not merge the entries itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from bufstore.buffer.flush.flusher_state import state_of_all
from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError, ConfigError, FlushTimeout
from bufstore.log_lines import LogLines
from bufstore.spark.config import Deployment
from bufstore.spark.job_description import cores_of, described
from bufstore.spark.process_loop import loop
from bufstore.spark.task import Counts, outcomes
from bufstore.spark.worker_errors import of_servers
from bufstore.threads.buffered import BufferedThreadStore

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import SparkSession

_log = LogLines(__name__)

_LOOK_S = 1.0
#: The number of tasks on Connect, which does not tell how many cores there are.
_TASKS = 8


class DrainReport(msgspec.Struct, kw_only=True):
    """What a drain did. Entries that the app's own flushers moved meanwhile are not counted."""

    #: The entries, the changes of threads that they were coalesced into, and the transactions that wrote these.
    entries: int
    changes: int
    transactions: int
    #: Entries that cannot be applied, and are in quarantine now.
    parked: int
    tasks: int
    seconds: float


class _Late(msgspec.Struct, frozen=True):
    """A FlushTimeout in the form in which a task reports it to the driver."""

    thread_id: str | None
    target: int
    flushed: int
    reason: str
    partition: int | None

    @classmethod
    def of(cls, error: FlushTimeout) -> _Late:
        return cls(*(getattr(error, name) for name in cls.__struct_fields__))

    def as_error(self) -> FlushTimeout:
        return FlushTimeout(**msgspec.structs.asdict(self))


class _Flushed(Counts):
    """What a task did."""

    entries: int = 0
    changes: int = 0
    transactions: int = 0
    parked: int = 0
    late: list[_Late] = msgspec.field(default_factory=list)


def bulk_drain(
    spark: SparkSession,
    deployment: Deployment,
    *,
    tasks: int | None = None,
    timeout_s: float = 3600.0,
    on_lag: Callable[[int], None] | None = None,
) -> DrainReport:
    """Return once everything that is in the log now is in Postgres, flushed by `tasks` tasks (default: Spark's cores).

    More tasks than the log has partitions do not help. `on_lag` is called now and then with the number of positions
    that are left; its errors are logged. Raises FlushTimeout after `timeout_s` (what is flushed by then stays so),
    ConfigError when there is no log, LogUnavailable.
    """
    if tasks is not None and tasks < 1:
        raise ConfigError(f"tasks must be at least 1, not {tasks}")
    began, on = time.perf_counter(), loop()
    store = on.run(_store(deployment, flusher=False))
    try:
        log = store.lanes.config.log
        wanted = max(1, min(tasks or cores_of(spark) or _TASKS, log.lanes * log.partitions))
        watching = on.start(_watch(store, on_lag)) if on_lag is not None else None
        try:
            slots, whole = spark.range(0, wanted, 1, wanted), _Flushed()
            with described(slots, f"bufstore: drain {deployment.stream}"), of_servers():
                for found in outcomes(slots, partial(_task, deployment, timeout_s), _Flushed):
                    whole.add(found)
        finally:
            if watching is not None:
                watching.cancel()
    finally:
        on.run(store.aclose())
    if whole.late:
        raise whole.late[0].as_error()
    return DrainReport(
        entries=whole.entries,
        changes=whole.changes,
        transactions=whole.transactions,
        parked=whole.parked,
        tasks=wanted,
        seconds=round(time.perf_counter() - began, 3),
    )


async def _watch(store: BufferedThreadStore, on_lag: Callable[[int], None]) -> None:
    while True:
        try:
            with suppress(BufstoreError):  # the figure is only shown
                on_lag(sum((await store.lag()).values()))
        except Exception:
            _log.exception("on_lag of a drain failed", extra={"action": "spark_on_lag"})
        await asyncio.sleep(_LOOK_S)


async def _store(deployment: Deployment, *, flusher: bool) -> BufferedThreadStore:
    config = BufferConfig.fitting(await deployment.find_log(), flusher=flusher)
    return await BufferedThreadStore.open(deployment.store(pool_size=2), nats=deployment.server, config=config)


def _task(deployment: Deployment, timeout_s: float, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[_Flushed]:
    for batch in batches:
        if batch.num_rows:
            yield asyncio.run(_flush(deployment, timeout_s))


async def _flush(deployment: Deployment, timeout_s: float) -> _Flushed:
    late: list[_Late] = []
    async with await _store(deployment, flusher=True) as store:
        flushers = [lane.flusher for lane in store.lanes.all if lane.flusher is not None]
        try:
            await store.force_flush_all(timeout_s=timeout_s)
        except FlushTimeout as e:
            # If it were raised here, Spark would run the task again, for as long.
            late.append(_Late.of(e))
    # Only when the flushers have ended: Postgres may show a commit before the flusher has heard of it and counts it.
    # Not `statistics`: it also counts what is not flushed, and for that it may have to read the log.
    state = state_of_all([flusher.state for flusher in flushers])
    return _Flushed(state.entries, state.changes, state.transactions, state.parked, late)
