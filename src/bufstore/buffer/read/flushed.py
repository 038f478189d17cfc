"""What a flush has put into Postgres, for reads that must find it there.

A read that joins the log's tail is not misled by a Postgres that has failed over to a copy without the last commits.
One that asks Postgres alone, behind a flush, would be: the copy may lack what the flush has waited for. So such a read
looks again afterwards, and begins anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from bufstore.buffer.ports.ledger import Ledger

T = TypeVar("T")


class Flushed(msgspec.Struct, frozen=True):
    """What a flush of one log has waited for."""

    ledger: Ledger
    #: How many connections to Postgres there had been when the flush began: behind a new one may be another copy.
    connections: int
    #: The position of the thread's last entry, by the thread; and the position that each partition has reached.
    threads: Mapping[str, int] = {}
    partitions: Mapping[int, int] = {}

    async def stands(self) -> bool:
        """Return whether Postgres has it still, and had it all the time. Raises what the ledger raises."""
        if self.ledger.connections != self.connections:
            return False
        for thread_id, seq in self.threads.items():
            if (await self.ledger.watermark(thread_id)).flushed_seq < seq:
                return False
        reached = await self.ledger.flushed() if self.partitions else {}
        return all(reached.get(p, 0) >= seq for p, seq in self.partitions.items())


async def all_stand(flushed: Sequence[Flushed]) -> bool:
    """Return whether all of these stand."""
    for one in flushed:
        if not await one.stands():
            return False
    return True


async def behind(flush: Callable[[], Awaitable[Sequence[Flushed]]], ask: Callable[[], Awaitable[T]]) -> T:
    """Flush, then return what `ask` finds in Postgres; both again if Postgres may have gone back in between."""
    while True:
        flushed = await flush()
        answer = await ask()
        if await all_stand(flushed):
            return answer
