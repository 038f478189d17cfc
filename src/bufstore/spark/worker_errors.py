"""Errors of ours from Spark's Python processes: Spark passes on their text alone, in the middle of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from bufstore.errors import LogFull, LogUnavailable, StoreUnavailable

#: What a task raises when its servers take nothing.
_OF_SERVERS = {kind.__name__: kind for kind in (LogFull, LogUnavailable, StoreUnavailable)}
_OURS = re.compile(r"\bbufstore\.errors\.(\w+): ([^\r\n]*)")


class Told(NamedTuple):
    """The class of an error, and what it says."""

    name: str
    text: str


def told_in(error: BaseException) -> Told | None:
    """Return the last error of ours that the text of this one tells of; None if it tells of none."""
    found = _OURS.findall(str(error))
    return Told(*found[-1]) if found else None


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
