"""The notifier on Redis (or Valkey): Pub/Sub, and hints as keys that expire. Needs the `redis` extra.

Two connections: one listens, the others (of the client's pool) publish and ask. Redis Cluster is not supported.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Self

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from bufstore.config import check_timeout
from bufstore.errors import ConfigError, NotifyUnavailable
from bufstore.notify.broker import HintUnavailable
from bufstore.notify.notifier import Notifier
from bufstore.notify.payload import HINT_TTL_S, channel, check_prefix, hint_key
from bufstore.notify.protocol import Event
from bufstore.notify.subscription import HealingBroker, Heard

#: A listening connection that is silent for this long is asked whether it lives.
_QUIET_S = 5.0

#: Stores a hint and publishes the message that names the hint, at once.
_PROVIDE = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return redis.call('PUBLISH', ARGV[3], ARGV[4])
"""

#: Takes what the hint has left and no more, and leaves the key's time to live alone; -1 for an unknown hint.
_CLAIM = """
local left = tonumber(redis.call('GET', KEYS[1]))
if not left then return -1 end
local take = math.min(left, tonumber(ARGV[1]))
if take > 0 then redis.call('DECRBY', KEYS[1], take) end
return take
"""


class RedisBroker(HealingBroker):
    """See `bufstore.notify.broker.Broker`."""

    def __init__(
        self,
        client: Redis,
        listener: Redis,
        prefix: str,
        *,
        hints: bool,
        owned: bool,
        timeout_s: float,
        quiet_s: float,
    ) -> None:
        super().__init__("notifier on Redis")
        self._client: Any = client
        self._listener = listener
        self._prefix = prefix
        self._hints = hints
        self._owned = owned
        self._timeout_s = timeout_s
        self._quiet_s = quiet_s

    async def publish(self, event: Event, payload: str) -> None:
        try:
            await self._client.publish(channel(self._prefix, event, ":"), payload)
        except (RedisError, OSError) as e:
            raise NotifyUnavailable(f"cannot send to Redis: {type(e).__name__}") from None

    async def publish_hinted(self, hint: str, count: int, payload: str) -> None:
        if not self._hints:
            raise HintUnavailable
        key = hint_key(self._prefix, hint, ":")
        to = channel(self._prefix, Event.SCHEDULED, ":")
        try:
            async with asyncio.timeout(self._timeout_s / 2):
                await self._client.eval(_PROVIDE, 1, key, count, HINT_TTL_S, to, payload)
        except (RedisError, OSError) as e:
            # The message may have been published: then some listeners are called twice.
            raise HintUnavailable(f"cannot store a hint in Redis: {type(e).__name__}") from None

    async def claim(self, hint: str, wanted: int) -> int:
        if not self._hints:
            return wanted
        try:
            taken = int(await self._client.eval(_CLAIM, 1, hint_key(self._prefix, hint, ":"), wanted))
        except (RedisError, OSError) as e:
            raise NotifyUnavailable(f"cannot ask Redis for a hint: {type(e).__name__}") from None
        return wanted if taken < 0 else taken

    async def aclose(self) -> None:
        await super().aclose()
        if self._owned:
            await self._client.aclose()

    async def _attach(self) -> _Source:
        source = _Source(self._listener, {channel(self._prefix, event, ":"): event for event in Event}, self._quiet_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                await source.subscribe()
        except BaseException as e:
            await source.aclose()
            if isinstance(e, AuthenticationError):
                raise ConfigError("Redis refuses the credentials") from None
            if isinstance(e, (RedisError, OSError)):
                raise NotifyUnavailable(f"cannot subscribe on Redis: {type(e).__name__}") from None
            raise
        return source


class _Source:
    """One connection subscribed to the channels."""

    def __init__(self, client: Redis, channels: dict[str, Event], quiet_s: float) -> None:
        self._pubsub = client.pubsub()
        self._channels = channels
        self._quiet_s = quiet_s
        self._to_confirm = len(channels)
        self._asked = False

    async def subscribe(self) -> None:
        """Return when Redis has confirmed all channels."""
        await self._pubsub.subscribe(*self._channels)
        while self._to_confirm:
            await self._read()

    async def next(self) -> Heard | None:
        while True:
            message = await self._read()
            if message is None:
                continue
            if message["type"] == "message":
                return self._channels[_text(message["channel"])], _text(message["data"])
            # The client has connected again by itself: the last confirmation says that all channels are back.
            if not self._to_confirm:
                return None

    async def aclose(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _read(self) -> Any:
        """Return a message or a confirmation, or None. Raises when the connection is dead."""
        message = await self._pubsub.get_message(timeout=self._quiet_s)
        if message is None:
            if self._asked:
                raise NotifyUnavailable("Redis does not answer")
            await self._pubsub.ping()
            self._asked = True
            return None
        self._asked = False
        if message["type"] not in {"message", "subscribe"}:
            return None  # a pong, which redis-py mistakes for something else where the app's client decodes responses
        if message["type"] == "subscribe":
            self._to_confirm = (self._to_confirm or len(self._channels)) - 1
        return message


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class RedisNotifier(Notifier):
    """A notifier on Redis; made by `open`."""

    @classmethod
    async def open(
        cls,
        redis: str | Redis = "redis://127.0.0.1:6379",
        *,
        listener: Redis | None = None,
        prefix: str = "bufstore",
        hints: bool = True,
        timeout_s: float = 2.0,
        quiet_s: float = _QUIET_S,
    ) -> Self:
        """Use a client of the app's, which the app still closes, or make one of a URL.

        `listener` is the client that listens, if that is another one. Redis is first asked when something is published
        or listened for. After `quiet_s` without a message a listening connection is asked whether it lives. Raises
        ConfigError.
        """
        check_prefix(prefix)
        check_timeout(timeout_s, "timeout_s")
        check_timeout(quiet_s, "quiet_s")
        client = _client_of(redis, timeout_s) if isinstance(redis, str) else redis
        if not isinstance(client, Redis):
            raise ConfigError(f"the notifier on Redis takes a redis.asyncio.Redis, not a {type(client).__name__}")
        listening = listener or client
        broker = RedisBroker(
            client, listening, prefix, hints=hints, owned=isinstance(redis, str), timeout_s=timeout_s, quiet_s=quiet_s
        )
        return cls(broker, timeout_s=timeout_s)


def _client_of(url: str, timeout_s: float) -> Redis:
    try:
        # The client has no retries of its own: the loss of a listening connection must be noticed.
        return Redis.from_url(
            url,
            socket_connect_timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError:
        pass
    raise ConfigError("cannot read the Redis URL")  # not within the except: its error quotes the URL
