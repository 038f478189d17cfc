"""A conformance suite for stores: one check per promise of `ThreadRunStore`, to run against a store of your own.

With pytest-asyncio and its ``asyncio_mode = "auto"``:

    import pytest
    from bufstore import BufferedThreadStore
    from bufstore.testing import CHECKS, Check

    @pytest.mark.parametrize("check", CHECKS, ids=str)
    async def test_my_store_behind_the_buffer(check: Check) -> None:
        async with await BufferedThreadStore.open(MyStore(DSN), nats=NATS, postgres=DSN) as store:
            await check(store)

`APPLY_CHECKS` call the one method that writes, directly and without a log, and say more when it is wrong:

    from collections.abc import Sequence
    import psycopg
    from bufstore import ThreadChange
    from bufstore.testing import APPLY_CHECKS, Applier

    @pytest.mark.parametrize("check", APPLY_CHECKS, ids=str)
    async def test_my_apply(check: Check) -> None:
        mine = MyStore(DSN)

        async def apply(batch: Sequence[ThreadChange]) -> None:
            async with await psycopg.AsyncConnection.connect(DSN) as connection:
                await mine.apply(connection, batch)

        await check(Applier(mine, apply))

A store that cannot do all of it names what it can, a set of `Capability`: ``[c for c in CHECKS if c.needs <= MINE]``.
A wrapped store that is not `Queryable` has ``{ANY_VALUE, MESSAGE_PAGES}`` (the second comes from the buffer); it
refuses calls that need more with ConfigError. A store whose columns hold only JSON lacks ANY_VALUE, too: an entry with
another value is acknowledged, then refused by Postgres at the flush and parked in quarantine. So an app with such
columns keeps to what JSON has. Use columns of type json: jsonb makes integers of large floats.

`LEDGER_CHECKS`, `LOG_CHECKS` and `SHARED_STATE_CHECKS` are for a backend of the buffer itself: each takes a `Ledgers`,
or a `Logs`.

Nothing here needs pytest: a check is an async function that raises. To see the values of a failed assertion, call
``pytest.register_assert_rewrite("bufstore.testing")`` before the import. Checks use ids of their own, so one store can
serve all of them, and they can run again.
"""

from bufstore.testing import (
    applying,
    checkpoints,
    edits,
    feeds,
    ledger,
    lineage,
    lists,
    log,
    parked,
    shared_state,
    waiting,
)
from bufstore.testing.applying import Applier
from bufstore.testing.basics import EVERYTHING, Capability, Check
from bufstore.testing.ledger import Ledgers
from bufstore.testing.log import Logs

#: The checks of a store that is written to and read. Each takes a `ThreadRunStore`.
CHECKS: list[Check] = [*checkpoints.CHECKS, *edits.CHECKS, *lineage.CHECKS, *lists.CHECKS]
#: The checks of a store that the buffer flushes into. Each takes an `Applier`.
APPLY_CHECKS: list[Check] = applying.CHECKS

#: The checks of a ledger, where watermarks, cursors, terms, quarantine and waiting entries live. Each takes a `Ledgers`
#: of its own.
LEDGER_CHECKS: list[Check] = [*ledger.CHECKS, *parked.CHECKS, *waiting.CHECKS]
#: The checks of a log, where entries are acknowledged. Each takes a `Logs` of its own.
LOG_CHECKS: list[Check] = [*log.CHECKS, *feeds.CHECKS]
#: The checks of what instances share beside the log. Each takes a `Logs` of its own.
SHARED_STATE_CHECKS: list[Check] = shared_state.CHECKS

__all__ = [
    "APPLY_CHECKS",
    "CHECKS",
    "EVERYTHING",
    "LEDGER_CHECKS",
    "LOG_CHECKS",
    "SHARED_STATE_CHECKS",
    "Applier",
    "Capability",
    "Check",
    "Ledgers",
    "Logs",
]
