"""What NATS does not permit: the log tells of each subject once."""

from __future__ import annotations

import logging

from bufstore.jetstream.client import NO_ROOM, violation

_log = logging.getLogger(__name__)

#: At most this many forbidden subjects are named in the log, once each.
_NAMED = 20


class Forbidden:
    """Tells the log of what is forbidden."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def tell(self, error: Exception) -> None:
        """Log the error if it is one of these and was not told yet."""
        if (found := violation(error)) is not None:
            # Of these each is another one.
            subject = next(
                (f"{many}>" for many in ("_inbox.", "$js.ack.") if found.subject.startswith(many)), found.subject
            )
            self._once(f"NATS does not permit {found.verb} on {subject!r}")
        elif NO_ROOM in str(error).lower():
            self._once("NATS permits no further subscription: raise max_subs (`subs`) of the account")

    def _once(self, text: str) -> None:
        if text not in self._named and len(self._named) < _NAMED:
            self._named.add(text)
            _log.error("%s", text, extra={"action": "nats_forbidden"})
