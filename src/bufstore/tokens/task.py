"""One item in the hands of one holder: kept alive, found lost, completed once.

Three guards, each for what the previous one cannot see. A clock of our own: without a confirmed renewal the holder
stops before the server may give the key away. The fence, read with every renewal, shows whether another holder got the
key. And the completion is a compare-and-set on the holder's own token: a holder that slept through the other guards
finds here that it is too late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self

from bufstore.errors import BufstoreError, LogUnavailable, TokenLost
from bufstore.jetstream.messages import AppendUnknown, Conflict
from bufstore.tokens.fence import Register
from bufstore.tokens.model import Fence, decode, encode
from bufstore.tokens.pull import Delivery

_log = logging.getLogger(__name__)

#: The fraction of its time before the end at which a holder that could not renew stops.
_MARGIN = 0.1


class Task:
    """What `ExclusiveWork.take` gives. Use it as a context manager, or call `done` or `retry` in the end.

    Leaving the block without either gives the item back at once.
    """

    def __init__(
        self,
        *,
        key: str,
        payload: bytes,
        token: int,
        delivery: Delivery,
        fence: Fence,
        subject: str,
        register: Register,
        extend: Callable[[Delivery], Awaitable[None]],
        give_back: Callable[[Delivery, float], Awaitable[None]],
        finish: Callable[[Task, int], Awaitable[None]],
        ttl_s: float,
        confirmed_at: float,
    ) -> None:
        """`extend` keeps the delivery ours, `give_back` has it delivered again, after so many seconds."""
        self.key = key
        self.payload = payload
        #: Larger than that of every earlier holder of any item of this key. Pass it to everything that the work writes
        #: to.
        self.token = token
        #: Which delivery this is: above 1 another holder had it before.
        self.attempt = delivery.count
        #: Set when the token was found lost.
        self.lost = asyncio.Event()
        self.delivery = delivery
        self.fence = fence
        self._subject = subject
        self._register = register
        self._extend, self._give_back = extend, give_back
        self._finish = finish
        self._ttl_s = ttl_s
        self._until = confirmed_at + ttl_s * (1 - _MARGIN)
        self._reason = ""
        self._over = False
        self._keeping = asyncio.create_task(self._keep(), name="bufstore-token")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._over:
            try:
                await self.retry()
            except (TokenLost, LogUnavailable) as e:
                # It comes back when its time is over.
                _log.debug("cannot hand the item back; it comes again later: %s", e, extra={"action": "token_retry"})

    def check(self) -> None:
        """Raise TokenLost if the token is lost, or may be: before each step of the work that cannot be undone."""
        if not self.lost.is_set() and asyncio.get_running_loop().time() >= self._until:
            self._lose(_UNRENEWED)
        if self.lost.is_set():
            raise TokenLost(self.key, self._reason)

    async def done(self) -> None:
        """The item is done for good, and never handed out again.

        Raises TokenLost when another holder has the key: whatever this holder did, the other does it again (unless the
        answer to an earlier try was lost: then the item may be done). Raises LogUnavailable when that could not be
        found out; call it again.
        """
        await self._stop_keeping()
        if self._reason and self._reason != _UNRENEWED:
            raise TokenLost(self.key, self._reason)
        record = Fence(self.fence.holder, self.fence.message, self.fence.delivery, self.fence.item, done=True)
        seq = await self._write(record)
        self._over = True
        await self._finish(self, seq)

    async def retry(self, delay_s: float = 0.0) -> None:
        """Not done: have any worker try it again after `delay_s`. The key stays busy. Raises like `done`."""
        await self._stop_keeping()
        # A new token that nobody holds: from here on this holder cannot complete the item.
        await self._write(Fence("", self.fence.message, self.fence.delivery, self.fence.item))
        self._over = True
        await self._give_back(self.delivery, delay_s)

    async def _write(self, record: Fence) -> int:
        body = encode(record)
        try:
            return await self._register.write(self._subject, body, self.token, mine=lambda found: found == body)
        except Conflict:
            seq, found = await self._register.read(self._subject)
            if found == body:
                return seq  # an earlier call of ours, whose answer was lost
            self._lose(f"it was given to another holder (token {seq})")
            raise TokenLost(self.key, self._reason) from None

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            began = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(self._ttl_s / 3):
                    _, (seq, body) = await asyncio.gather(
                        self._extend(self.delivery), self._register.read(self._subject)
                    )
            except (BufstoreError, AppendUnknown, TimeoutError) as e:
                _log.warning(
                    "cannot renew %r; tries again: %s", self.key, e or "no answer", extra={"action": "token_renew"}
                )
                if asyncio.get_running_loop().time() + self._ttl_s / 3 >= self._until:
                    await asyncio.sleep(max(0.0, self._until - asyncio.get_running_loop().time()))
                    self._lose(_UNRENEWED)
                    return
                continue
            if seq != self.token:
                other = decode(body)
                self._lose("it was given to another holder" if other is not None else "its record is gone")
                return
            self._until = began + self._ttl_s * (1 - _MARGIN)

    def _lose(self, reason: str) -> None:
        self._reason = self._reason or reason
        if not self.lost.is_set():
            _log.warning("lost %r: %s", self.key, reason, extra={"action": "token_lost"})
        self.lost.set()

    async def _stop_keeping(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)


_UNRENEWED = "it could not be renewed in time"
