"""Which rows a read is narrowed to, by options and by filters that Spark pushes down; decisions, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from bufstore.unix_time import us_of


class Narrowing(msgspec.Struct, frozen=True, kw_only=True):
    """A read's rows are those that meet all of these conditions. None: any value meets it."""

    threads: frozenset[str] | None = None
    thread_prefix: str | None = None
    agents: frozenset[str] | None = None
    #: The bounds of column `changed_at` in microseconds since 1970: from the one, up to before the other.
    changed_from: int | None = None
    changed_before: int | None = None

    def has_thread(self, thread_id: str) -> bool:
        """Return whether there may be a row of this thread."""
        return (self.threads is None or thread_id in self.threads) and thread_id.startswith(self.thread_prefix or "")

    def has(self, row: Mapping[str, Any]) -> bool:
        """Return whether this row meets all conditions."""
        at = row["changed_at"]
        return (
            self.has_thread(row["thread_id"])
            and (self.agents is None or row.get("agent_id") in self.agents)
            and (self.changed_from is None or (at is not None and at >= self.changed_from))
            and (self.changed_before is None or (at is not None and at < self.changed_before))
        )

    def and_(self, other: Narrowing) -> Narrowing:
        """Return the narrowing to rows that meet the conditions of both."""
        mine, theirs = self.thread_prefix or "", other.thread_prefix or ""
        longer, shorter = (mine, theirs) if len(mine) >= len(theirs) else (theirs, mine)
        nothing = not longer.startswith(shorter)
        return Narrowing(
            threads=frozenset() if nothing else _both(self.threads, other.threads),
            thread_prefix=longer or None,
            agents=_both(self.agents, other.agents),
            changed_from=max((n for n in (self.changed_from, other.changed_from) if n is not None), default=None),
            changed_before=min((n for n in (self.changed_before, other.changed_before) if n is not None), default=None),
        )


def _both(some: frozenset[str] | None, others: frozenset[str] | None) -> frozenset[str] | None:
    if some is None or others is None:
        return others if some is None else some
    return some & others


#: No condition: all rows.
ALL = Narrowing()


def narrowed_by(filters: Iterable[Any], columns: Iterable[str]) -> Narrowing:
    """Return what Spark's filters (`pyspark.sql.datasource.Filter`) narrow a read to; skip filters we have no use for.

    Spark checks each row again, so this may keep rows that a filter does not.
    """
    known, found = set(columns), ALL
    for one in filters:
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        if len(attribute) == 1 and attribute[0] in known:
            found = found.and_(_of(type(one).__name__, attribute[0], getattr(one, "value", None)))
    return found


def _of(kind: str, column: str, value: Any) -> Narrowing:
    if column in ("thread_id", "agent_id") and kind in ("EqualTo", "EqualNullSafe", "In"):
        values = value if kind == "In" else (value,)
        if all(isinstance(v, str) for v in values):
            them = frozenset(v for v in values if "\0" not in v)  # no id has it, and Postgres takes no such text
            return Narrowing(threads=them) if column == "thread_id" else Narrowing(agents=them)
    if column == "thread_id" and kind == "StringStartsWith":
        return Narrowing(threads=frozenset()) if "\0" in value else Narrowing(thread_prefix=value)
    if column == "changed_at" and isinstance(value, datetime):
        at = us_of(value if value.tzinfo is not None else value.astimezone(UTC))
        if kind in ("GreaterThan", "GreaterThanOrEqual"):
            return Narrowing(changed_from=at)
        if kind in ("LessThan", "LessThanOrEqual"):
            return Narrowing(changed_before=at + 1)
    return ALL
