"""Finds where a subject of a replicated log ends, as of a moment after the question, whichever node answers.

For a while two nodes may believe that they lead: a node that the others have left answers reads beside its successor.
So a proof in one answer says nothing about a position in another. What counts is what a single answer shows:

* A message that was stored after the question, the proof, stands above all that was acknowledged before. A replica that
  shows its end at or above the proof has all of that, leader or not.
* A subject that ends at or above the proof shows the same by itself.
* A message that was stored on condition that the subject ends at a position shows that the subject did end there: a
  node that checked this condition and no longer led has no other node left to store the message with.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bufstore.errors import LogUnavailable
from bufstore.jetstream.messages import Conflict
from bufstore.shared_call import SharedCall
from bufstore.tasks import end, see_error, spawn, unless_closed

if TYPE_CHECKING:
    from bufstore.nats.log import NatsLog

#: Seconds in which every question that needs a proof ends.
PROOF_S = 3.0
#: Seconds for which a replica that lacks the proof is asked again, before the leader is asked. The replica has the
#: proof a moment later, or is being brought up to date, which takes seconds.
_LAG_S = 0.25


class FreshEnd:
    """Asks for the end of one subject. All callers that ask while a proof is on its way share the next one."""

    def __init__(self, log: NatsLog, subject: str, proof: str) -> None:
        """`proof`: the subject of the messages that `NatsLog.store_proof` stores."""
        self._log = log
        self._subject = subject
        self._proof = proof
        self._round = SharedCall(self._begin)
        self._looks: set[asyncio.Task[int]] = set()

    async def __call__(self) -> int:
        """Return where the subject ends; 0 for nowhere. Raises Closed, LogFull, LogUnavailable."""
        look = await self._round()
        return await unless_closed(look, lambda: self._round.closed)

    async def aclose(self) -> None:
        """End the tasks that run."""
        await self._round.aclose()
        await end(*self._looks)

    async def _begin(self) -> asyncio.Task[int]:
        """Store the proof; return the task that finds the end, which goes on beside the next proof."""
        stored = await self._log.store_proof()
        look = spawn(self._look(stored), name="bufstore-fresh-end", among=self._looks)
        look.add_done_callback(see_error)
        return look

    async def _look(self, stored: int) -> int:
        try:
            async with asyncio.timeout(PROOF_S):
                found = await self._at_a_replica(stored)
                return found if found is not None else await self._at_the_leader(stored)
        except TimeoutError:
            raise LogUnavailable("no node proved in time that it has everything the log's leader stored") from None

    async def _at_a_replica(self, stored: int) -> int | None:
        """Return the end from any one replica that has the proof; None when no replica has it for some time."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + _LAG_S, 0.001
        while True:
            # Ask for the proof's own subject, too: an answer without any message does not say how far the replica is.
            shown = await self._log.shown([self._subject, self._proof], 0, PROOF_S)
            found = [m.seq for m in shown.messages if m.subject == self._subject]
            if shown.end >= stored and (found or not shown.more):
                return max(found, default=0)
            if loop.time() >= deadline:
                return None
            await asyncio.sleep(pause)
            pause *= 2

    async def _at_the_leader(self, stored: int) -> int:
        """Return the end from a node that believes it leads, and that has the proof or the others' votes."""
        pause = 0.001
        while True:
            (last,) = await self._log.ends([self._subject], PROOF_S)
            if last >= stored:
                return last
            try:
                await self._log.store_proof(last)
            except Conflict:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.1)
            else:
                return last
