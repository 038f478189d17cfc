"""Taking back claims whose lease is over, in an order in which those that fail hold up no other."""

from __future__ import annotations

from collections.abc import Set

from bufstore.errors import BufstoreError
from bufstore.mailbox import decisions
from bufstore.mailbox.counters import Counters
from bufstore.mailbox.model import Dispatch, Status
from bufstore.mailbox.ports import Backend
from bufstore.mailbox.steps import Steps

#: After this many claims that could not be taken back, a call leaves the rest to the next one.
_FAILURES = 3


class Reclaims:
    """The reclaims of one mailbox."""

    def __init__(self, backend: Backend, steps: Steps, counters: Counters) -> None:
        self._backend, self._steps, self._counters = backend, steps, counters
        #: Threads whose expired claims could not be taken back, as long as `expiring` still finds them.
        self._not_reclaimed: Set[str] = frozenset()

    async def reclaim(self, now_ms: int, limit: int) -> list[Dispatch]:
        """See `MailboxStore.reclaim_expired`."""
        reclaimed: list[Dispatch] = []
        expiring = await self._backend.expiring(now_ms, limit)
        failed: dict[str, BufstoreError] = {}
        for found in sorted(expiring, key=lambda t: t.thread_id in self._not_reclaimed):
            try:
                done = await self._steps.change(
                    found.thread_id, now_ms, lambda t: decisions.expire(t, now_ms), known=found
                )
            except BufstoreError as e:
                failed[found.thread_id] = e
                if len(failed) == _FAILURES:  # most likely the store is away, and each failure may take `timeout_s`
                    break
                continue
            if done is None:
                continue  # its holder or another sweeper was faster
            reclaimed.append(done.dispatch)
            self._counters.count("reclaimed")
            if done.dispatch.status is not Status.QUEUED:
                self._counters.count(how_given_up(done.dispatch))
        ended = {d.thread_id for d in reclaimed}
        self._not_reclaimed = (self._not_reclaimed & {t.thread_id for t in expiring} | failed.keys()) - ended
        if failed and not reclaimed:
            raise next(iter(failed.values()))
        return reclaimed


def how_given_up(ended: Dispatch) -> str:
    """Return the counter of a dispatch that is not tried again."""
    return "superseded" if ended.status is Status.SUPERSEDED else "dead_lettered"
