"""A plain lock with a time to live: one record per held key, which the server removes when its time is over.

Acquiring, extending and releasing a lock are each a compare-and-set on that record: a holder that comes too late gets
an error, and does no harm.
"""

from __future__ import annotations

import secrets
from typing import Self

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from bufstore import elapsed
from bufstore.config import SECONDS_MAX, ToNats, as_nats_config, as_seconds, check_name, check_timeout
from bufstore.errors import ConfigError, LogUnavailable, TokenBusy, TokenLost, Unavailable
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.ensure import ensure_stream
from bufstore.jetstream.errors import MessageMissing
from bufstore.jetstream.messages import Conflict
from bufstore.jetstream.stream import NatsStream
from bufstore.tokens.fence import Hold, Keyed, Lease, Register, holder_name
from bufstore.tokens.model import NAMED, Record, Storage, locks_config


class Locks(Keyed):
    """Locks by key; made by `open`."""

    def __init__(self, connection: Connection, api: str, name: str, storage: Storage, timeout_s: float) -> None:
        self._stream, self._timeout_s = NatsStream(connection, api, f"{name}-locks", storage.replicas), timeout_s
        super().__init__(connection, Register(self._stream, timeout_s), f"{name}.lock.")
        self._config = locks_config(name, storage)

    @classmethod
    async def open(
        cls, nats: ToNats, *, name: str = "tokens", storage: Storage | None = None, timeout_s: float = 5.0
    ) -> Self:
        """Connect, and create or check the stream. Raises ConfigError, ConfigDrift, LogUnavailable.

        `timeout_s`: how long a call waits for an answer of NATS.
        """
        check_name(name, NAMED)
        check_timeout(timeout_s, "timeout_s")
        nats_config = as_nats_config(nats)
        connection = Connection(nats_config, "bufstore-locks")
        locks = cls(connection, nats_config.api, name, storage or Storage(), timeout_s)
        ours = "the arguments of Locks.open"
        await connection.open_with(lambda: ensure_stream(locks._stream, locks._config, ours, {}))
        return locks

    async def acquire(self, key: str, *, ttl_s: int = 10, wait_s: float = 0.0, holder: str = "") -> Lock:
        """Take the lock for `ttl_s` (whole seconds). Raises TokenBusy when another still holds it after `wait_s`.

        `holder` (by default host and process) is shown to callers that find the key busy. Raises LogUnavailable when it
        is not known in time whether the lock was taken; it is free again after `ttl_s` at the latest.
        """
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int) or not 1 <= ttl_s <= SECONDS_MAX:
            raise ConfigError("a lock's ttl_s must be whole seconds, at least one")
        wait_s = as_seconds(wait_s, "wait_s")
        subject = self._subject(key)

        async def once() -> Lock:
            return await self._to_the_end(self._take(key, subject, ttl_s, holder))

        if not wait_s:
            return await once()
        return await AsyncRetrying(
            wait=wait_random_exponential(multiplier=0.01, max=0.25),
            stop=stop_after_delay(wait_s),
            retry=retry_if_exception_type(TokenBusy),
            reraise=True,
        )(once)

    async def held(self) -> int:
        """Return how many locks are held. Raises LogUnavailable."""
        return int((await self._stream.info(self._timeout_s))["state"]["messages"])

    async def _free(self, subject: str, seq: int, record: Record) -> bool:
        if record.holder:
            await self._stream.purge(subject, seq, self._timeout_s)
        return not record.holder  # a renewal may have come in between

    async def _hand_back(self, held: Lock) -> None:
        await held.release()

    async def _take(self, key: str, subject: str, ttl_s: int, holder: str) -> Lock:
        began = elapsed.now_s()
        record = Record(holder_name(holder), secrets.token_hex(8), lease_s=ttl_s)
        try:
            seq = await self._register.write(subject, record, 0, ttl_s)
        except Conflict:
            raise TokenBusy(key, (await self._register.read(subject))[1].holder) from None
        lock = Lock(Hold(key, self._register, subject, seq, record, began, self._takes))
        try:
            lock.check()
        except TokenLost:  # a block would begin before it learned that, and beside that of another holder
            raise LogUnavailable(f"{key!r} was taken, but its time was over before NATS was heard; retry") from None
        return lock


class Lock(Lease):
    """A held lock. As a context manager it is renewed, and released at the end."""

    def __init__(self, hold: Hold) -> None:
        super().__init__(hold)
        self._server_ttl_s = int(hold.record.lease_s)

    async def __aenter__(self) -> Self:
        self._keep()
        return self

    async def __aexit__(self, *error: object) -> None:
        believed = not self.lost.is_set()
        try:
            await self.release()
        except (TokenLost, Unavailable, ConfigError) as e:
            if error[0] is None and not (believed and isinstance(e, LogUnavailable)):
                raise  # the block must learn that it may not have held the lock to its end

    async def release(self) -> None:
        """Give the lock up, also when cancelled meanwhile.

        Raises TokenLost when it was lost before, and LogUnavailable when that is not known: then call it again, or the
        lock may be held until its time is over.
        """
        if not self._over:
            await self._takes.to_the_end(self._release())

    async def _release(self) -> None:
        self._home.check()
        # End the renewals first: a later one would take the lock again.
        await self._holding.aclose()
        again = self._ending
        try:
            async with self._changing:
                self._ending = True
                while not self._over:
                    try:  # delete by sequence: that record can only be ours
                        await self._register.remove(self._seq)
                        self._over = True
                    except MessageMissing:
                        await self._found_again()
        except TokenLost:
            self._over = True
            if not again:  # else an earlier call has released it, or has said that this is not known
                raise
        finally:
            self._holding.stop()
            self._reason = self._reason or ("released" if self._over else "it may have been released")
            self.lost.set()
