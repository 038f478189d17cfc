"""What a failed flush means: retry, split to find the poison, or stop and say so.

Only what is known to be permanent for one entry may ever park it; anything not listed is retried. The classes are
Postgres' own (SQLSTATE, appendix A of its manual).
"""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    """What to do about an error of a flush."""

    #: Passing: connection, serialization, deadlock, resources. Try again later, as it was.
    RETRY = "retry"
    #: A row that somebody holds. Split, so that it delays only its own thread, and try that one again.
    ISOLATE = "isolate"
    #: An app's code raised, which may pass or not. As ISOLATE; poison when it does not pass for a while.
    SUSPECT = "suspect"
    #: An entry cannot be applied. Split down to it.
    POISON = "poison"
    #: An operator has to mend it: login, schema, permission, read-only. Say so, keep everything, try again slowly.
    STOP = "stop"


_BY_STATE = {
    "55P03": Verdict.ISOLATE,  # lock_timeout
    "25006": Verdict.STOP,  # read-only transaction
    "3D000": Verdict.STOP,  # no such database
    "3F000": Verdict.STOP,  # no such schema
    "XX001": Verdict.STOP,  # data corrupted
    "XX002": Verdict.STOP,  # index corrupted
}
_BY_CLASS = {
    "22": Verdict.POISON,  # data exception
    "23": Verdict.POISON,  # constraint violation
    "28": Verdict.STOP,  # login
    "42": Verdict.STOP,  # missing table or column, permission
}


def verdict(sqlstate: str | None) -> Verdict:
    """The verdict for an error with this SQLSTATE (None: it has none, e.g. a broken connection)."""
    if sqlstate is None:
        return Verdict.RETRY
    return _BY_STATE.get(sqlstate) or _BY_CLASS.get(sqlstate[:2]) or Verdict.RETRY
