"""What NATS does not permit: each subject is told once, and what it means for what was sent there."""

from __future__ import annotations

import logging

from bufstore.errors import ConfigError
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
            subject = "_inbox.>" if found.subject.startswith("_inbox.") else found.subject
            self._once(f"NATS does not permit {found.verb} on {subject!r}")
        elif NO_ROOM in str(error).lower():
            self._once("NATS permits no further subscription: raise max_subs (`subs`) of the account")

    def _once(self, text: str) -> None:
        if text not in self._named and len(self._named) < _NAMED:
            self._named.add(text)
            _log.error("%s", text, extra={"action": "nats_forbidden"})


def may_not_publish(subject: str, api: str) -> tuple[ConfigError, set[str]]:
    """Return the error for messages on a subject, and the subjects that they may have had, all in lower case."""
    how = "run `bufstore setup` as operator" if ".stream.create." in subject else "see `bufstore permissions`"
    # A server of the domain names the subject that ours stands for there; one on a leaf node names ours.
    api = api.lower()
    sent = {subject, f"{api}.{subject}", subject.replace("$js.api.", f"{api}.")}
    return ConfigError(f"NATS does not permit this user to publish on {subject!r} ({how})"), sent
