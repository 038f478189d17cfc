"""Times as microseconds of Unix time: as Spark and Arrow count them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def us_of(when: datetime) -> int:
    """Return the microseconds since 1970, exactly; `when` has an offset from UTC."""
    return (when - EPOCH) // timedelta(microseconds=1)
