"""Which rows a read is narrowed to by its options; decisions, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Narrowing(msgspec.Struct, frozen=True, kw_only=True):
    """A read's rows are those that meet all of these conditions. None: any value meets it."""

    threads: frozenset[str] | None = None
    agents: frozenset[str] | None = None
    #: The bounds of column `changed_at` in microseconds since 1970: from the one, up to before the other.
    changed_from: int | None = None
    changed_before: int | None = None

    def has_thread(self, thread_id: str) -> bool:
        """Return whether there may be a row of this thread."""
        return self.threads is None or thread_id in self.threads

    def has(self, row: Mapping[str, Any]) -> bool:
        """Return whether this row meets all conditions."""
        at = row["changed_at"]
        return (
            self.has_thread(row["thread_id"])
            and (self.agents is None or row.get("agent_id") in self.agents)
            and (self.changed_from is None or (at is not None and at >= self.changed_from))
            and (self.changed_before is None or (at is not None and at < self.changed_before))
        )


#: No condition: all rows.
ALL = Narrowing()
