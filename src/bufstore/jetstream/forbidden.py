"""What NATS does not permit: the log names each subject once in a while."""

from __future__ import annotations

import re
import time

from bufstore.jetstream.client import NO_ROOM, violation
from bufstore.jetstream.failures import of_all_consumers
from bufstore.log_lines import LogLines

_log = LogLines(__name__)

#: At most this many texts are remembered.
_NAMED = 20
#: After so many seconds a text is news again.
_AGAIN_S = 600.0
#: What the subjects of JetStream's API begin with, those of a domain too.
_API = re.compile(r"\$js\.(?:(?!ack\.)[^.]+\.)?api\.")


class Forbidden:
    """Tells the log of what is forbidden."""

    def __init__(self) -> None:
        #: When each text was logged.
        self._named: dict[str, float] = {}

    def tell(self, error: Exception) -> None:
        """Log the error if it is one of these and was not told lately."""
        if (found := violation(error)) is not None:
            self._now_and_then(f"NATS does not permit {found.verb} on {_family(found.subject)!r}")
        elif NO_ROOM in str(error).lower():
            self._now_and_then("NATS permits no further subscription: raise max_subs (`subs`) of the account")

    def _now_and_then(self, text: str) -> None:
        now = time.monotonic()
        self._named = {told: at for told, at in self._named.items() if now - at < _AGAIN_S}
        if text not in self._named and len(self._named) < _NAMED:
            self._named[text] = now
            _log.error("%s", text, extra={"action": "nats_forbidden"})


def _family(subject: str) -> str:
    """Return the subject, or what it has in common with those that differ in an id only."""
    first, *rest = subject.split(".")
    if first == "_inbox":
        return "_inbox.>"
    of_all = of_all_consumers(subject)
    if of_all != subject or _API.match(subject) or len(rest) < 2:
        return of_all
    return f"{first}.{rest[0]}.>"
