"""One supervised connection to NATS.

nats-py's own reconnect is switched off. A client that reconnects keeps bytes it could not send and sends them later,
is closed for good by some errors, and may lose its reading task while it says it is connected. Here a client lives
for one TCP connection: when anything is wrong with it, it is thrown away with all it holds, and a new one is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from bufstore.config import NatsConfig, mask_url
from bufstore.errors import Closed, ConfigError, LogUnavailable
from bufstore.home import Home
from bufstore.jetstream import frames, hooks
from bufstore.jetstream.asking import Asking
from bufstore.jetstream.client import (
    ListeningClient,
    check_room,
    close_client,
    forget_unsent,
    new_client,
    refusal,
    taken_bytes,
    text_of,
    told_by,
    violation,
    why_closed,
)
from bufstore.jetstream.credentials import expiry, sign_in
from bufstore.jetstream.exchange import Exchange, now
from bufstore.jetstream.failures import came_late, most_telling, why
from bufstore.jetstream.forbidden import Forbidden
from bufstore.jetstream.messages import AppendUnknown
from bufstore.jetstream.server_choice import Server
from bufstore.jetstream.short_lives import ShortLives
from bufstore.log_lines import LogLines
from bufstore.tasks import Closing, end, interrupted, no_cancel_lost, set_within, spawn

_log = LogLines(__name__)

#: How often `open` tries to log in when the server says that the login came too late, as it does after two seconds.
LOGINS = 3
_ENDED = "somebody has cancelled the store's tasks, as the end of an event loop does: close the store, and open another"


class Connection(Exchange):
    """Connects, watches, and connects again, until `aclose`."""

    def __init__(self, config: NatsConfig, name: str) -> None:
        super().__init__(config, secrets.randbelow(len(config.servers)))
        self._name = name
        self._lost, self._up = asyncio.Event(), asyncio.Event()
        self._hooks: list[Callable[[ListeningClient], Awaitable[None]]] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._home: Home | None = None
        #: Whether the connection is closed, or not open yet.
        self._closed = True
        self._closing = Closing()
        self._told_forbidden = Forbidden()
        self._on_lost: list[Callable[[], None]] = []
        self._asking, self._lives = Asking(), ShortLives()
        #: `ListeningClient.refused_bytes` of an earlier client; None when no client had a message refused.
        self._refused_bytes: int | None = None
        #: Messages sent and received by earlier clients; see `traffic`.
        self._past = [0, 0]

    def on_connect(self, hook: Callable[[ListeningClient], Awaitable[None]]) -> None:
        """Run `hook` once on every new client before anything else uses it (subscriptions, checks)."""
        if hook not in self._hooks:
            self._hooks.append(hook)

    def on_lost(self, hook: Callable[[], None]) -> None:
        """Run `hook` when a connection is lost."""
        self._on_lost.append(hook)

    @property
    def traffic(self) -> tuple[int, int]:
        """The numbers of messages sent and received since the start."""
        stats = self._client.stats if self._client else {"out_msgs": 0, "in_msgs": 0}
        return self._past[0] + stats["out_msgs"], self._past[1] + stats["in_msgs"]

    async def open(self) -> None:
        """Connect. Raises ConfigError when the server refuses us, LogUnavailable when no server can be reached."""
        self._closed, self._home = False, Home()
        for concern in hooks.concerns():
            _log.warning("%s: %s", hooks.installed(), concern, extra={"action": "nats_client"})
        again = AsyncRetrying(retry=retry_if_exception(came_late), stop=stop_after_attempt(LOGINS), reraise=True)
        try:
            await again(self._connect)
        except ConfigError:
            raise
        except Exception as e:
            raise LogUnavailable(f"cannot reach NATS at {self._where()}: {text_of(e)}") from None
        self._watch()

    def _watch(self) -> None:
        self._supervisor = spawn(self._supervise(), name="bufstore-nats-connection")
        self._supervisor.add_done_callback(self._unwatched)

    def _unwatched(self, supervisor: asyncio.Task[None]) -> None:
        if self._closed or (self._home is not None and self._home.left):  # a forked process: each call says so
            return
        if interrupted(supervisor):
            self._watch()
        else:
            # Somebody ends the loop, as `asyncio.run` does, and so nats-py's tasks, too: no answer comes any more.
            self._closed, self._reason = True, _ENDED
            self._questions.end_all(AppendUnknown(self._reason))
            self._up.set()

    async def open_with(self, prepare: Callable[[], Awaitable[object]]) -> None:
        """Connect, then await `prepare`. Closes the connection again when `prepare` fails."""
        await self.open()
        try:
            await prepare()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the connection and stop watching it, if it `closes_here`."""
        if self.closes_here():
            await self._closing(self._close)

    def closes_here(self) -> bool:
        """Return False in a process that was forked off. Raises ConfigError on another loop, unless it is closed."""
        return self._home is None or (self._closed and not self._home.left) or self._home.closes_here()

    async def _close(self) -> None:
        self._closed = True
        self._reason = "closed"
        self._up.set()  # wakes the callers of `wait_up`
        await end(self._supervisor)
        self._supervisor = None  # a second close does nothing, on any loop
        await self._discard()

    def client(self) -> ListeningClient:
        if self._closed:
            raise Closed(_ENDED if self._reason == _ENDED else "the store is closed or not open")
        if self._home is not None:
            self._home.check()
        if self._client is None or not self._client.is_connected:
            raise LogUnavailable(f"not connected to NATS at {self._where()}: {self._reason}")
        return self._client

    async def wait_up(self, timeout_s: float) -> ListeningClient:
        """Return the live client; wait for one if there is none. Raises LogUnavailable after `timeout_s`."""
        if self._home is not None and not self._closed:
            self._home.check()
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0)):
                while not self._closed and (self._client is None or not self._client.is_connected):
                    self._up.clear()
                    await self._up.wait()
        return self.client()

    def _drop(self, client: Client, reason: str) -> None:
        """Throw a client away, unless that was done already."""
        if self._client is client:
            self._reason = reason
            self._lost.set()

    async def _connect(self) -> None:
        """Connect to the next server that accepts us. An error of one server says nothing about the others."""
        errors: dict[Server, Exception] = {}
        for server in self._choice.round(now()):
            try:
                self._client = client = await self._connected_to(server)
            except Exception as e:
                errors[server] = e
                continue
            self._choice.connected(server, told_by(client))
            self._lives.made(now())
            self._lost.clear()
            self._up.set()
            return
        raise most_telling([errors[server] for server in self._choice.given])  # others may be no good anyway

    async def _connected_to(self, server: Server) -> ListeningClient:
        client = new_client(self._config, server.url)
        try:
            with no_cancel_lost():  # nats-py, and Python's wait_for before 3.12, may swallow a cancellation
                async with asyncio.timeout(self._config.connect_timeout_s * (1 + (server in self._choice.given))):
                    await client.connect(**self._options(client, server))
                if client.max_payload < (self._refused_bytes or 0):  # this explains it, and may be raised again
                    self._refused_bytes = None
                client.take_at_most(taken_bytes(client.max_payload, self._refused_bytes))
                self._inbox = client.new_inbox()
                await client.listen(self._inbox + ".*", self._on_answer)
                frames.prepare(client)
                # The server answers this PING only after it has sent any error about the subscription.
                await check_room(client, 0, self._config.connect_timeout_s)
                if refusal(client, "subscription", self._inbox + ".*") is not None:
                    raise ConfigError("NATS does not permit this user to subscribe to _INBOX.>, where answers arrive")
                for hook in self._hooks:
                    await hook(client)
                await check_room(client, 0, self._config.connect_timeout_s)
        except BaseException as e:
            await close_client(client)
            if isinstance(e, Exception):
                reason = why(e, client, server.url, expiry(self._config.credentials))
                if reason is not e:
                    raise reason from None
            raise
        return client

    def _options(self, client: ListeningClient, server: Server) -> dict[str, Any]:
        """Return nats-py's options."""

        async def on_told() -> None:
            if self._client is client:
                self._choice.told(told_by(client))

        async def on_closed() -> None:
            self._drop(client, why_closed(client))

        async def on_error(e: Exception) -> None:
            client.note(e)
            self._told_forbidden.tell(e)
            if (forbidden := violation(e)) is not None:
                if forbidden.verb == "publish":
                    self._on_forbidden_publish(forbidden.subject)
                if forbidden.taken:  # the connection stays open; all who listen subscribe again on a new one
                    self._drop(client, f"NATS took the subscription to {forbidden.subject!r} away")
            _log.debug("nats client: %s", text_of(e), extra={"action": "nats_error"})

        calls = {"closed_cb": on_closed, "error_cb": on_error, "discovered_server_cb": on_told}
        return sign_in(self._config, server) | calls | {"name": self._name}

    async def _supervise(self) -> None:
        assert self._home is not None
        while not self._closed and not self._home.left:
            if not self._lost.is_set():
                # The client may have lost its tasks without saying so. So look once a second.
                await set_within(self._lost, 1)
                if self._client is not None and not self._client.is_connected:
                    self._drop(self._client, why_closed(self._client))
                elif self._client is not None and await self._asking.permitted(self._client, now()):
                    self._drop(self._client, "NATS permits a subscription again")
                continue
            pause_s, news = self._lives.ended(now(), self._reason)
            if news:
                self._tell_lost()
            await self._discard()
            await asyncio.sleep(pause_s)
            async for attempt in AsyncRetrying(wait=wait_random_exponential(multiplier=0.05, max=2)):
                with attempt:
                    try:
                        if not self._closed and not self._home.left:
                            await self._connect()
                    except Exception as e:
                        self._reason = text_of(e)
                        news = news or self._tell_lost()  # this is more than a short life
                        raise
            if news:
                _log.info("connected to NATS again", extra={"action": "nats_connected"})

    def _tell_lost(self) -> bool:
        _log.warning("lost the connection to NATS; reconnecting: %s", self._reason, extra={"action": "nats_lost"})
        return True

    async def _discard(self) -> None:
        client, self._client = self._client, None
        self._pace.lost()
        self._questions.end_all(AppendUnknown(f"the connection was lost before NATS answered: {self._reason}"))
        for hook in self._on_lost:
            hook()
        if client is not None:
            self._past[0] += client.stats["out_msgs"]
            self._past[1] += client.stats["in_msgs"]
            if client.refused_bytes is not None:
                self._refused_bytes = client.refused_bytes
            if self._lost.is_set() and frames.supported:
                forget_unsent(client)
            await close_client(client)

    def _where(self) -> str:
        return ", ".join(mask_url(u) for u in self._config.servers)
