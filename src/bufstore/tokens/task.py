"""One item in the hands of one holder, completed once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Self

from msgspec.structs import replace

from bufstore.errors import InvalidRecord, TokenLost, Unavailable
from bufstore.jetstream.messages import Conflict
from bufstore.jetstream.pulls import Delivery, Pulls
from bufstore.log_lines import LogLines
from bufstore.tokens.fence import REFUSED, Hold, Lease
from bufstore.tokens.model import RECORD_AGE_S

_log = LogLines(__name__)


class Afterwards(NamedTuple):
    """What the queue of items does when a task ends."""

    #: Clean up after an item that is done for good, and see to the next.
    finish: Callable[[Task], Awaitable[None]]
    #: Return whether a newer item has replaced the task's.
    is_replaced: Callable[[Task], Awaitable[bool]]
    #: Have some worker look at the key.
    give_turn: Callable[[Task], Awaitable[None]]


class Task(Lease):
    """An item that `ExclusiveWork.take` gives. Use it as a context manager, or call `done` or `retry` in the end.

    Leaving the block without either call gives the item back at once.
    """

    def __init__(
        self,
        hold: Hold,
        payload: bytes,
        delivery: Delivery | None,
        others_wait: bool,
        pulls: Pulls,
        afterwards: Afterwards,
    ) -> None:
        """`delivery` (of `pulls`) told of the item; None: none did. `others_wait`: other items wait behind this one."""
        super().__init__(hold)
        self.payload = payload
        #: The number of this attempt at the item; above 1, another holder began the item before.
        self.attempt = hold.record.attempt
        self.item = hold.record.item
        self.delivery, self.others_wait = delivery, others_wait
        self._pulls, self._afterwards, self._done = pulls, afterwards, False
        self._marking = asyncio.Lock()
        self._keep()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if not self._over:
                await self.retry()
        except (TokenLost, Unavailable, *REFUSED) as e:
            # The item comes back when the holder's time is over.
            _log.debug("cannot hand the item back; it comes again later: %s", e, extra={"action": "token_retry"})
        finally:
            self._holding.stop()

    async def extend(self) -> None:
        """Hold the key for `ttl_s` from now on. Raises TokenLost, and LogUnavailable when that is not known."""
        await super().extend()
        await self._pulls.answer(self.delivery, b"+WPI")

    async def done(self) -> None:
        """Mark the item as done for good: it is never handed out again.

        Raises TokenLost when another holder has the key: whatever this holder did, the other does it again (unless the
        answer to an earlier try was lost: then the item may be done). Raises LogUnavailable when that could not be
        found out; then call `done` again.
        """
        if not self._done:
            await self._takes.to_the_end(self._mark_done())

    async def _mark_done(self) -> None:
        self._home.check()
        async with self._marking:  # an earlier call may go on although its caller gave up
            if self._done:
                return
            await self._holding.aclose()
            # The items behind it take turns with other keys: their turn comes with a message that `_finish` sends.
            reserved_s = self._ttl_s if self.others_wait else 0.0
            done = replace(self._record, holder="", done=True, lease_s=reserved_s, turn=self.others_wait)
            await self._change(done, ends=True)
            self._over = self._done = True
            self._holding.stop()
            await self._afterwards.finish(self)

    async def retry(self, delay_s: float = 0.0) -> None:
        """Give the item back: any worker tries it again after `delay_s`. The key stays busy. Raises like `done`.

        Raises InvalidRecord for an invalid delay, or one not below the 7 days after which a key's record is forgotten.
        """
        if not isinstance(delay_s, (int, float)) or not 0 <= delay_s < RECORD_AGE_S:
            raise InvalidRecord(f"delay_s must be a number of seconds from 0 to below {RECORD_AGE_S}, not {delay_s!r}")
        await self._takes.to_the_end(self._give_back(float(delay_s), self.attempt))

    async def release(self) -> None:
        """Give the item back as if it had never been taken: no attempt is counted. Raises like `done`."""
        await self._takes.to_the_end(self._give_back(0.0, self.attempt - 1))

    async def _give_back(self, delay_s: float, attempt: int) -> None:
        self._home.check()
        await self._holding.aclose()
        # The record gets another mark: from here on this holder cannot complete the item.
        free = replace(self._record, holder="", mark=secrets.token_hex(8), attempt=attempt, lease_s=delay_s)
        await self._change(free, ends=True)
        self._over = True
        self._holding.stop()
        replaced = False
        try:
            if (replaced := await self._afterwards.is_replaced(self)) and delay_s:
                # The delay was for the older item.
                free = replace(free, number=self._record.number, lease_s=0.0)
                await self._register.write(self._subject, free, self._seq)
        except (Conflict, Unavailable, *REFUSED) as e:
            _log.debug("cannot make way for a newer item: %s", e, extra={"action": "token_replaced"})
        await self._pulls.hand_back(self.delivery, delay_s)
        if replaced or self.delivery is None:  # its own delivery comes late, or never
            await self._afterwards.give_turn(self)
