"""The notifier on NATS: plain subjects, and hints in JetStream where there is one.

The notifier's own connection is the supervised one of `bufstore.jetstream.connection`; a client of the app's is used
as it is, and watched for reconnections. Every publish is followed by a round trip: without it, what nats-py still has
in its buffers would arrive only when the caller's loop comes to rest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.kv import KeyValue

from bufstore.config import NatsConfig, ToNats, as_nats_config, check_timeout
from bufstore.errors import BufstoreError, ConfigError, NotifyUnavailable
from bufstore.jetstream.client import ListeningClient, check_room, refusal, round_trip
from bufstore.jetstream.connection import Connection
from bufstore.notify.broker import Broker, HintUnavailable, Teardown
from bufstore.notify.nats_hints import Hints, HintStore, hint_failure
from bufstore.notify.notifier import Notifier
from bufstore.notify.payload import channel, check_prefix
from bufstore.notify.protocol import Event
from bufstore.tasks import end, spawn
from bufstore.types import check_choice

#: How often the app's client is checked for a reconnection.
_WATCH_S = 0.25

_NO_LIMIT: Any = {"pending_msgs_limit": 0, "pending_bytes_limit": 0}


class NatsBroker(Broker):
    """See `bufstore.notify.broker.Broker`."""

    def __init__(self, link: Connection | Client, prefix: str, hints: HintStore | None, *, timeout_s: float) -> None:
        """`link`: a connection of our own, or the app's client."""
        self._link = link
        self._prefix = prefix
        self._hints = hints
        self._timeout_s = timeout_s
        self._wanted: dict[Event, Callable[[str], None]] = {}
        self._subscriptions: dict[Event, Any] = {}
        #: Held by each subscription, so that no refusal of one hides the refusal of another.
        self._one_at_a_time = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._seen = 0
        if isinstance(link, Connection):
            link.on_connect(self._resubscribe)
        else:
            self._seen = link.stats["reconnects"]

    def client(self) -> Client:
        """Return the live client. Raises NotifyUnavailable when there is none, ConfigError on another event loop."""
        if isinstance(self._link, Connection):
            try:
                return self._link.client()
            except ConfigError:
                raise
            except BufstoreError as e:
                raise NotifyUnavailable(str(e)) from None
        if not self._link.is_connected:
            raise NotifyUnavailable("the app's NATS client is not connected")
        return self._link

    async def publish(self, event: Event, payload: str) -> None:
        client, subject = self.client(), channel(self._prefix, event, ".")
        try:
            async with _permitted(client, "publish", subject):
                await client.publish(subject, payload.encode())
        except (nats.errors.Error, OSError) as e:
            raise NotifyUnavailable(f"cannot send to NATS: {type(e).__name__}") from None

    async def publish_hinted(self, hint: str, count: int, payload: str) -> None:
        if self._hints is None:
            raise HintUnavailable
        client = self.client()
        try:
            # Only part of the time: the rest is for the message without a hint.
            async with asyncio.timeout(self._timeout_s / 2):
                await self._hints.provide(client, hint, count)
        except Exception as e:
            raise HintUnavailable(hint_failure(e)) from None
        await self.publish(Event.SCHEDULED, payload)

    async def claim(self, hint: str, wanted: int) -> int:
        if self._hints is None:
            return wanted
        return await self._hints.claim(self.client(), hint, wanted)

    async def subscribe(self, event: Event, deliver: Callable[[str], None]) -> Teardown:
        client = self.client()
        self._wanted[event] = deliver
        subscription = None
        try:
            permitted = _permitted(client, "subscription", channel(self._prefix, event, "."))
            async with asyncio.timeout(self._timeout_s), self._one_at_a_time, permitted:
                # `permitted` ends when the server has seen the subscription: what others publish from then on arrives.
                subscription = await self._subscribe(client, event, deliver)
        except BaseException as e:
            self._wanted.pop(event, None)
            # `_subscriptions` has another one if our own connection was made anew meanwhile.
            await self._unsubscribe(subscription, self._subscriptions.pop(event, None))
            if isinstance(e, (nats.errors.Error, OSError)):
                raise NotifyUnavailable(f"cannot subscribe on NATS: {type(e).__name__}") from None
            raise
        if isinstance(self._link, Client) and self._watch is None:
            self._watch = spawn(self._watch_client(self._link), name="bufstore-notify-watch")
        self._subscriptions[event] = subscription

        async def teardown() -> None:
            self._wanted.pop(event, None)
            if not self._wanted:
                await self._end_watch()
            await self._unsubscribe(self._subscriptions.pop(event))

        return teardown

    def closes_here(self) -> bool:
        return not isinstance(self._link, Connection) or self._link.closes_here()

    async def aclose(self) -> None:
        await self._end_watch()
        if isinstance(self._link, Connection):
            await self._link.aclose()

    async def _subscribe(self, client: Client, event: Event, deliver: Callable[[str], None]) -> Any:
        async def heard(msg: Msg) -> None:
            deliver(msg.data.decode("utf-8", "replace"))

        return await client.subscribe(channel(self._prefix, event, "."), cb=heard, **_NO_LIMIT)

    async def _unsubscribe(self, *subscriptions: Any) -> None:
        """Unsubscribe, whatever the server says: the client forgets the subscriptions at once."""
        for each in filter(None, subscriptions):
            with contextlib.suppress(nats.errors.Error, OSError):
                async with asyncio.timeout(self._timeout_s):
                    await each.unsubscribe()

    async def _resubscribe(self, client: Client) -> None:
        """Subscribe again on a new client of our own connection, before anybody else uses it."""
        for event, deliver in list(self._wanted.items()):
            self._subscriptions[event] = await self._subscribe(client, event, deliver)
        await round_trip(client)
        if self._seen:
            asyncio.get_running_loop().call_soon(self.tell_restored)
        self._seen += 1

    async def _watch_client(self, client: Client) -> None:
        # nats-py subscribes again by itself, and tells only the client's creator that it reconnected.
        while True:
            await asyncio.sleep(_WATCH_S)
            if client.is_connected and client.stats["reconnects"] != self._seen:
                self._seen = client.stats["reconnects"]
                self.tell_restored()

    async def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        await end(watch)


