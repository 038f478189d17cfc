"""The other processes that write: this one hears of their groups while they are in its way, and takes turns with them.

The server tells whoever listens of each group that it stores, before it answers the group's writer and before it
refuses another's. So a writer that listens knows what was faster when it is refused, and asks nothing. It listens from
its first refusal on, until it, or everybody else, has written nothing for a while: a listener costs the server little,
but a process that only waits should cost it nothing.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from bufstore.buffer.groups.turns import Turns, Usual
from bufstore.jetstream.messages import StoredMessage

#: Who has nobody in his way for so long stops to listen. To begin again costs one refusal.
_QUIET_S = 1.0
_WISH = struct.Struct(">II")
#: The last this many bits of a group's id tell a writer's groups from each other, those before tell the writers.
_NUMBER_BITS = 32


def writer_of(group_id: int) -> int:
    """Who wrote a group."""
    return group_id >> _NUMBER_BITS


def group_id(writer: int, number: int) -> int:
    """The id of a writer's group with this number."""
    return writer << _NUMBER_BITS | number & (1 << _NUMBER_BITS) - 1


class Listening(Protocol):
    """What was begun by `Announcements.listen`."""

    @property
    def lost(self) -> bool:
        """Whether nothing more will be heard."""
        ...

    async def close(self) -> None:
        """Hear no more."""
        ...


class Announcements(Protocol):
    """What is told to all who write, without being stored. Nothing of it is sure to arrive."""

    async def listen(self, stored: Callable[[StoredMessage, int], None], wish: Callable[[bytes], None]) -> Listening:
        """Hear of each group as it is stored: its message without the body, whose size comes beside it; and wishes.

        Raises LogUnavailable.
        """
        ...

    async def wish(self, wish: bytes) -> None:
        """Tell a wish to all who listen. Raises nothing when that is not possible."""
        ...


class Others:
    """See the module's text."""

    def __init__(
        self,
        announcements: Announcements,
        me: int,
        hear: Callable[[StoredMessage, int], int | None],
        wanting: Callable[[], bool],
    ) -> None:
        """`hear`: takes note of a group; gives its id, or None for what is none. `wanting`: whether something waits."""
        self._announcements, self._me, self._hear, self._wanting = announcements, me, hear, wanting
        self._turns = Turns(me)
        self._usual = Usual()
        self._listening: Listening | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        #: When another wrote last, and when this process did.
        self._others_at = self._mine_at = float("-inf")
        #: Who begins to listen waits so long for a place in the order.
        self._new_until = float("-inf")
        #: When it told last that it wants to write.
        self._wished_at = float("-inf")
        #: The header of the group on its way: of that one the answer tells.
        self.sending = ""

    async def were_first(self) -> None:
        """Listen from now on: a group of another was in the way. Raises LogUnavailable."""
        if self._listening is not None and self._listening.lost:
            await self._stop()
        now = self._others_at = self._mine_at = asyncio.get_running_loop().time()
        if self._listening is None:
            self._listening = await self._announcements.listen(self._stored, self._wished)
            self._new_until = now + self._usual.at_most_s
            self._look_later()

    async def go_first(self) -> None:
        """Return when it is this process's turn to write."""
        loop = asyncio.get_running_loop()
        while self._listening is not None and not self._listening.lost and (wait_s := self._wait_s(loop.time())) > 0:
            self._moved.clear()
            self._look_whose_turn()
            timer = loop.call_later(wait_s, self._moved.set)
            try:
                await self._moved.wait()
            finally:
                timer.cancel()

    def _wait_s(self, now: float) -> float:
        wait_s = self._turns.wait_s(now, self._usual.at_most_s)
        # All who are refused for the first time at the same moment would try again at the same moment.
        return wait_s if self._turns.knows(self._me) else max(wait_s, self._new_until - now)

    def took(self, took_s: float) -> None:
        """A group of this process was stored, or refused, after so long."""
        self._usual.note(took_s)

    async def aclose(self) -> None:
        """Listen no more."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stop()

    def _stored(self, message: StoredMessage, size: int) -> None:
        now = asyncio.get_running_loop().time()
        if message.header == self.sending:
            self._mine_at = now
            self._turns.wrote(self._me, now)
        elif (id_ := self._hear(message, size)) is not None:
            self._others_at = now
            self._turns.wrote(writer_of(id_), now)
            self._look_whose_turn()

    def _wished(self, wish: bytes) -> None:
        if len(wish) == _WISH.size:  # anybody may publish here
            writer, needs_us = _WISH.unpack(wish)
            if needs_us:
                self._turns.wants(writer, needs_us / 1e6, asyncio.get_running_loop().time())
                if writer == self._me:
                    self._moved.set()
            else:
                self._turns.passes(writer)
                self._look_whose_turn()

    def _look_whose_turn(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self._turns.knows(self._me):
            # It is new here, or was too slow. A wish that is not heard soon is lost.
            if self._wanting() and now - self._wished_at > self._usual.at_most_s:
                self._wished_at = now
                self._spawn(self._wish(math.ceil(1e6 * self._usual.at_most_s) or 1))
        elif self._turns.is_first(self._me):
            if self._wanting():
                self._moved.set()
            else:  # nobody need wait for it
                self._turns.passes(self._me)
                self._spawn(self._wish(0))

    async def _wish(self, needs_us: int) -> None:
        """Tell the others that this process wants to write, and how long it needs; 0: that it wants nothing."""
        await self._announcements.wish(_WISH.pack(self._me, min(needs_us, (1 << 32) - 1)))

    async def _stop(self) -> None:
        listening, self._listening = self._listening, None
        self._turns = Turns(self._me)
        self._moved.set()
        if listening is not None:
            await listening.close()

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_QUIET_S, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if self._listening is None:
            return
        if loop.time() - min(self._others_at, self._mine_at) < _QUIET_S:
            self._look_later()
            return
        self._spawn(self._stop())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name="bufstore-writers")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
