"""`repair`: how to go on after LogRolledBack, for any store that can be wrapped."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from bufstore.buffer.buffer import Buffer
from bufstore.buffer.lanes import check_layout, lane_configs, layout_of
from bufstore.buffer.operate.repair import Repair, Repaired
from bufstore.buffer.ports.ledger import Ledger
from bufstore.buffer.ports.log import Log
from bufstore.buffer.prepare import compare, proven_by_ledger
from bufstore.buffer.target import check_kind, check_same
from bufstore.config import BufferConfig
from bufstore.errors import ConfigError, LogRolledBack
from bufstore.memory.ledger import MemoryLedger
from bufstore.nats.session import Nats
from bufstore.threads.behind import buffer_of
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.protocol import WrappableStore


async def repair(
    store: WrappableStore,
    *,
    nats: Nats = "nats://127.0.0.1:4222",
    postgres: str | None = None,
    schema: str = "bufstore",
    config: BufferConfig | None = None,
    apply: bool = False,
    lane: int = 0,
) -> Repaired:
    """Find out why log and Postgres do not agree. With `apply`, save what the log has, and begin a new log.

    The other arguments are those of `BufferedThreadStore.open`. Without `apply` nothing is changed, and the report says
    what would be done. With it, all instances must have been stopped (ConfigError while flushers are alive); what the
    log still has and Postgres lacks is applied, or goes to quarantine if it fits nowhere; then the stream is removed,
    and the next start creates a new one. Safe to repeat. If nothing is wrong, nothing is done.
    `lane`: which of several lanes to look at; each is repaired by itself.

    Raises LogUnavailable, StoreUnavailable, StoreMisconfigured, ConfigError (ConfigDrift: the log belongs to another
    database, or with `apply` to another kind of store).
    """
    lanes = lane_configs(config or BufferConfig())
    if not 0 <= lane < len(lanes):
        raise ConfigError(f"there is no lane {lane}: LogConfig.lanes is {len(lanes)}")
    wanted = repairing(lanes[lane])
    buffer = buffer_of(store, nats, wanted, name="bufstore-repair", postgres=postgres, schema=schema)
    return await repair_buffer(buffer, apply=apply)


def repairing(config: BufferConfig) -> BufferConfig:
    """The configuration with which a log is repaired."""
    # The log bounds what goes to quarantine here, and there is no other place for it.
    return replace(config, quarantine_max=sys.maxsize, flusher=False)


async def repair_buffer(buffer: Buffer[Any, Any, Any], *, apply: bool) -> Repaired:
    """Do as `repair` does, with a buffer of any domain that has a configuration of `repairing` and is not connected."""
    backing, config = buffer.backing, buffer.config
    ledger: Ledger = buffer.ledger
    async with buffer.connected():
        await buffer.shared.check()  # if the bucket is another log's, only the name is wrong, and nothing is lost
        if apply:
            await ledger.setup()
        elif not await ledger.look():
            ledger = MemoryLedger(MemoryThreadStore())  # it says what new tables would
        check_layout(config.log, await ledger.layout())
        reason = await _reason(buffer.log, ledger, config.log.stream)
        if not apply:
            return await Repair(replace(buffer.parts, ledger=ledger), reason).look()
        for named in (buffer.log.target, await ledger.target()):
            check_kind(f"stream {config.log.stream}", named, backing.kind)
        await backing.setup()
        report = await Repair(buffer.parts, reason).carry_out()
        if report.done:
            # What was repaired is in the lanes of this configuration, also in a database that had known of none.
            await ledger.set_layout(layout_of(config.log))
        return report


async def _reason(log: Log, ledger: Ledger, stream: str) -> str | None:
    """Why a store would not open here; None when it would. Raises ConfigDrift for a log of another database."""
    noted, withdrawn = await ledger.target(), None
    epoch: int | None = 0
    try:
        epoch = await log.epoch()
    except LogRolledBack as e:
        withdrawn = e.reason
    named = log.target if epoch is not None else None
    check_same(stream, named, noted)
    reason = withdrawn or await compare(log, ledger, stream, epoch, await ledger.epoch())
    if reason is not None or named is None or noted is not None:
        return reason
    if not await proven_by_ledger(log, ledger):
        return (
            f"stream {stream} is flushed into another database ({named.id}), and nothing of it was flushed into "
            "this one"
        )
    return None
