"""Which part of the log a read needs above Postgres, and how much of it is read already; decisions, without I/O."""

from __future__ import annotations

import msgspec


class Span(msgspec.Struct, frozen=True):
    """A part of the log: the messages of the stream from `start` to before `end`."""

    created: str
    start: int
    end: int
    #: The message from which on nothing may be missing.
    whole_from: int

    def behind(self, other: Span | None) -> Span:
        """Return what is left to read when `other` is read, which is of no use if it does not serve (see `serves`)."""
        if other is None or not other.serves(self):
            return self
        start, whole_from = max(self.start, other.end), max(self.whole_from, other.end)
        return msgspec.structs.replace(self, start=start, whole_from=whole_from)

    def serves(self, later: Span) -> bool:
        """Return whether a later read finds, as far as this span goes, what was read here.

        Not if this span is of another stream, or may lack messages that the later read needs.
        """
        return self.created == later.created and self.whole_from <= later.whole_from
