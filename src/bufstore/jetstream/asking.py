"""Finds out when NATS permits a subscription that it refused: it does not tell."""

from __future__ import annotations

import contextlib

import nats.errors
from nats.aio.msg import Msg

from bufstore.jetstream.client import ListeningClient, refusal

#: Seconds between two questions.
_EVERY_S = 5.0


class Asking:
    """Subscribes once more, for a moment, to what was refused."""

    def __init__(self) -> None:
        self._next = float("-inf")
        #: What was asked for last, each with the refusal before.
        self._asked: dict[str, Exception] = {}

    async def permitted(self, client: ListeningClient, now: float) -> bool:
        """Return whether a subscription that the client lacks is permitted by now. Call it every second or so."""
        if now < self._next:
            return False
        self._next = now + _EVERY_S
        subjects = {subscription.subject for subscription in client._subs.values()}
        refused = {s: error for s in subjects if (error := refusal(client, "subscription", s)) is not None}
        if any(self._asked.get(subject) is error for subject, error in refused.items()):
            return True  # it was not refused again
        self._asked = refused
        for subject in refused:
            with contextlib.suppress(nats.errors.Error, OSError):
                await (await client.subscribe(subject, cb=_ignore)).unsubscribe()
        return False


async def _ignore(_: Msg) -> None:
    pass
