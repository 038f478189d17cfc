"""What a process that is killed has asked for and been told: one JSON line each, written before it goes on.

A line is in the kernel when `note` returns, so it survives SIGKILL of the process (not a power cut).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Operation:
    """One call; `receipt` (thread_seq) when it was acknowledged, `refused` when it was said that nothing happened."""

    name: str
    kind: str
    thread_id: str
    values: list[str]
    receipt: int | None = None
    refused: bool = False

    @property
    def pending(self) -> bool:
        """Nobody knows what came of it."""
        return self.receipt is None and not self.refused


@dataclass
class Past:
    """Everything that one file tells, over all lives of the process."""

    lives: int = 0
    operations: dict[str, Operation] = field(default_factory=dict)
    #: How often each crash point was reached.
    reached: dict[str, int] = field(default_factory=dict)
    died_at: list[str] = field(default_factory=list)
    ended: int = 0


class Recorder:
    """Writes the file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._count = 0
        self._life = ""

    def begin(self, life: int) -> None:
        """A new life of the process."""
        self._life = str(life)
        self.note("life", life)

    def invoke(self, kind: str, thread_id: str, values: list[str], name: str | None = None) -> str:
        """A call begins (again, with the name it had); its name, which serves as idempotency key."""
        if name is None:
            self._count += 1
            name = f"{self._life}-{self._count}"
            self.note("invoke", name, kind, thread_id, values)
        return name

    def ok(self, name: str, seq: int = 0) -> None:
        """It was acknowledged."""
        self.note("ok", name, seq)

    def refused(self, name: str, why: str) -> None:
        """It was said that nothing happened."""
        self.note("refused", name, why)

    def note(self, *line: Any) -> None:
        """One line."""
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read(path: Path) -> Past:
    """The file as it is."""
    past = Past()
    for text in path.read_bytes().splitlines() if path.exists() else ():
        what, *rest = json.loads(text)
        if what == "life":
            past.lives += 1
        elif what == "invoke":
            name, kind, thread_id, values = rest
            past.operations[name] = Operation(name, kind, thread_id, values)
        elif what == "ok":
            past.operations[rest[0]].receipt = rest[1]
        elif what == "refused":
            past.operations[rest[0]].refused = True
        elif what == "died":
            past.died_at.append(rest[0])
        elif what == "end":
            past.ended += 1
    return past
