"""Times as microseconds of Unix time, exactly: a float has not enough digits for the time of a message."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def us_of(when: datetime) -> int:
    """Return the microseconds since 1970; `when` has an offset from UTC."""
    return (when - _EPOCH) // timedelta(microseconds=1)


def moment(us: int) -> datetime:
    """Return the time. Raises OverflowError when Python does not have it."""
    return _EPOCH + timedelta(microseconds=us)
