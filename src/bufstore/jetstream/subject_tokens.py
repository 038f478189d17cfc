"""Ids in subjects: a raw id never reaches a subject, key or header.

`token` maps ids injectively into ``[A-Za-z0-9_-]``, so that no id can be a wildcard, end a protocol line, or collide
with another id.
"""

from __future__ import annotations

import binascii

from bufstore.errors import MalformedEntry

_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_", b"+/")


def token(id_: str) -> str:
    """Return the id as base64url of its UTF-8, without padding: injective, at most 1366 characters for 1 KiB."""
    return binascii.b2a_base64(id_.encode(), newline=False).translate(_TO_URL, b"=").decode()


def untoken(text: str) -> str:
    """Return the id of a token. Raises MalformedEntry for anything that `token` does not make."""
    try:
        id_ = binascii.a2b_base64(text.encode("ascii").translate(_FROM_URL) + b"=" * (-len(text) % 4)).decode()
    except (binascii.Error, ValueError) as e:
        raise MalformedEntry(f"not a token: {text[:80]!r}") from e
    # A second spelling of an id would be a second subject for one thread. This check also finds text that is not
    # base64, which the decoder passes over.
    if token(id_) != text:
        raise MalformedEntry(f"not a canonical token: {text[:80]!r}")
    return id_
