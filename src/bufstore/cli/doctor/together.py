"""Whether log and Postgres belong together: every store checks this when it opens; here it is checked before."""

from __future__ import annotations

from typing import NamedTuple

from bufstore.buffer.ports.ledger import Ledger
from bufstore.buffer.prepare import apart, compare
from bufstore.buffer.target import Target
from bufstore.cli.connect import AnyBuffer, Endpoints
from bufstore.cli.doctor.diagnosis import Level, Notes
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import BufstoreError, ConfigDrift, LogRolledBack
from bufstore.memory.ledger import MemoryLedger
from bufstore.postgres.connection.conninfo import opened_within

_TIMEOUT_S = 5.0
_WHERE = "see 'Where a log is flushed to' and 'Going back in time' in docs/OPERATIONS.md"


class SeenLog(NamedTuple):
    """A log as NATS shows it; `there` is False when NATS has none."""

    config: LogConfig
    target: Target | None = None
    there: bool = True


async def check_together(notes: Notes, endpoints: Endpoints, log: SeenLog, *, tables: bool) -> None:
    """Note whether log and Postgres belong together, and what waits.

    `tables`: whether the database has the tables of a buffer, of this release or a later one.
    """
    config = BufferConfig.fitting(log.config, flusher=False)
    try:
        if not log.there:
            await endpoints.lost_log(None)  # of several lanes, nobody knows which ledger is this log's
        timeout_s = opened_within(endpoints.postgres, _TIMEOUT_S)
        async with endpoints.buffer_of(log.target, config, timeout_s=timeout_s).connected() as buffer:
            # A ledger in Postgres makes its tables when it is asked. A new one in memory says what those would say.
            ledger = buffer.ledger if tables else MemoryLedger(endpoints.plain(pool_size=1))
            why = await _apart(buffer, ledger, log)
            waiting = await ledger.waiting.totals()
    except BufstoreError as e:
        notes.say("log", Level.UNKNOWN, f"could not be compared: {e}")
        return
    if why is not None:
        notes.say("log", Level.BAD, why, _WHERE)
    elif log.there:
        notes.say("log", Level.OK, "belongs to this database")
    else:
        notes.say("log", Level.OK, "nothing of it is flushed here: the first store that opens makes it")
    advice = "see 'Threads that wait' in docs/OPERATIONS.md"
    notes.require("waiting entries", not waiting.entries, str(waiting), advice)


async def _apart(buffer: AnyBuffer, ledger: Ledger, log: SeenLog) -> str | None:
    """Return why every store refuses to open; None when none does."""
    try:
        if not log.there:  # nothing is known of its settings
            return await compare(buffer.log, ledger, log.config.stream, None, await ledger.epoch())
        named = log.target or await ledger.target()
        kind = named.kind if named is not None else buffer.backing.kind
        why = await apart(buffer.log, ledger, log.config, kind, checked=False)
        return why.reason if why is not None else None
    except (ConfigDrift, LogRolledBack) as e:
        return str(e)
