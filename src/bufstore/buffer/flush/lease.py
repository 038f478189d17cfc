"""Keeps one flusher in the list of live flushers, and says which partitions it owns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bufstore.buffer.flush.membership import Pulse, owned
from bufstore.buffer.ports.shared_state import SharedState
from bufstore.errors import BufstoreError
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.messages import AppendUnknown
from bufstore.log_lines import LogLines
from bufstore.tasks import set_within

_log = LogLines(__name__)


#: Every live member renews its record within this many seconds, whatever its lease.
_PULSE_S = 2.0


class Lease:
    """One member's lease; see `bufstore.buffer.flush.membership` for how partitions are shared.

    `own` is called with our partitions after each look at the list. `hold` is called before a lease that cannot be
    renewed runs out: from then on others may take our partitions, and keep what they take. But if no member can renew
    its lease, nobody takes anything, and all go on with what they have. A member that cannot flush (`unable` gives the
    reason) leaves the list, so that others flush its partitions, and joins again when it can.

    If a member ends, others flush its partitions within `lease_s`. Half of that is the time to live of its record. The
    others do not wait until the server removes the record (it looks once a second): they take the member's partitions
    once they have seen no renewal for as long as the member itself would go on before it holds. The rest of `lease_s`
    is for observers that see this late.
    """

    def __init__(
        self,
        shared: SharedState,
        member: str,
        partitions: int,
        lease_s: float,
        own: Callable[[frozenset[int]], None],
        hold: Callable[[], None],
        unable: Callable[[], str | None],
        trouble: Callable[[], str],
    ) -> None:
        """`trouble`: tells the others why nothing is flushed here at the moment; empty when all is well."""
        self._shared = shared
        self._member = member
        self._partitions = partitions
        #: How many seconds the record lives, and how many pass between two renewals.
        self._ttl_s = max(1, int(lease_s) // 2)
        self._interval_s = self._ttl_s / 4
        self._own = own
        self._hold = hold
        self._unable = unable
        self._trouble = trouble
        self._pulse = Pulse(self._ttl_s, self._interval_s)
        self._until = 0.0
        self._announced = False
        #: Why the record has run out, or is about to; empty when it has not.
        self.trouble = ""
        self._changed = asyncio.Event()

    def members_changed(self) -> None:
        """Look at the list now."""
        self._changed.set()

    async def keep(self, stopping: asyncio.Event) -> None:
        """Renew the record four times per time to live, until `stopping`."""
        said = ""
        while not stopping.is_set():
            self._changed.clear()
            try:
                reason = self._unable()
                await (self._renew() if reason is None else self._withdraw(reason))
                self.trouble = said = ""
            except (BufstoreError, AppendUnknown) as e:
                if str(e) != said:  # it tries several times a second
                    _log.warning(
                        "cannot renew the lease; this flusher takes no new partitions until it can: %s",
                        e,
                        extra={"action": "lease_error"},
                    )
                said = str(e)
                if asyncio.get_running_loop().time() > self._until - self._interval_s:
                    self._hold()
                    self.trouble = f"cannot renew its lease, and takes no new partitions until it can: {e}"
            await set_within(self._changed, self._interval_s)

    async def _withdraw(self, reason: str) -> None:
        self._own(frozenset())
        if self._announced:
            _log.warning(
                "this process cannot flush; other flushers take its partitions: %s",
                reason,
                extra={"action": "lease_given_up"},
            )
            await self._shared.leave(self._member)
            self._announced = False

    async def _renew(self) -> None:
        began = asyncio.get_running_loop().time()
        await self._shared.renew_member(self._member, self._ttl_s, self._trouble())
        if not self._announced:
            reach(Failpoint.LEASE_RENEWED)
            await self._shared.announce()
            self._announced = True
        records = await self._shared.members()  # without the others' records, ours is worth nothing
        self._until = began + self._ttl_s  # `began` is before the server began to count
        alive, dead = self._pulse.look(records, asyncio.get_running_loop().time())
        self._own(owned(self._member, {*alive, self._member}, self._partitions))
        for member in set(dead) - {self._member}:
            await self._shared.leave(member)


async def living(shared: SharedState) -> list[str]:
    """Return the names of the live flushers.

    If there are records, this takes two seconds, and two more if one is not renewed: a slow renewal is no death.
    """
    alive: set[str] = set()
    now = await shared.members()
    for _ in range(2):
        if alive.issuperset(now):
            break
        before = now
        await asyncio.sleep(_PULSE_S)
        now = await shared.members()
        alive |= {name for name, number in now.items() if before.get(name) != number}
    return sorted(alive & now.keys())
