"""Errors from Spark's processes: PySpark passes on the text of ours alone, and all of a Java error, amid its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bufstore.errors import LogFull, LogUnavailable, StoreUnavailable

#: What a task raises when its servers take nothing.
_OF_SERVERS = {kind.__name__: kind for kind in (LogFull, LogUnavailable, StoreUnavailable)}
#: The first line of a Java error that PySpark found no class for, and of each that caused it. Of an error of a worker,
#: which has its traceback behind that: the line below the traceback.
_CAUSES = re.compile(
    r"(?:^(?:Caused by)?: |Traceback \(most recent call last\):\n(?: .*\n)+)"
    r"(?!.*Traceback \(most recent call last\):$)(\S[^\r\n]*)",
    re.MULTILINE,
)
_OURS = re.compile(r"\bbufstore\.errors\.(\w+): ([^\r\n]*)")


class Told(NamedTuple):
    """The class of an error, and what it says."""

    name: str
    text: str


def told_in(error: BaseException) -> Told | None:
    """Return the last error of ours that the text of this one tells of; None if it tells of none."""
    found = _OURS.findall(str(error))
    return Told(*found[-1]) if found else None


def cause_in(error: BaseException) -> str | None:
    """Return what the error of Java or of a worker says that caused this one; None if its text tells of none."""
    found: list[str] = _CAUSES.findall(str(error))
    return found[-1] if found else None


@contextmanager
def of_servers() -> Iterator[None]:
    """In the block, raise LogFull, LogUnavailable and StoreUnavailable of a task as such, not as Spark tells them."""
    try:
        yield
    except Exception as e:
        told = told_in(e)
        kind = _OF_SERVERS.get(told.name) if told is not None else None
        if told is None or kind is None:
            raise
        raise kind(told.text) from e
