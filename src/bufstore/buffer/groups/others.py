"""The other processes that write: this one hears of their groups while they are in its way, and takes turns with them.

Writers tell each other of their groups once these are stored. So a writer that waits for its turn knows what is in the
log when the turn comes, and asks nothing. They begin with a first refusal, which the refused writer announces. Each
goes on until it, or all others, have written nothing for a while. A writer that is in nobody's way announces nothing,
and hears only of refusals.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol

from bufstore.buffer.groups.turns import NEEDS_MAX_S, Pace, Turns, Usual
from bufstore.buffer.subjects import Subjects
from bufstore.errors import BufstoreError
from bufstore.jetstream.messages import StoredMessage
from bufstore.tasks import end, spawn

#: A writer that has nobody in its way for so long stops listening. To begin again costs one refusal.
_QUIET_S = 1.0
#: A clock may show a shorter time than this as no time at all.
_AT_ONCE_S = 1e-6
#: A wish to write: the kind, the writer, its pace in µs, and the last group that it has seen. A writer that needs no
#: time wants nothing.
_WISH = struct.Struct(">BIIIQ")
#: A stored group: the kind, the writer, its pace in µs, the group's sequence, and the size of the group's body. The
#: group's header follows, and the body where others need it (`_HAS_STORED_WHOLE`).
_STORED = struct.Struct(">BIIIQI")
_WISHES, _HAS_STORED, _HAS_STORED_WHOLE = range(3)
#: How many bits at the end of a group's id tell a writer's groups from each other; those before tell the writers.
_NUMBER_BITS = 32


def writer_of(group_id: int) -> int:
    """The writer of the group with this id."""
    return group_id >> _NUMBER_BITS


def group_id(writer: int, number: int) -> int:
    """The id of a writer's group with this number."""
    return writer << _NUMBER_BITS | number & (1 << _NUMBER_BITS) - 1


class Listening(Protocol):
    """A subscription that `Announcements.listen` began."""

    @property
    def lost(self) -> bool:
        """Whether nothing more will be heard."""

    async def close(self) -> None:
        """Hear no more."""


class Announcements(Protocol):
    """What writers tell each other. Nothing of this is stored, and nothing is sure to arrive."""

    async def listen(self, subject: str, heard: Callable[[bytes], None]) -> Listening:
        """Hear what is told on a subject, one's own words included. Raises LogUnavailable."""

    async def tell(self, subject: str, words: bytes) -> None:
        """Tell all that listen there. Raises nothing when that is not possible."""


