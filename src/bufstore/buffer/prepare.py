"""Makes sure that the tables and the log exist, and that the log is the one that Postgres knows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bufstore.buffer.domain import Backing
from bufstore.buffer.flush.takeover import mismatch, never_flushed, proven
from bufstore.buffer.lanes import check_layout, layout_of
from bufstore.buffer.operate.salvage import lost_what_is_archived, reason_to_repair
from bufstore.buffer.ports.ledger import Ledger
from bufstore.buffer.ports.log import Log
from bufstore.buffer.subjects import Subjects, first_position
from bufstore.buffer.target import Kind, Made, Target, check_kind, check_proof, check_same, check_stream, refusal
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import ConfigDrift, LogRolledBack, StoreUnavailable
from bufstore.failpoints import Failpoint, reach

#: How long the open of a store waits for a Postgres that cannot be reached. A startup probe allows more.
_AWAY_S = 5.0
_PROOF_S = 5.0


async def prepare_log(
    log: Log, ledger: Ledger, backing: Backing[Any], config: BufferConfig, *, away: bool = False
) -> bool:
    """Make sure that the log exists and that it is the one that Postgres knows. Return whether Postgres was there.

    `away`: it was not a moment ago, so an app that can do without it does not wait for it again.
    """
    epoch = await log.epoch()
    if epoch is not None:
        check_kind(f"stream {config.log.stream}", log.target, backing.kind)
        config.check_fits(log.windows.rely_s)  # less than is configured, maybe, while the log's window is being changed
        if away:
            return False
    try:
        # A hanging Postgres must not hold up an app that can do without it.
        async with asyncio.timeout(config.flush_timeout_s if epoch is not None else None):
            await prepare_store(log, ledger, backing, config, _AWAY_S if epoch is not None else None)
    except TimeoutError:
        return False
    except StoreUnavailable as e:
        if epoch is not None:
            return False  # the flusher does it before its first flush
        raise StoreUnavailable(
            f"stream {config.log.stream} does not exist, and only Postgres can tell at which position "
            f"a new one may begin: {e}"
        ) from e
    return True


async def prepare_store(
    log: Log, ledger: Ledger, backing: Backing[Any], config: BufferConfig, away_s: float | None = None
) -> None:
    """Create or migrate the tables, and compare the log with what they say; create the log if it is missing.

    `away_s`: see `Ledger.setup`.
    """
    await ledger.setup(away_s)
    await _meet(log, ledger, config.log, backing)


async def _meet(log: Log, ledger: Ledger, config: LogConfig, backing: Backing[Any]) -> None:
    """Make sure that log and ledger belong together and say so; create the store's tables and the log if they lack.

    Raises ConfigDrift, LogRolledBack.
    """

    async def compared() -> tuple[int | None, int | None, Target | None, Target | None]:
        epoch, known = await log.epoch(), await ledger.epoch()
        check_layout(config, await ledger.layout())
        return epoch, known, *await _check(log, ledger, config.stream, backing.kind, epoch, known)

    with _refusing(log):
        _, _, named, noted = await compared()
    # Not before: in a database that is refused, nobody may find tables that were never flushed into.
    await backing.setup()
    with _refusing(log):
        if named is None or noted is None:
            epoch, known, named, noted = await compared()  # the setup may have taken long
        if named is None or noted is None:
            await _name(log, ledger, config, backing.kind, epoch, known or 0, named)
        if await ledger.layout() is None:
            await ledger.set_layout(layout_of(config))  # the existing log was compared with this configuration
        epoch, made = await log.epoch(), await ledger.made()
        if epoch is not None and (made is None or made.epoch < epoch):
            await ledger.note_made(Made(epoch, config.stream))


@contextmanager
def _refusing(log: Log) -> Iterator[None]:
    """Refuse the log for what the block raises: who only finds it out before a flush must not go on writing."""
    try:
        yield
    except (ConfigDrift, LogRolledBack) as e:
        log.refuse(refusal(e))
        raise


async def _name(
    log: Log, ledger: Ledger, config: LogConfig, ours: Kind, epoch: int | None, known: int, named: Target | None
) -> None:
    """Record that log and ledger belong together, as the caller has found; create the log if it is missing.

    `named`: the target that the log names; None: there is no log.
    """
    stream = config.stream
    if epoch is None or named is None:
        await _check_waiting(ledger, config)
        target = await ledger.claim(known, new_target(ours, stream))
        if not known:  # after a repair, the next generation may have another name
            check_stream(stream, target.stream)
        reach(Failpoint.EPOCH_SET)
        await log.create(known, target)
        reach(Failpoint.STREAM_CREATED)
    else:
        target = await ledger.claim(epoch, named)
    await log.epoch()
    # Another process may have done the same with another database, or another store.
    check_kind(f"stream {stream}", log.target, ours)
    check_kind(f"the database of stream {stream}", target, ours)
    check_same(stream, log.target, target)


async def _check_waiting(ledger: Ledger, config: LogConfig) -> None:
    """Raise ConfigDrift if a new log would have threads in other partitions than those in which their entries wait.

    Whoever flushes a partition looks for waiting entries of that partition only.
    """
    subjects, cursors = Subjects(config.subject, config.partitions), await ledger.cursors()
    for partition in cursors:
        queues = await ledger.waiting.queues(partition)
        if any(subjects.partition(q.thread_id) != partition for q in queues):
            raise ConfigDrift(
                f"the database of stream {config.stream}",
                "partitions",
                expected=config.partitions,
                found=len(cursors),
                way_out="Entries wait in it, by partition, to be flushed: start with the number of partitions that the "
                "log had, and change it once nothing waits (`bufstore status`).",
            )


def new_target(kind: Kind, stream: str) -> Target:
    """Return a target, with a new id, for a database that has none yet."""
    return Target(kind.domain, kind.store, f"{stream}-{secrets.token_hex(8)}")


async def proven_by_ledger(log: Log, ledger: Ledger) -> bool:
    """Return whether the ledger has flushed some of the log, and so belongs to it. The caller has compared the two."""
    return any(c.id and c.seq >= log.generation_start for c in (await ledger.cursors()).values())


async def _check(
    log: Log, ledger: Ledger, stream: str, ours: Kind, epoch: int | None, known: int | None
) -> tuple[Target | None, Target | None]:
    """Return the targets that log and ledger name. Raises ConfigDrift, LogRolledBack when they do not fit together."""
    named, noted = log.target if epoch is not None else None, await ledger.target()
    check_kind(f"stream {stream}", named, ours)
    check_kind(f"the database of stream {stream}", noted, ours)
    check_same(stream, named, noted)
    if known is None and named is not None:
        check_proof(stream, named, proven=False)
    reason = await compare(log, ledger, stream, epoch, known)
    if reason is not None:
        raise LogRolledBack(reason)
    if named is not None and noted is None:
        check_proof(stream, named, proven=await proven_by_ledger(log, ledger))
    return named, noted


async def apart(
    log: Log, ledger: Ledger, config: LogConfig, ours: Kind, *, checked: bool = True
) -> LogRolledBack | None:
    """Return why log and ledger, as they are now, do not belong together; None when they do. Raises Unavailable errors.

    `checked`: see `bufstore.buffer.ports.log.Generations.epoch`.
    """
    epoch, known = await log.epoch(checked=checked), await ledger.epoch()
    try:
        check_layout(config, await ledger.layout())
        await _check(log, ledger, config.stream, ours, epoch, known)
    except (ConfigDrift, LogRolledBack) as e:
        return refusal(e)
    return None


async def compare(log: Log, ledger: Ledger, stream: str, epoch: int | None, known: int | None) -> str | None:
    """Return why the log is not the one that Postgres knows; None when it is. Raises Unavailable errors.

    Raises ConfigDrift if a log that is missing has another name than that one.
    """
    made = epoch is None and await _was_made(log, ledger, stream, known)
    found = await proven(log, lambda reached: _compare(log, ledger, stream, epoch, known, reached, made=made))
    return found if found is not None or epoch is None else await _behind_archive(log, ledger, stream)


async def _behind_archive(log: Log, ledger: Ledger, stream: str) -> str | None:
    """Return why the log has lost what an archive has: entries that come there anew would never be archived."""
    archived = await ledger.archived()

    async def look() -> str | None:
        return lost_what_is_archived(stream, (await log.bounds())[1], archived)

    if await look() is None:
        return None
    # Not `proven`: a proof that is stored would take the place of what was lost, and the next look would miss nothing.
    await log.prove_leader(_PROOF_S)
    return await look()


async def _was_made(log: Log, ledger: Ledger, stream: str, known: int | None) -> bool:
    """Return whether the log, which is missing, has existed. Raises ConfigDrift if it had another name.

    After a repair, or a restore into an empty database, the next one may have any name.
    """
    made, noted = await ledger.made(), await ledger.target()
    if made is not None and made.epoch == known:
        check_stream(stream, made.stream)
        return await log.epoch() is None  # another process may have made it just now
    if not known and noted is not None:
        check_stream(stream, noted.stream)
    return False


async def _compare(
    log: Log, ledger: Ledger, stream: str, epoch: int | None, known: int | None, reached: int, *, made: bool
) -> str | None:
    # Postgres is asked first: meanwhile the log only grows.
    cursors, archived = (await ledger.cursors()).values(), await ledger.archived()
    applied = max((c.seq for c in cursors), default=0)
    first, end = await log.bounds() if epoch is not None else (0, 0)
    start = first_position(epoch if epoch is not None else known or 0)
    reason = reason_to_repair(
        stream=stream,
        log_epoch=epoch,
        epoch=known,
        log_start=start,
        log_first=first,
        log_end=max(end, reached),
        applied=applied,
        archived=archived,
        made=made,
    )
    if reason is not None or epoch is None:
        return reason
    # All partitions are compared together: if one does not fit, the others must not go on without it.
    looks = (never_flushed(log, cursors), *(mismatch(log, cursor, reached) for cursor in cursors))
    return next(filter(None, await asyncio.gather(*looks)), None)
