"""Making sure that tables and log exist, and that the log is the one that Postgres speaks of."""

from __future__ import annotations

import asyncio

from bufstore.buffer.ports import Ledger, Log
from bufstore.buffer.salvage import reason_to_repair
from bufstore.buffer.subjects import first_position
from bufstore.buffer.takeover import mismatch, proven
from bufstore.config import BufferConfig
from bufstore.errors import LogRolledBack, StoreUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.postgres.store import PostgresThreadStore
from bufstore.threads.protocol import WrappableStore


async def prepare_log(log: Log, ledger: Ledger, store: WrappableStore, config: BufferConfig) -> None:
    """Make sure that the log exists and that it is the one that Postgres speaks of."""
    epoch = await log.epoch()
    if epoch is not None:
        config.check_fits(log.windows.rely_s)  # while the log's window is changed, that may be less than is configured
    try:
        # A Postgres that hangs must not hold up an app that can do without it.
        async with asyncio.timeout(config.flush_timeout_s if epoch is not None else None):
            await prepare_store(log, ledger, store, config)
    except TimeoutError:
        return
    except StoreUnavailable as e:
        if epoch is not None:
            return  # the flusher does it before its first flush
        raise StoreUnavailable(
            f"stream {config.log.stream} does not exist, and only Postgres can tell at which position "
            f"a new one may begin: {e}"
        ) from e


async def prepare_store(log: Log, ledger: Ledger, store: WrappableStore, config: BufferConfig) -> None:
    """Create or migrate the tables, and compare the log with what they say; create it if it is missing."""
    await ledger.setup()
    if isinstance(store, PostgresThreadStore):
        await store.setup()
    epoch, known = await log.epoch(), await ledger.epoch()
    reason = await compare(log, ledger, config.log.stream, epoch, known)
    if reason is not None:
        log.refuse(reason)
        raise LogRolledBack(reason)
    if epoch is None:
        await ledger.set_epoch(known or 0)
        reach(Failpoint.EPOCH_SET)
        await log.create(known or 0)
        reach(Failpoint.STREAM_CREATED)
        await log.epoch()
    elif known is None:
        await ledger.set_epoch(epoch)


async def apart(log: Log, ledger: Ledger, config: BufferConfig) -> str | None:
    """`compare` of what there is now."""
    return await compare(log, ledger, config.log.stream, await log.epoch(), await ledger.epoch())


async def compare(log: Log, ledger: Ledger, stream: str, epoch: int | None, known: int | None) -> str | None:
    """Why the log is not the one that Postgres speaks of; None when it is. Raises Unavailable errors."""
    return await proven(log, lambda: _compare(log, ledger, stream, epoch, known))


async def _compare(log: Log, ledger: Ledger, stream: str, epoch: int | None, known: int | None) -> str | None:
    # Postgres first: the log may only grow.
    cursors = (await ledger.cursors()).values()
    applied = max((c.seq for c in cursors), default=0)
    first, end = await log.bounds() if epoch is not None else (0, 0)
    start = first_position(epoch if epoch is not None else known or 0)
    reason = reason_to_repair(
        stream=stream, log_epoch=epoch, epoch=known, log_start=start, log_first=first, log_end=end, applied=applied
    )
    if reason is not None or epoch is None:
        return reason
    # All partitions at once: where one went apart, the others are not to go on beside it.
    return next(filter(None, await asyncio.gather(*(mismatch(log, cursor) for cursor in cursors))), None)
