"""What is sent: channel names, and the payload ``{hint id}:{kind}``. No I/O.

The split is at the first colon, so a kind may have colons; a hint id has none. An empty hint id means "no hint": all
listeners are called.
"""

from __future__ import annotations

import re

from bufstore.errors import ConfigError
from bufstore.notify.protocol import Event

#: How long a hint is remembered. Listeners that ask later are called, whatever the hint was.
HINT_TTL_S = 60
#: Words of letters, digits, "_" and "-", joined by dots: good in a subject, a KV key and a channel alike.
_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,48}(\.[A-Za-z0-9_-]{1,48}){0,3}")


def check_prefix(prefix: str) -> str:
    """Return the prefix. Raises ConfigError for one that does not fit into a subject, a key and a channel."""
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            "a notifier's prefix must be one to four words separated by dots, each of them 1 to 48 characters out of "
            "A-Z, a-z, 0-9, _ and -"
        )
    return prefix


def channel(prefix: str, event: Event, joint: str) -> str:
    """Return the subject or channel of an event; `joint` is the text that joins words on this kind of server."""
    return f"{prefix}{joint}{event.value}"


def hint_key(prefix: str, hint: str, joint: str) -> str:
    return f"{prefix}{joint}hint{joint}{hint}"


def pack(hint: str, kind: str) -> str:
    return f"{hint}:{kind}"


def unpack(payload: str) -> tuple[str, str] | None:
    """Return hint id and kind, or None for any other payload: anybody may publish on the channel."""
    hint, colon, kind = payload.partition(":")
    return (hint, kind) if colon else None
