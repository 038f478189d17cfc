"""Errors of ours from Spark's Python processes: Spark passes on their text alone, in the middle of its own."""

from __future__ import annotations

import re
from typing import NamedTuple

_OURS = re.compile(r"\bbufstore\.errors\.(\w+): ([^\r\n]*)")


class Told(NamedTuple):
    """The class of an error, and what it says."""

    name: str
    text: str


def told_in(error: BaseException) -> Told | None:
    """Return the last error of ours that the text of this one tells of; None if it tells of none."""
    found = _OURS.findall(str(error))
    return Told(*found[-1]) if found else None