class Others:
    """See the module's text."""

    def __init__(
        self,
        announcements: Announcements,
        subjects: Subjects,
        me: int,
        hear: Callable[[int, str, int, bytes | None], int | None],
        seen: Callable[[], int],
        wanting: Callable[[], bool],
    ) -> None:
        """`hear`: notes a group (its sequence, its header, the size of its body, and the body if it is told); returns
        the group's id, or None.

        `seen`: the last group that was seen. `wanting`: whether this process has something to write.
        """
        self._announcements, self._subjects, self._me = announcements, subjects, me
        self._hear, self._seen, self._wanting = hear, seen, wanting
        self._turns = Turns(me)
        #: How long the server takes to answer.
        self._usual = Usual()
        self._listening: Listening | None = None
        #: Held while this process begins or ends to listen.
        self._one_at_a_time = asyncio.Lock()
        self._closed = False
        #: Hears that somebody was refused: from this process's first group on, as long as the process lives.
        self._refusals: Listening | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        #: When another process last wrote, and when this one did, in the loop's time.
        self._others_at = self._mine_at = float("-inf")
        #: Until when this process waits for a place in the order, after it has begun to listen.
        self._new_until = float("-inf")
        #: Whether this process's turn came, and no group of its own was stored since.
        self._tried = False
        #: When this process last told that it wants to write.
        self._wished_at = float("-inf")
        #: When this process last told that it was refused.
        self._refused_at = float("-inf")

    async def were_first(self) -> None:
        """Listen from now on: another writer's group was first. Raises LogUnavailable."""
        now = asyncio.get_running_loop().time()
        if now - self._refused_at > _QUIET_S / 4:
            # A writer that was never too late knows nothing of the others, and would always be first.
            self._refused_at = now
            await self._announcements.tell(self._subjects.refused, self._me.to_bytes(4))
        await self._listen()

    async def _listen(self) -> None:
        now = self._others_at = self._mine_at = asyncio.get_running_loop().time()
        if self._listening is not None and not self._listening.lost:
            return
        async with self._one_at_a_time:
            if self._listening is not None and self._listening.lost:
                await self._end()
            if self._listening is None and not self._closed:
                self._listening = await self._announcements.listen(self._subjects.writers, self._heard)
                self._new_until = now + self._pace.needs_s
                self._look_later()

    def _heard_of_refusal(self, words: bytes) -> None:
        mine = asyncio.get_running_loop().time() - self._mine_at < _QUIET_S
        if words != self._me.to_bytes(4) and mine and self._listening is None and not self._tasks:
            self._spawn(self._join())

    async def _join(self) -> None:
        with contextlib.suppress(BufstoreError):  # then it begins when it is refused itself
            await self._listen()

    async def go_first(self) -> None:
        """Return when it is this process's turn to write."""
        loop = asyncio.get_running_loop()
        if self._tried and self._listening is not None and self._turns.knows(self._me):
            self._ask()  # those that did not wait for this process may have heard nothing of it
        while (
            self._listening is not None
            and not self._listening.lost
            and (wait_s := self._wait_s(loop.time())) > _AT_ONCE_S
        ):
            self._moved.clear()
            self._look_whose_turn()
            timer = loop.call_later(wait_s, self._moved.set)
            try:
                await self._moved.wait()
            finally:
                timer.cancel()
        self._tried = True

    def _wait_s(self, now: float) -> float:
        wait_s = self._turns.wait_s(now, self._pace.needs_s)
        # Else all that are refused for the first time at the same moment would try again at the same moment.
        return wait_s if self._turns.knows(self._me) else max(wait_s, self._new_until - now)

    def took(self, took_s: float) -> None:
        """Note how long it took until a group of this process was stored, or refused."""
        self._usual.note(took_s)

    @property
    def _pace(self) -> Pace:
        # Hearing whose turn it is, and telling of the group, takes as long as storing it. When the turn comes, the
        # refusal of the last try may still be on its way.
        pace = Pace(2 * self._usual.mean_s, min(3 * self._usual.at_most_s, NEEDS_MAX_S))
        return _paced(*_in_us(pace))  # as the others hear it

    @property
    def away(self) -> bool:
        """Whether nobody is in this process's way, and it hears of who is refused: it need not wait, or tell anything.

        Then `wrote_unheard` is enough.
        """
        return self._listening is None and self._refusals is not None and not self._refusals.lost

    def wrote_unheard(self) -> None:
        """Note that a group of this process was stored while the others are `away`."""
        self._mine_at = asyncio.get_running_loop().time()
        self._tried = False

    async def wrote(self, message: StoredMessage, *, whole: bool) -> None:
        """Tell the others that a group of this process was stored, if the writers are in each other's way.

        `whole`: the others write to the same threads, and need to know what the group says.
        """
        if self._refusals is None or self._refusals.lost:
            with contextlib.suppress(BufstoreError):  # the next group tries again
                self._refusals = await self._announcements.listen(self._subjects.refused, self._heard_of_refusal)
        self._mine_at = now = asyncio.get_running_loop().time()
        self._tried = False
        if self._listening is not None:
            pace = self._pace
            self._turns.wrote(self._me, pace, message.seq, now)
            self._look_whose_turn()
            kind = _HAS_STORED_WHOLE if whole else _HAS_STORED
            head = _STORED.pack(kind, self._me, *_in_us(pace), message.seq, len(message.body))
            words = head + (message.header or "").encode() + (message.body if whole else b"")
            await self._announcements.tell(self._subjects.writers, words)

    async def aclose(self) -> None:
        """Listen no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await end(*self._tasks)
        await self._stop()
        refusals, self._refusals = self._refusals, None
        if refusals is not None:
            await refusals.close()

    def _heard(self, words: bytes) -> None:
        # Anybody may publish here.
        if len(words) == _WISH.size and words[0] == _WISHES:
            _, writer, turn_us, needs_us, seen = _WISH.unpack(words)
            self._wished(writer, _paced(turn_us, needs_us), seen)
        elif len(words) > _STORED.size and words[0] in (_HAS_STORED, _HAS_STORED_WHOLE):
            _, writer, turn_us, needs_us, seq, size = _STORED.unpack_from(words)
            if writer != self._me:
                pace = _paced(turn_us, needs_us)
                whole = words[0] == _HAS_STORED_WHOLE
                end = max(len(words) - size, _STORED.size) if whole else len(words)
                header = words[_STORED.size : end].decode("ascii", "replace")
                self._stored(pace, seq, header, size, words[end:] if whole else None)

    def _stored(self, pace: Pace, seq: int, header: str, size: int, body: bytes | None) -> None:
        if (id_ := self._hear(seq, header, size, body)) is not None:
            now = self._others_at = asyncio.get_running_loop().time()
            self._turns.wrote(writer_of(id_), pace, seq, now)
            self._look_whose_turn()

    def _wished(self, writer: int, pace: Pace, seen: int) -> None:
        if pace.needs_s:
            self._turns.wants(writer, pace, seen, asyncio.get_running_loop().time())
            if writer == self._me:
                self._moved.set()
        else:
            self._turns.passes(writer)
            self._look_whose_turn()

    def _look_whose_turn(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self._turns.knows(self._me):
            # This process is new here, or was too slow. A wish that is not heard soon is lost.
            if self._wanting() and now - self._wished_at > self._pace.needs_s:
                self._ask()
        elif self._turns.is_first(self._me):
            if self._wanting():
                self._moved.set()
            else:  # nobody needs to wait for this process
                self._turns.passes(self._me)
                self._spawn(self._wish(0, 0))

    def _ask(self) -> None:
        """Tell the others that this process wants to write, and how long it needs."""
        self._wished_at = asyncio.get_running_loop().time()
        turn_us, needs_us = _in_us(self._pace)
        self._spawn(self._wish(turn_us, needs_us or 1))

    async def _wish(self, turn_us: int, needs_us: int) -> None:
        await self._announcements.tell(
            self._subjects.writers, _WISH.pack(_WISHES, self._me, turn_us, needs_us, self._seen())
        )

    async def _stop(self) -> None:
        async with self._one_at_a_time:
            await self._end()

    async def _end(self) -> None:
        self._turns = Turns(self._me)
        self._moved.set()
        if self._listening is not None:
            await self._listening.close()
            self._listening = None  # not before: if this is cancelled, `aclose` does the rest

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_QUIET_S, self._look, context=Context())

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if self._listening is None:
            return
        now = loop.time()
        # A writer that is far away may be silent for longer while it has its turn, or waits for it.
        others = self._turns.others or now - self._others_at < _QUIET_S
        mine = self._wanting() or now - self._mine_at < _QUIET_S
        if others and mine:
            self._look_later()
        else:
            self._spawn(self._stop())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            work.close()
            return
        spawn(work, name="bufstore-writers", among=self._tasks)


def _paced(turn_us: int, needs_us: int) -> Pace:
    return Pace(turn_us / 1e6, needs_us / 1e6)


def _in_us(pace: Pace) -> tuple[int, int]:
    return round(1e6 * min(pace.turn_s, NEEDS_MAX_S)), round(1e6 * pace.needs_s)
