"""Finds out when NATS permits a subscription that it refused: NATS does not say so by itself."""

from __future__ import annotations

import contextlib

import nats.errors
from nats.aio.msg import Msg

from bufstore.jetstream.client import ListeningClient

#: Seconds that an answer may take, and from a new refusal's answer to the next question. This pause doubles each time.
_EVERY_S = 5.0
_PAUSE_MAX_S = 60.0


class Asking:
    """Subscribes once more, for a moment, to what was refused: to one subject at a time, as NATS logs each try."""

    def __init__(self) -> None:
        self._next, self._pause_s = float("-inf"), _EVERY_S
        self._known: set[str] = set()
        #: The subject that was asked for last; and how it had been refused, until the answer was looked at.
        self._subject = ""
        self._before: Exception | None = None

    async def permitted(self, client: ListeningClient, now: float) -> bool:
        """Return whether a subscription that the client lacks is permitted by now. Call it every second or so."""
        refused = _refused(client)
        if not refused.keys() <= self._known:
            self._next, self._pause_s = min(self._next, now + _EVERY_S), _EVERY_S
        self._known = set(refused)
        if not refused or now < self._next:
            return False
        if (before := self._before) is not None:
            self._before = None
            self._next, self._pause_s = now + self._pause_s, min(2 * self._pause_s, _PAUSE_MAX_S)
            return refused.get(self._subject) is before  # it was not refused again
        self._subject = min((s for s in refused if s > self._subject), default=min(refused))
        self._before, self._next = refused[self._subject], now + _EVERY_S
        with contextlib.suppress(nats.errors.Error, OSError):
            await (await client.subscribe(self._subject, cb=_ignore)).unsubscribe()
        return False


def _refused(client: ListeningClient) -> dict[str, Exception]:
    """Return the subjects of the client's subscriptions that were refused, each with the last refusal."""
    told = client.refused
    wanted = {s.subject for s in client._subs.values()} if told else set()
    return {s: told[s.lower()] for s in wanted if s.lower() in told}


async def _ignore(_: Msg) -> None:
    pass
