"""Finds what we need in the headers of a NATS message as they come over the wire.

``NATS/1.0[ <status>[ <description>]]\\r\\n`` and then ``<name>: <value>\\r\\n`` for each header, and an empty line
(https://docs.nats.io/reference/reference-protocols/nats-protocol, HMSG). Headers that others have written may look
different; nothing here raises for them.
"""

from __future__ import annotations

from bufstore.jetstream.messages import HEADER

_NAME = HEADER.encode()
_ENTRY = b"\r\n" + _NAME + b": "


def entry_header(raw: bytes) -> str | None:
    """Return the value of the header `HEADER`, which the log's messages have; None when there is none."""
    at = raw.find(_ENTRY)
    if at < 0:  # not written by us, or by a client that spells it in another way
        return fields(raw).get(HEADER) if _NAME in raw else None
    at += len(_ENTRY)
    return raw[at : raw.find(b"\r\n", at)].strip().decode("ascii", "replace")


def added(raw: bytes, name: bytes) -> str | None:
    """Return the value of a header that the server put behind the stored headers, or None."""
    at = raw.rfind(b"\r\n" + name + b": ")
    if at < 0:
        return None
    at += len(name) + 4
    return raw[at : raw.find(b"\r\n", at)].decode("utf-8", "replace")


def fields(raw: bytes) -> dict[str, str]:
    """Return all headers. Of a repeated name the last counts: a server puts its own headers behind the stored ones."""
    found: dict[str, str] = {}
    for line in raw.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            found[name.strip().decode("utf-8", "replace")] = value.strip().decode("utf-8", "replace")
    return found


def status_of(raw: bytes) -> tuple[str, str]:
    """Return the status that the server put before the headers, and its description; both empty without a status."""
    line = raw[: raw.find(b"\r\n")].decode("utf-8", "replace")
    _, _, status = line.partition(" ")
    code, _, description = status.strip().partition(" ")
    return code, description.strip()
