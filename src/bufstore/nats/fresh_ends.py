"""Finds where subjects of a replicated log end, as of a moment after the question, whichever node answers.

For a while two nodes may believe that they lead: a node that the others have left answers reads beside its successor.
So a proof in one answer says nothing about a position in another. What counts is what a single answer shows:

* A message that was stored after the question, the proof, stands above all that was acknowledged before. A replica that
  shows its end at or above the proof has all of that, leader or not.
* A subject that ends at or above the proof shows the same by itself.
* A message that was stored on condition that a subject ends at a position shows that the subject did end there: a node
  that checked this condition and no longer led has no other node left to store the message with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from bufstore.errors import LogUnavailable
from bufstore.jetstream.messages import Conflict
from bufstore.jetstream.stream import Shown
from bufstore.shared_call import SharedCall
from bufstore.tasks import end, spawn

#: Seconds in which every question that needs a proof ends.
PROOF_S = 3.0
#: Seconds for which a replica that lacks the proof is asked again, before the leader is asked. The replica has the
#: proof a moment later, or is being brought up to date, which takes seconds.
_LAG_S = 0.25
#: The server answers for 1024 subjects at most.
_SUBJECTS_AT_ONCE = 1000


class Replicas(Protocol):
    """The questions to a replicated log. All of them raise LogUnavailable."""

    async def store_proof(self, expected: int | None = None, expected_of: str | None = None) -> int:
        """Store a message if the subject (wildcards allowed) ends at `expected`; return the message's position.

        Raises Conflict when the subject ends elsewhere, or is being written.
        """
        ...

    async def shown(self, subjects: Sequence[str], start: int) -> Shown:
        """See `NatsStream.shown`."""
        ...

    async def believed_end(self, filter_: str) -> int:
        """Return where the subject (wildcards allowed) ends, from a node that believes it leads; 0 for nowhere."""
        ...


class FreshEnds:
    """Asks for the ends of subjects. All callers that ask while a proof is on its way share the next one."""

    def __init__(self, replicas: Replicas, proof: str) -> None:
        """`proof`: the subject of the messages that `Replicas.store_proof` stores."""
        self._replicas = replicas
        self._proof = proof
        self._wanted: set[str] = set()
        self._round = SharedCall(self._begin)
        self._looks: set[asyncio.Task[dict[str, int]]] = set()

    async def of_subject(self, subject: str) -> int:
        """Return where the subject ends; 0 for nowhere. Raises LogFull, LogUnavailable."""
        self._wanted.add(subject)
        look = await self._round()
        return (await asyncio.shield(look))[subject]

    async def of_filters(self, filters: Sequence[str]) -> list[int]:
        """Return the same for filters with wildcards; the caller bounds the time."""
        stored = await self._replicas.store_proof()
        return await asyncio.gather(*(self._at_the_leader(f, stored) for f in filters))

    async def aclose(self) -> None:
        """End the tasks that run."""
        await self._round.aclose()
        await end(*self._looks)

    async def _begin(self) -> asyncio.Task[dict[str, int]]:
        """Store the proof; return the task that finds the ends, which goes on beside the next proof."""
        wanted, self._wanted = sorted(self._wanted), set()
        stored = await self._replicas.store_proof()
        look = spawn(self._look(wanted, stored), name="bufstore-fresh-ends")
        self._looks.add(look)
        look.add_done_callback(self._looked)
        return look

    def _looked(self, look: asyncio.Task[dict[str, int]]) -> None:
        self._looks.discard(look)
        if not look.cancelled():
            look.exception()  # all callers may have been cancelled

    async def _look(self, subjects: Sequence[str], stored: int) -> dict[str, int]:
        ends: dict[str, int] = {}
        try:
            async with asyncio.timeout(PROOF_S):
                for i in range(0, len(subjects), _SUBJECTS_AT_ONCE):
                    part = subjects[i : i + _SUBJECTS_AT_ONCE]
                    found = await self._at_a_replica(part, stored)
                    if found is None:
                        leader = await asyncio.gather(*(self._at_the_leader(s, stored) for s in part))
                        found = dict(zip(part, leader, strict=True))
                    ends |= found
        except TimeoutError:
            raise _nobody() from None
        return ends

    async def _at_a_replica(self, subjects: Sequence[str], stored: int) -> dict[str, int] | None:
        """Return the ends from any one replica that has the proof; None when no replica has it for some time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LAG_S
        ends = dict.fromkeys(subjects, 0)
        start, pause = 0, 0.001
        while True:
            # Ask for the proof's own subject, too: an answer without any message does not say how far the replica is.
            shown = await self._replicas.shown([*subjects, self._proof], start)
            if shown.end >= stored:
                ends |= {m.subject: m.seq for m in shown.messages if m.subject in ends}
                if not shown.more:
                    return ends
                # A write that comes meanwhile only moves its subject further back, into a later part.
                start = shown.messages[-1].seq + 1
            elif loop.time() >= deadline:
                return None
            else:
                await asyncio.sleep(pause)
                pause *= 2

    async def _at_the_leader(self, filter_: str, stored: int) -> int:
        """Return the end from a node that believes it leads, and that has the proof or the others' votes."""
        pause = 0.001
        while True:
            end = await self._replicas.believed_end(filter_)
            if end >= stored:
                return end
            try:
                await self._replicas.store_proof(end, filter_)
            except Conflict:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.1)
            else:
                return end


def _nobody() -> LogUnavailable:
    return LogUnavailable("no node proved in time that it has everything the log's leader stored")
