"""A plain lock with a time to live: one message per held key, which the server removes when its time is over.

Acquiring, extending and releasing it are each compare-and-set on that message: a holder that comes too late is told
so, and does no harm. The sequence of the first write is the fencing token.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from bufstore.config import NatsConfig, as_nats_config
from bufstore.errors import ConfigError, LogUnavailable, TokenBusy, TokenLost
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.drift import check
from bufstore.jetstream.errors import MessageMissing, StreamMissing
from bufstore.jetstream.messages import Conflict
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import token
from bufstore.tokens.fence import Register
from bufstore.tokens.model import check_name, first_token
from bufstore.types import check_id

#: The fraction of its time before the end at which a holder counts the lock as lost.
_MARGIN = 0.1


def locks_config(name: str, replicas: int) -> dict[str, Any]:
    """The stream of the locks: a message per key that is held."""
    return {
        "name": f"{name}-locks",
        "subjects": [f"{name}.lock.*"],
        "retention": "limits",
        "discard": "old",
        "storage": "file",
        "num_replicas": replicas,
        "max_msgs_per_subject": 1,
        "max_age": 0,
        "allow_msg_ttl": True,
        "allow_direct": True,
    }


class Locks:
    """Locks by key; made by `open`."""

    def __init__(self, connection: Connection, api: str, name: str, replicas: int, timeout_s: float) -> None:
        self._connection = connection
        self._config = locks_config(name, replicas)
        self._name = name
        self._stream = NatsStream(connection, api, self._config["name"], replicas)
        self._register = Register(self._stream, timeout_s)

    @classmethod
    async def open(
        cls,
        nats: str | Sequence[str] | NatsConfig | Mapping[str, Any],
        *,
        name: str = "tokens",
        replicas: int = 1,
        timeout_s: float = 5.0,
    ) -> Self:
        """Connect, and create or check the stream. Raises ConfigError, ConfigDrift, LogUnavailable."""
        check_name(name)
        if not timeout_s > 0:
            raise ConfigError("timeout_s must be positive")
        nats_config = as_nats_config(nats)
        connection = Connection(nats_config, "bufstore-locks")
        locks = cls(connection, nats_config.api, name, replicas, timeout_s)
        await connection.open()
        try:
            await locks._ensure()
        except BaseException:
            await connection.aclose()
            raise
        return locks

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Disconnect. Held locks stay held until their time is over."""
        await self._connection.aclose()

    async def acquire(self, key: str, *, ttl_s: int = 10, wait_s: float = 0.0) -> Lock:
        """The lock, for `ttl_s` (whole seconds). Raises TokenBusy when another holds it, still after `wait_s`.

        Raises LogUnavailable when it is not known whether it was taken; it is free again after `ttl_s` at the latest.
        """
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int) or ttl_s < 1:
            raise ConfigError("a lock's ttl_s must be whole seconds, at least one")
        subject = f"{self._name}.lock.{token(check_id(key, 'the key'))}"
        async for attempt in AsyncRetrying(
            wait=wait_random_exponential(multiplier=0.01, max=0.25),
            stop=stop_after_delay(wait_s),
            retry=retry_if_exception_type(TokenBusy),
            reraise=True,
        ):
            with attempt:
                return await self._take(key, subject, ttl_s)
        raise AssertionError("unreachable")

    async def _take(self, key: str, subject: str, ttl_s: int) -> Lock:
        began = asyncio.get_running_loop().time()
        holder = secrets.token_bytes(12)
        try:
            seq = await self._register.write(subject, holder, 0, mine=lambda body: body == holder, ttl_s=ttl_s)
        except Conflict:
            raise TokenBusy(key) from None
        return Lock(key, seq, ttl_s, began, subject, holder, self._register, self._stream, self._config["name"])

    async def _ensure(self) -> None:
        name = self._config["name"]
        try:
            info = await self._stream.api(f"STREAM.INFO.{name}")
        except StreamMissing:
            once = {"first_seq": first_token(time.time_ns() // 1_000_000)}
            info = await self._stream.api(f"STREAM.CREATE.{name}", {**self._config, **once})
        check(f"stream {name}", self._config, info["config"], "the arguments of Locks.open", f"nats stream edit {name}")


class Lock:
    """A held lock. As a context manager it is renewed, and released at the end."""

    def __init__(
        self,
        key: str,
        seq: int,
        ttl_s: int,
        began: float,
        subject: str,
        holder: bytes,
        register: Register,
        stream: NatsStream,
        stream_name: str,
    ) -> None:
        self.key = key
        #: Larger than that of every earlier holder. Pass it to everything that is written under the lock.
        self.token = seq
        #: Set when the lock was found lost.
        self.lost = asyncio.Event()
        self._seq = seq
        self._ttl_s = ttl_s
        self._until = began + ttl_s * (1 - _MARGIN)
        self._subject = subject
        self._holder = holder
        self._register = register
        self._stream = stream
        self._stream_name = stream_name
        self._changing = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None
        self._released = False

    async def __aenter__(self) -> Self:
        self._keeping = asyncio.create_task(self._keep(), name="bufstore-lock")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.release()
        except (TokenLost, LogUnavailable):
            if error is None and self.lost.is_set():
                raise  # until now the block believed that it held the lock

    def check(self) -> None:
        """Raise TokenLost if the lock is lost, or may be: before each step that cannot be undone."""
        if self._released or self.lost.is_set() or asyncio.get_running_loop().time() >= self._until:
            self.lost.set()
            raise TokenLost(
                self.key, "released" if self._released else "it was not extended in time, or another holder took it"
            )

    async def extend(self) -> None:
        """Hold it for `ttl_s` from now on. Raises TokenLost, and LogUnavailable when that is not known."""
        async with self._changing:
            if self._released:
                raise TokenLost(self.key, "released")
            began = asyncio.get_running_loop().time()
            # A new body each time: otherwise the previous renewal could be mistaken for one whose answer was lost.
            body = self._holder + secrets.token_bytes(4)
            try:
                self._seq = await self._register.write(
                    self._subject, body, self._seq, mine=lambda found: found == body, ttl_s=self._ttl_s
                )
            except Conflict:
                self.lost.set()
                raise TokenLost(self.key, "its time was over") from None
            self._until = began + self._ttl_s * (1 - _MARGIN)

    async def release(self) -> None:
        """Give it up. Raises TokenLost when it was lost before, and LogUnavailable when that is not known."""
        # End the renewals first: a later one would take the lock again.
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        async with self._changing:
            if self._released:
                return
            try:
                await self._remove()
            except MessageMissing:
                self.lost.set()
                raise TokenLost(self.key, "its time was over") from None
            finally:
                self._released = True

    async def _remove(self) -> None:
        # By its sequence: it can only be ours.
        request = {"seq": self._seq, "no_erase": True}
        await self._stream.api(f"STREAM.MSG.DELETE.{self._stream_name}", request)

    async def _keep(self) -> None:
        while not self.lost.is_set():
            await asyncio.sleep(self._ttl_s / 3)
            try:
                await self.extend()
            except TokenLost:
                return
            except LogUnavailable:
                if asyncio.get_running_loop().time() >= self._until:
                    self.lost.set()
