"""Decides what a failed flush means, by the class of the error (SQLSTATE, appendix A of Postgres' manual).

An error about the server itself (connection, resources, shutdown) concerns all threads alike: the flush is tried again.
An error about a statement concerns the rows that it was to write: the threads to blame are found, and the others go on.
An entry is parked only for an error that is known to be permanent for it.
"""

from __future__ import annotations

import enum

from bufstore.errors import (
    CallTimeout,
    FlushTimeout,
    LogFull,
    OutcomeUnknown,
    StepUnknown,
    StoreMisconfigured,
    SubmitUnknown,
    Unavailable,
)

#: Errors that pass by themselves, raised by an app's apply() that calls a server or another store of bufstore's.
_PASSING = (Unavailable, OSError, LogFull, OutcomeUnknown, StepUnknown, SubmitUnknown, CallTimeout, FlushTimeout)


class Verdict(enum.Enum):
    """What to do about an error of a flush."""

    #: Transient: connection, serialization, deadlock, resources. Try again later, with less.
    RETRY = "retry"
    #: Too much for the available time or memory. As RETRY; a single entry that is too much waits.
    SHRINK = "shrink"
    #: Another session holds a row: its thread waits.
    LOCKED = "locked"
    #: A statement was refused for a reason that may or may not pass: its thread waits.
    ISOLATE = "isolate"
    #: An app's code raised, or psycopg before it asked Postgres. As ISOLATE; poison if it does not pass for a while.
    SUSPECT = "suspect"
    #: An entry cannot be applied. Split the window down to that entry.
    POISON = "poison"
    #: A statement was refused, and an operator must act: schema, permission. As ISOLATE, and tell the operator.
    DENIED = "denied"
    #: An operator must act, for all threads: login, read-only. Tell the operator, keep everything, try again slowly.
    STOP = "stop"

    @property
    def needs_operator(self) -> bool:
        """Whether the error passes only when an operator acts."""
        return self in (Verdict.DENIED, Verdict.STOP)

    @property
    def of_statement(self) -> bool:
        """Whether the error concerns some threads, which can be told from the others."""
        return self not in (Verdict.RETRY, Verdict.SHRINK, Verdict.STOP)


_BY_STATE = {
    "25006": Verdict.STOP,  # read-only transaction
    "25P02": Verdict.ISOLATE,  # an app's code went on in the transaction after an error
    "25P03": Verdict.SHRINK,  # idle_in_transaction_session_timeout: we took too long over it
    "25P04": Verdict.SHRINK,  # transaction_timeout
    "3D000": Verdict.STOP,  # no such database
    "3F000": Verdict.DENIED,  # no such schema
    "53200": Verdict.SHRINK,  # out of memory
    "53400": Verdict.SHRINK,  # a configured limit, such as temp_file_limit
    "55P03": Verdict.LOCKED,  # lock_timeout
    "57014": Verdict.SHRINK,  # statement_timeout, or our own alarm
    "XX001": Verdict.STOP,  # data corrupted
    "XX002": Verdict.STOP,  # index corrupted
}
_BY_CLASS = {
    "08": Verdict.RETRY,  # connection
    "22": Verdict.POISON,  # data exception
    "23": Verdict.POISON,  # constraint violation
    "25": Verdict.RETRY,  # state of the transaction
    "26": Verdict.RETRY,  # a prepared statement that the session does not know
    "28": Verdict.STOP,  # login
    "40": Verdict.RETRY,  # serialization failure, deadlock
    "42": Verdict.DENIED,  # missing table or column, permission, row-level security
    "53": Verdict.RETRY,  # disk full, too many connections
    "57": Verdict.RETRY,  # shutdown, crash of another backend
    "58": Verdict.RETRY,  # input and output
    "F0": Verdict.RETRY,  # the server's configuration file
}


def verdict(sqlstate: str | None) -> Verdict:
    """Return the verdict for an error with this SQLSTATE (None: it has none, e.g. a broken connection)."""
    if not sqlstate:
        return Verdict.RETRY
    return _BY_STATE.get(sqlstate) or _BY_CLASS.get(sqlstate[:2]) or Verdict.ISOLATE


def verdict_of_app(error: Exception) -> Verdict:
    """Return the verdict for an error that an app's code raised, about which Postgres says nothing."""
    if isinstance(error, MemoryError):
        return Verdict.SHRINK
    if isinstance(error, _PASSING):
        return Verdict.RETRY
    return Verdict.DENIED if isinstance(error, StoreMisconfigured) else Verdict.SUSPECT
