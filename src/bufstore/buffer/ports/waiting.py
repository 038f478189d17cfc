"""The entries that wait in the ledger: the cursor has passed them, and they are not flushed.

A thread's waiting entries follow its watermark without a gap: if an entry waits, all later entries of the thread wait
behind it. So a thread's state is its row, then what waits, then its tail in the log. An entry moves from the log into
the table, and from the table into the row. A reader that reads these one after the other in this order misses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from bufstore.buffer.entry import Item


class WaitingEntry(msgspec.Struct, frozen=True):
    """An entry that waits, and why. Its thread is known."""

    item: Item
    partition: int
    reason: str


class Queue(msgspec.Struct, frozen=True):
    """The entries of one thread that wait."""

    thread_id: str
    entries: int
    #: About how many bytes the entries have.
    bytes: int
    reason: str
    #: The position of the last of them.
    last: int


class WaitingTotals(msgspec.Struct, frozen=True, kw_only=True):
    """How much waits."""

    entries: int = 0
    threads: int = 0
    bytes: int = 0
    #: When the first of them began to wait.
    since: datetime | None = None
    #: The most common reason.
    reason: str = ""

    def __str__(self) -> str:
        if not self.entries or self.since is None:
            return "none"
        return f"{self.entries} of {self.threads} threads, since {self.since:%Y-%m-%d %H:%M:%S %Z}: {self.reason}"


class WaitingEntries(Protocol):
    """The entries that wait. Raises what their ledger raises."""

    async def queues(self, partition: int) -> list[Queue]:
        """A partition's threads of which entries wait, ordered by the position of their first one."""

    async def first(self, thread_ids: Sequence[str], entries: int, bytes_: int) -> dict[str, list[Item]]:
        """The first entries of these threads, each in order.

        At most `entries` of each thread; of all threads together at most `bytes_` bytes, or one entry. So there may be
        none of some threads.
        """

    async def of_thread(self, thread_id: str) -> list[Item]:
        """All that waits of a thread, in order."""

    async def threads(self, after: str, limit: int) -> list[str]:
        """Threads behind `after` of which entries wait, in order."""

    async def among(self, thread_ids: Sequence[str]) -> set[str]:
        """Those of these threads of which entries wait."""

    async def totals(self) -> WaitingTotals:
        """How much waits in all."""
