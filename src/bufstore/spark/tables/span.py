"""Which part of the log a read needs above Postgres, and which of it is read already; decisions, without I/O."""

from __future__ import annotations

import msgspec


class Span(msgspec.Struct, frozen=True):
    """A part of the log: the messages of the stream from `start` to before `end`."""

    created: str
    start: int
    end: int
    #: From this one on, nothing may be missing.
    whole_from: int

    def behind(self, other: Span | None) -> Span:
        """What is not read yet, when `other` is. What was read of another stream, or began later, is of no use."""
        if other is None or not other.serves(self):
            return self
        start, whole_from = max(self.start, other.end), max(self.whole_from, other.end)
        return msgspec.structs.replace(self, start=start, whole_from=whole_from)

    def serves(self, later: Span) -> bool:
        """Whether what was read here is what a later read finds, as far as this goes."""
        return self.created == later.created and self.whole_from <= later.whole_from
