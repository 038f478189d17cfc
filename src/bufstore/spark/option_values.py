"""Parses the values of options: numbers, times, lists of ids. All functions raise ConfigError. No Spark in here."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec

from bufstore.errors import ConfigError
from bufstore.unix_time import us_of

_LARGEST = 2**63 - 1


def number(name: str, text: str) -> int:
    """Return the number, which is at least 0 and fits into 64 bits."""
    # Python does not parse thousands of digits.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_LARGEST)) and int(text) <= _LARGEST):
        raise ConfigError(f"option {name}: {text[:40]!r} is not a number from 0 to {_LARGEST}")
    return int(text)


def count(given: Mapping[str, str], name: str) -> int | None:
    """Return the number, which is at least 1; None when the option is not given."""
    if name not in given:
        return None
    value = number(name, given[name])
    if not value:
        raise ConfigError(f"option {name} must be positive")
    return value


def timestamp_us(given: Mapping[str, str], name: str) -> int | None:
    """Return the time in microseconds since 1970; None when the option is not given."""
    if name not in given:
        return None
    try:
        when = datetime.fromisoformat(given[name])
    except ValueError:
        raise ConfigError(f"option {name}: {given[name]!r} is not a time like 2026-11-21T08:00:00Z") from None
    if when.tzinfo is None:
        raise ConfigError(f"option {name} needs a time with a UTC offset, as in 2026-11-21T08:00:00Z")
    return us_of(when)


def ids(given: Mapping[str, str], name: str) -> list[str]:
    """Return the ids of a JSON list; an empty list when the option is not given."""
    if name not in given:
        return []
    try:
        found = msgspec.json.decode(given[name], type=list[str])
    except msgspec.MsgspecError:
        found = []
    if not found or any("\0" in id_ for id_ in found):
        raise ConfigError(f'option {name} must be a JSON list of ids, as in ["a", "b"]')
    return found
