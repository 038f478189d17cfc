"""Ids in subjects: a raw id never reaches a subject, key or header.

`token` maps ids injectively into ``[A-Za-z0-9_-]``, so that no id can be a wildcard, end a protocol line, or meet
another id.
"""

from __future__ import annotations

import base64
import binascii

from bufstore.errors import MalformedEntry


def token(id_: str) -> str:
    """The id as base64url of its UTF-8, without padding: injective, at most 1366 characters for 1 KiB."""
    return base64.urlsafe_b64encode(id_.encode()).rstrip(b"=").decode()


def untoken(text: str) -> str:
    """The id of a token. Raises MalformedEntry for anything that `token` does not make."""
    try:
        id_ = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as e:
        raise MalformedEntry(f"not a token: {text[:80]!r}") from e
    if token(id_) != text:  # a second spelling of an id would be a second subject for one thread
        raise MalformedEntry(f"not a canonical token: {text[:80]!r}")
    return id_