@contextlib.asynccontextmanager
async def _permitted(client: Client, verb: str, subject: str) -> AsyncIterator[None]:
    """Make a round trip after the block: NATS answers it after any refusal. Raises ConfigError when NATS refuses.

    An app's client keeps the app's error callback, so only the client's last error shows here.
    """
    before, full = refusal(client, verb, subject), client.no_room if isinstance(client, ListeningClient) else 0
    yield
    await round_trip(client)
    if isinstance(client, ListeningClient) and verb == "subscription":
        await check_room(client, full)
    if refusal(client, verb, subject) not in (None, before):
        what = "publish on" if verb == "publish" else "subscribe to"
        raise ConfigError(
            f"NATS does not permit this user to {what} {subject!r}: permit it (docs/NOTIFY.md, Rights on NATS)"
        )


class NatsNotifier(Notifier):
    """A notifier on NATS; made by `open`."""

    def __init__(self, broker: NatsBroker, hints: HintStore | None, *, timeout_s: float) -> None:
        super().__init__(broker, timeout_s=timeout_s)
        self._hint_store = hints

    @classmethod
    async def open(
        cls,
        nats: ToNats | Client = "nats://127.0.0.1:4222",
        *,
        prefix: str = "bufstore",
        hints: Hints | KeyValue = Hints.AUTO,
        domain: str | None = None,
        timeout_s: float = 2.0,
    ) -> Self:
        """Connect, or use a connected client of the app's, which the app still closes.

        `domain`: the JetStream domain for the hints of an app's client; `NatsConfig` has one of its own.
        `hints`: where hints are kept; may be a KV bucket of the app's, whose values should live about 60 s.
        Raises ConfigError, and LogUnavailable when NATS cannot be reached. JetStream is asked when it is first needed.
        """
        check_prefix(prefix)
        check_timeout(timeout_s, "timeout_s")
        if not isinstance(hints, KeyValue):
            check_choice(hints, Hints, "hints", ConfigError)
        link: Connection | Client
        api = NatsConfig(domain=domain).api
        if isinstance(nats, Client):
            link = nats
        else:
            config = as_nats_config(nats)
            api = config.api
            link = Connection(config, "bufstore-notify")
        store = None if hints is Hints.NONE else HintStore(prefix, hints, api, timeout_s)
        notifier = cls(NatsBroker(link, prefix, store, timeout_s=timeout_s), store, timeout_s=timeout_s)
        if isinstance(link, Connection):
            await link.open()
        return notifier

    @property
    def hints(self) -> Hints:
        """Where hints are kept; AUTO until that has been found out."""
        return self._hint_store.kind if self._hint_store is not None else Hints.NONE
