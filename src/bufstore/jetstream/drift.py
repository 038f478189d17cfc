"""Checks whether a stream, bucket or consumer is configured as it must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bufstore.errors import ConfigDrift

#: Settings that must be unset: with them no write is answered, or none arrives where it is looked for.
UNSET: Mapping[str, Any] = {"no_ack": False, "subject_transform": {}}
#: Settings that may be changed beside running processes: more room, or other nodes.
FREE = ("max_bytes", "placement")


def check(
    what: str, wanted: Mapping[str, Any], found: Mapping[str, Any], ours: str, edit: str, *, way_out: str = ""
) -> None:
    """Raise ConfigDrift for the first field that differs, with both values and both ways out.

    `ours`: where these fields are configured; empty when nobody may choose them. `way_out`: the only way out, in words,
    when it is none of these two.
    """
    here = f" or in the configuration ({ours})" if ours else ""
    for field, expected in wanted.items():
        value = found.get(field, type(expected)())  # the server leaves out what is zero, false or empty
        if value != expected:
            # Running processes read replicas as they were configured: with more, reads are less fresh than promised.
            when = " while no process uses it, see docs/OPERATIONS.md" if field == "num_replicas" else ""
            raise ConfigDrift(
                what,
                field,
                expected=expected,
                found=value,
                way_out=way_out or f"Change it on the server (`{edit}`{when}){here}.",
            )
