"""Making sure that tables and log exist, and that the log is the one that Postgres speaks of."""

from __future__ import annotations

from bufstore.buffer.ports import Ledger
from bufstore.config import BufferConfig
from bufstore.errors import LogRolledBack, StoreUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.nats.log import NatsLog
from bufstore.nats.setup import EPOCH_BITS
from bufstore.postgres.store import PostgresThreadStore
from bufstore.threads.protocol import WrappableStore


async def prepare_log(log: NatsLog, ledger: Ledger, store: WrappableStore, config: BufferConfig) -> None:
    """Make sure that the log exists and that it is the one that Postgres speaks of."""
    epoch = await log.epoch()
    try:
        await prepare_store(log, ledger, store, config)
    except StoreUnavailable as e:
        if epoch is not None:
            return  # the flusher does it before its first flush
        raise StoreUnavailable(
            f"stream {config.log.stream} does not exist, and only Postgres can tell at which position "
            f"a new one may begin: {e}"
        ) from e


async def prepare_store(log: NatsLog, ledger: Ledger, store: WrappableStore, config: BufferConfig) -> None:
    """Create or migrate the tables, and compare the log with what they say; create it if it is missing."""
    await ledger.setup()
    if isinstance(store, PostgresThreadStore):
        await store.setup()
    epoch, known = await log.epoch(), await ledger.epoch()
    if epoch is None:
        epoch = known or 0
        start = max(1, epoch << EPOCH_BITS)
        if any(c.seq >= start for c in (await ledger.cursors()).values()):
            raise LogRolledBack(
                f"stream {config.log.stream} is gone, and Postgres has entries of its epoch {epoch}: "
                "restore it from a backup; or, to give up what it held unflushed, raise buffer_log.epoch by one"
            )
        await ledger.set_epoch(epoch)
        reach(Failpoint.EPOCH_SET)
        await log.create(epoch)
        reach(Failpoint.STREAM_CREATED)
        await log.epoch()
    elif known is None:
        if await log.first() > max(1, epoch << EPOCH_BITS):
            raise LogRolledBack(
                f"stream {config.log.stream} has been purged of entries that this Postgres (schema "
                f"{getattr(ledger, 'schema', None)!r}) never had: is it the right one?"
            )
        await ledger.set_epoch(epoch)
    elif known > epoch:
        raise LogRolledBack(f"stream {config.log.stream} has epoch {epoch}, Postgres knows epoch {known}")
    else:
        # A log put back from an older copy must take no writes: at positions that Postgres has passed they would be
        # acknowledged and never applied.
        await log.must_reach(max((c.seq for c in (await ledger.cursors()).values()), default=0))
