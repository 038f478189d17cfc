"""The findings of `bufstore doctor`: checks, their levels, and the exit code."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec
from rich.filesize import decimal


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    #: The check could not find out, which counts as a warning.
    UNKNOWN = "unknown"
    #: It works, but a guarantee is weaker, or trouble is near.
    WARNING = "warning"
    #: It does not work like this.
    BAD = "bad"


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check, and what it found."""

    #: Where the check looks ("NATS" or "Postgres", say), and at what.
    part: str
    what: str
    level: Level
    #: What the check found.
    found: str
    #: What to do about it; empty when there is nothing to do.
    advice: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``bufstore doctor --json``."""

    #: The exit code: 0 fine, 1 warnings or unknowns, 2 it cannot work.
    code: int
    checks: Sequence[CheckResult]


def diagnosis(checks: Sequence[CheckResult]) -> Diagnosis:
    """Return all checks, with the exit code that follows from them."""
    levels = {check.level for check in checks}
    code = 2 if Level.BAD in levels else 1 if levels - {Level.OK} else 0
    return Diagnosis(code=code, checks=checks)


class Notes:
    """Collects the checks of one part."""

    def __init__(self, part: str) -> None:
        self._part = part
        self.checks: list[CheckResult] = []

    def say(self, what: str, level: Level, found: str, advice: str = "") -> None:
        """Note one check."""
        self.checks.append(CheckResult(part=self._part, what=what, level=level, found=found, advice=advice))

    def require(self, what: str, holds: bool, found: str, advice: str, otherwise: Level = Level.WARNING) -> None:
        """Note that a condition holds, or what to do when it does not."""
        self.say(what, Level.OK if holds else otherwise, found, "" if holds else advice)

    def room(self, what: str, used: int, limit: int, full: float, advice: str) -> None:
        """Note how many bytes of a limit (0 or less: there is none) are used, and what to do above the part `full`."""
        found = f"{decimal(used)} of {decimal(limit)}" if limit > 0 else f"{decimal(used)}, no limit"
        self.require(what, limit <= 0 or used < full * limit, found, advice)
