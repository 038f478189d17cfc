"""A key in the hands of one holder: renewed, found lost, changed by its holder only.

Three guards, each for what the previous one cannot see. A clock of our own: without a confirmed renewal the holder
stops before others may take the key. The renewal is a compare-and-set, and shows whether another holder has it. And so
is the last write: a holder that slept through the other guards finds there that it is too late.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from msgspec.structs import replace

from bufstore.errors import TokenLost, Unavailable
from bufstore.jetstream.messages import Conflict
from bufstore.tokens.fence import Register
from bufstore.tokens.model import Record

_log = logging.getLogger(__name__)

#: The fraction of its time before the end at which a holder that could not renew stops.
_MARGIN = 0.1
_RENEWED = 1 / 3
_UNRENEWED = "it was not renewed in time"


class Hold(NamedTuple):
    """A record that was written, as `seq` and not before `began` by the loop's clock."""

    key: str
    register: Register
    subject: str
    seq: int
    record: Record
    began: float


class Lease:
    """What `Task` and `Lock` have in common."""

    #: After which the server removes what we write; 0: never.
    _server_ttl_s = 0

    def __init__(self, hold: Hold) -> None:
        self.key, self._register, self._subject, self._seq, record, began = hold
        #: Larger than that of every earlier holder of this key. Pass it to everything that is written under it.
        self.token = hold.seq
        #: Set when the key was found lost.
        self.lost = asyncio.Event()
        self._record, self._ttl_s = replace(record, token=hold.seq), record.lease_s
        self._reason = ""
        #: It was done, given back or released.
        self._over = False
        self._changing = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._confirmed(began)

    def check(self) -> None:
        """Raise TokenLost if the key is lost, or may be: before each step that cannot be undone."""
        if asyncio.get_running_loop().time() >= self._until:
            self._lose(_UNRENEWED)
        if self.lost.is_set():
            raise TokenLost(self.key, self._reason)

    async def extend(self) -> None:
        """Hold it for its whole time from now on. Raises TokenLost, and LogUnavailable when that is not known."""
        if self.lost.is_set():
            raise TokenLost(self.key, self._reason)
        began = asyncio.get_running_loop().time()
        await self._change(self._record)
        if not self.lost.is_set():
            self._confirmed(began)

    async def _change(self, record: Record) -> None:
        """Replace our record. Raises TokenLost, LogUnavailable."""
        async with self._changing:
            if self._over:
                raise TokenLost(self.key, "it was done or given back")
            number = self._record.number + 1
            self._record = replace(self._record, number=number)
            record = replace(record, number=number)
            while True:
                try:
                    self._seq = await self._register.write(self._subject, record, self._seq, self._server_ttl_s)
                    return
                except Conflict:
                    if (await self._found_again()).done and record.done:
                        return

    async def _found_again(self) -> Record:
        """What stands there instead of what we knew: a write of ours whose answer was lost. Raises TokenLost."""
        seq, found = await self._register.read(self._subject)
        if found.mark != self._record.mark:
            self._lose(f"another has it (token {found.token or seq})" if seq else "its time was over")
            raise TokenLost(self.key, self._reason) from None
        self._seq = seq
        return found

    def _keep(self) -> None:
        self._keeping = asyncio.create_task(self._renew(), name="bufstore-token")

    async def _renew(self) -> None:
        while not self.lost.is_set():
            due = self._until - self._ttl_s * (1 - _MARGIN - _RENEWED)
            await asyncio.sleep(max(due - asyncio.get_running_loop().time(), self._ttl_s / 20))
            try:
                await self.extend()
            except TokenLost:
                return
            except Unavailable as e:
                _log.warning("cannot renew %r; tries again: %s", self.key, e, extra={"action": "token_renew"})

    async def _stop_keeping(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    def _stop(self) -> None:
        """Nothing is held any more, and nothing will be found lost."""
        if self._timer is not None:
            self._timer.cancel()

    def _confirmed(self, began: float) -> None:
        self._stop()
        self._until = began + self._ttl_s * (1 - _MARGIN)
        # Not when a renewal fails: its answer may be out for longer than there is time.
        self._timer = asyncio.get_running_loop().call_at(self._until, self._lose, _UNRENEWED)

    def _lose(self, reason: str) -> None:
        self._stop()
        if not self.lost.is_set():
            self._reason = reason
            _log.warning("lost %r: %s", self.key, reason, extra={"action": "token_lost"})
            self.lost.set()
