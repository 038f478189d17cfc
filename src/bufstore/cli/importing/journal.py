"""What was imported, remembered for the comparison at the end."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from bufstore.cli.conversations.comparison import Expected
from bufstore.cli.conversations.writer import Written
from bufstore.cli.importing.lines import Line


class Journal:
    """What was imported, in about 100 bytes a thread: with millions of threads, nothing else grows."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._lines = array("q")
        self._acknowledged = array("q")
        self._superseded = array("q")
        self._seqs = array("q")

    def begin(self, thread_id: str) -> bool:
        """Note the thread; return False if it was noted before."""
        known = len(self._places)
        return self._places.setdefault(_hash(thread_id), known) == known and self._grow()

    def _grow(self) -> bool:
        for column in (self._lines, self._acknowledged, self._superseded, self._seqs):
            column.append(0)
        return True

    def end(self, line: Line, written: Written) -> None:
        """Note what was written of a line; a later line of the same thread takes its place."""
        if written.acknowledged:
            place = self._places[_hash(line.thread_id)]
            self._lines[place] = line.number
            self._superseded[place] += self._acknowledged[place]
            self._acknowledged[place] = written.acknowledged
            self._seqs[place] = written.thread_seq

    def find(self, line: Line) -> Expected | None:
        """Return what Postgres must hold of a line; None if nothing, or if a later line took its place."""
        place = self._places.get(_hash(line.thread_id))
        if place is None or self._lines[place] != line.number:
            return None
        return Expected(
            line.thread_id,
            line.messages,
            acknowledged=self._acknowledged[place],
            thread_seq=self._seqs[place],
            superseded=self._superseded[place],
        )


def _hash(thread_id: str) -> int:
    # With 64 bits, two of ten million threads share a hash in one of 400,000 files; then one is reported as repeated.
    return int.from_bytes(blake2b(thread_id.encode(), digest_size=8).digest())
