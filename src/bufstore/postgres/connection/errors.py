"""Maps Postgres' errors to bufstore's: one table, applied at the edge.

Errors that the table does not name (above all classes 22 and 23, the entry's own fault) pass unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import psycopg_pool

from bufstore.errors import BufstoreError, Closed, StoreMisconfigured, StoreUnavailable
from bufstore.printable import printable


class NoAnswer(StoreUnavailable):
    """The connection ended, or the time ran out, before Postgres answered.

    A read may be repeated. A write may have taken effect: an idempotency key tells whether it has.
    """


class Unconfirmed(NoAnswer):
    """The statement was cancelled when its time was over, and ended without an error.

    So it may be a commit that waited for a synchronous standby. This server shows the commit, but the standby may lack
    it. Only the next write that is answered tells that the standby has it; a read does not.
    """

    def __init__(self) -> None:
        super().__init__("no answer from Postgres: the time ran out (a lock, or a synchronous standby that is away)")


class NoSession(StoreUnavailable):
    """A pooler gave the call no session: nothing was carried out, and the connection is gone. A read is repeated."""


#: SQLSTATE (or its beginning) -> the error that stands for it here. Looked up longest first.
_BY_SQLSTATE: dict[str, type[BufstoreError]] = {
    "08": NoAnswer,  # connection failure
    "57P01": NoAnswer,  # the administrator ended the session, or Postgres shuts down
    "57P02": NoAnswer,  # another backend crashed
    "57P03": StoreUnavailable,  # Postgres starts up, shuts down or recovers
    "57P05": NoAnswer,  # idle session timeout
    "25P03": NoAnswer,  # idle in transaction timeout
    "25P04": NoAnswer,  # transaction timeout
    "53": StoreUnavailable,  # disk full, out of memory, too many connections
    "58": StoreUnavailable,  # input and output
    "40001": StoreUnavailable,  # serialization failure: rolled back
    "40P01": StoreUnavailable,  # deadlock: rolled back
    "40003": NoAnswer,  # "statement completion unknown"
    "55P03": StoreUnavailable,  # lock timeout
    "57014": StoreUnavailable,  # statement timeout, or cancelled by someone
    "28": StoreMisconfigured,  # login
    "3D000": StoreMisconfigured,  # no such database
    "3F000": StoreMisconfigured,  # no such schema
    "42": StoreMisconfigured,  # no such table or function, no permission
    "25006": StoreMisconfigured,  # read-only
    "XX001": StoreMisconfigured,  # data corrupted
    "XX002": StoreMisconfigured,  # index corrupted
}
#: What PgBouncer says in place of a session, with a SQLSTATE of connections: nothing was carried out.
_NO_SESSION = re.compile("query_wait_timeout|server login (has been failing|failed)|pooler is shutting down")
#: What it says to who begins a transaction with `pool_mode=statement`.
_NO_TRANSACTIONS = "statement pooling mode"


@contextmanager
def map_errors() -> Iterator[None]:
    """Raise bufstore's error for a database error inside the block, with the original as its cause."""
    try:
        yield
    except (psycopg.Error, OSError) as e:
        mapped = mapped_error(e)
        if mapped is None:
            raise
        raise mapped from e


def mapped_error(error: psycopg.Error | OSError) -> BufstoreError | None:
    """Return the bufstore error that stands for `error`, or None when the table does not know it."""
    if isinstance(error, OSError):  # TimeoutError is one
        return NoAnswer(f"no answer from Postgres: {str(error) or 'the time ran out'}")
    if isinstance(error, psycopg_pool.PoolClosed):
        return Closed("the store is closed or not open: call open(), or use `async with`")
    if isinstance(error, (psycopg_pool.PoolTimeout, psycopg_pool.TooManyRequests)):
        return StoreUnavailable("no connection to Postgres became free in time")
    state = error.sqlstate
    if state is None:
        return NoAnswer("the connection to Postgres was lost") if is_lost(error) else None
    if state == "08P01" and _NO_SESSION.search(error.diag.message_primary or ""):
        return NoSession(f"no connection to Postgres: a pooler in front of it says: {_words(error)}")
    if state == "08P01" and _NO_TRANSACTIONS in (error.diag.message_primary or ""):
        return StoreMisconfigured(f"the pooler in front of Postgres needs pool_mode=transaction: {_words(error)}")
    for length in (5, 2):
        kind = _BY_SQLSTATE.get(state[:length])
        if kind is not None:
            return kind(said(error))
    return None


def said(error: psycopg.Error) -> str:
    """Return what Postgres says, in one line: it quotes what apps sent, and triggers raise what they like."""
    return f"Postgres says: {_words(error)}"


def _words(error: psycopg.Error) -> str:
    return f"{printable(error.diag.message_primary or type(error).__name__)} (SQLSTATE {error.sqlstate})"


def out_of_time(timeout_s: float) -> StoreUnavailable:
    """Return the error for a statement that Postgres ended at our request, and so did nothing."""
    return StoreUnavailable(
        f"Postgres needed longer than {timeout_s:.3g} s (it is busy, or another transaction holds a lock): the "
        "statement was cancelled (SQLSTATE 57014)"
    )


def hung_up(timeout_s: float) -> NoAnswer:
    """Return the error for a statement whose connection we ended, because its end could not be had."""
    return NoAnswer(
        f"no answer from Postgres in {timeout_s:.3g} s, nor to a request to cancel (it hangs, or cannot be reached any "
        "more, or a pooler in front of it has no session free or is paused)"
    )


def is_lost(error: BaseException) -> bool:
    """Return whether the connection was lost: libpq says so without a SQLSTATE, and the server said nothing.

    In a pipeline that is a result like any other, of which psycopg makes its most general error. An InternalError
    without a SQLSTATE is psycopg's own, of answers that do not fit what was sent: when a session ends, a pooler adds an
    error of its own to what the server said, and psycopg finds two answers to one COMMIT.
    """
    if not isinstance(error, psycopg.Error) or error.sqlstate is not None:
        return False
    return isinstance(error, psycopg.OperationalError) or type(error) in (psycopg.DatabaseError, psycopg.InternalError)
