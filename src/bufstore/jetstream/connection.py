"""One supervised connection to NATS.

nats-py's own reconnect is switched off. A client that reconnects keeps bytes it could not send and sends them later,
is closed for good by some errors, and may lose its reading task while it says it is connected. Here a client lives
for one TCP connection: when anything is wrong with it, it is thrown away with all it holds, and a new one is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace
from nats.aio.client import Client
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from bufstore.config import NatsConfig, mask_url
from bufstore.errors import BufstoreError, Closed, ConfigError, LogUnavailable
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
from bufstore.jetstream.credentials import sign_in
from bufstore.jetstream.failures import FAILURES, came_late, may_not_publish, meaning, most_telling, too_large, why
from bufstore.jetstream.forbidden import Forbidden
from bufstore.jetstream.headers import status_of
from bufstore.jetstream.messages import AppendUnknown, Outgoing
from bufstore.jetstream.pace import Pace, Watch
from bufstore.jetstream.questions import OF_READ, Doubt, Questions
from bufstore.jetstream.server_choice import Server, ServerChoice, leaderless
from bufstore.jetstream.short_lives import ShortLives
from bufstore.jetstream.side_by_side import Ended, SideBySide
from bufstore.log_lines import LogLines
from bufstore.tasks import Closing, end, interrupted, no_cancel_lost, set_within, settle, spawn, what_came

_log = LogLines(__name__)

#: A request without an answer is sent again after this time, then after twice as long, and so on.
AGAIN_S = 0.5
#: How often `open` tries to log in when the server says that the login came too late, as it does after two seconds.
LOGINS = 3
_ENDED = "somebody has cancelled the store's tasks, as the end of an event loop does: close the store, and open another"


class Connection:
    """Connects, watches, and connects again, until `aclose`."""

    def __init__(self, config: NatsConfig, name: str) -> None:
        self._config = config
        self.published_on = config.published_on
        self._name = name
        self._client: ListeningClient | None = None
        self._lost, self._up = asyncio.Event(), asyncio.Event()
        self._hooks: list[Callable[[ListeningClient], Awaitable[None]]] = []
        self._supervisor: asyncio.Task[None] | None = None
        self._home: Home | None = None
        self._reason = "not connected yet"
        #: Whether the connection is closed, or not open yet.
        self._closed = True
        self._closing = Closing()
        self._inbox = ""
        self._questions = Questions()
        self._pace = Pace()
        self._told_forbidden = Forbidden()
        self._on_lost: list[Callable[[], None]] = []
        self._asking, self._lives = Asking(), ShortLives()
        self._choice = ServerChoice([*map(Server, config.servers)], secrets.randbelow(len(config.servers)))
        #: `ListeningClient.refused_bytes` of an earlier client; None when no client had a message refused.
        self._refused_bytes: int | None = None
        #: Messages sent and received by earlier clients; see `traffic`.
        self._past = [0, 0]

    def on_connect(self, hook: Callable[[ListeningClient], Awaitable[None]]) -> None:
        """Run `hook` on every new client before anything else uses it (subscriptions, checks)."""
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
        if self._closed:
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
        """Return the live client. Raises LogUnavailable (or Closed) when there is none, ConfigError on another loop."""
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

    async def request(self, subject: str, payload: bytes, timeout_s: float, *, again: bool = False) -> bytes:
        """Send a request and return the answer's payload.

        `again`: the request is idempotent, so it is repeated while no answer comes. A server never answers a request
        that is sent while its cluster elects a leader, even once there is a leader.

        Raises LogUnavailable when the request certainly had no effect, AppendUnknown when no answer came, ConfigError
        when NATS does not permit the request.
        """
        client = self.client()
        return await self._answer(
            [subject], lambda reply: frames.post(client, subject, payload, reply), timeout_s, again=again
        )

    async def write(
        self,
        messages: Sequence[Outgoing],
        batch: str,
        timeout_s: float,
        *,
        again: bool = False,
        doubt: Doubt | None = None,
    ) -> bytes:
        """Send messages (several as the atomic batch `batch`) and return the answer to the last. Raises like `request`.

        `again` as there. `doubt`: a refusal is returned only when no other answer has come by the time of its proof.

        Without an answer the connection is thrown away, so that nothing in its buffers arrives after somebody has
        checked what is stored. It is kept while bytes of a large write leave (`bufstore.jetstream.pace`).
        """
        client, messages = self.client(), self._addressed(messages)
        try:
            subjects = [m.subject for m in messages]
            watch = Watch(self._pace, client)

            async def send(reply: str) -> None:
                await frames.send(client, messages, batch, reply, watch.moved)
                watch.sent()

            answer = await self._answer(subjects, send, timeout_s, paced=True, again=again, doubt=doubt)
            watch.answered()
            return answer
        except AppendUnknown:
            self._drop(client, "a write got no answer")
            raise

    async def write_each(
        self, messages: Sequence[Outgoing], timeout_s: float, ended: Ended, *, doubt: Doubt | None = None
    ) -> None:
        """Send messages side by side. `ended` gets the number of each and its answer, or the error of `write`."""
        if len(messages) <= 1 or not frames.supported:
            await asyncio.gather(*(self._write_one(i, m, timeout_s, ended, doubt) for i, m in enumerate(messages)))
            return
        client, messages = self.client(), self._addressed(messages)
        side_by_side = SideBySide(len(messages), ended, doubt)

        def heard(number: int, outcome: bytes | Exception) -> bool:
            if isinstance(outcome, bytes) and not leaderless(outcome):
                self._choice.wrote(_now())
            return side_by_side.heard(number, outcome)

        tokens = [self._questions.ask([m.subject], partial(heard, number)) for number, m in enumerate(messages)]
        error: Exception = AppendUnknown("given up")
        try:
            async with asyncio.timeout(timeout_s) as limit:
                self._pace.begin(tokens[0], limit, timeout_s)
                watch = Watch(self._pace, client)
                replies = [f"{self._inbox}.{token}" for token in tokens]
                for number in await frames.send_each(client, messages, replies, watch.moved):
                    self._questions.end(tokens[number], too_large())
                watch.sent()
                await side_by_side.all_ended(self._proven)
                watch.answered()
        except LogUnavailable as e:
            error = e
        except (AppendUnknown, *FAILURES) as e:
            if isinstance(e, TimeoutError):
                await what_came()
            error = e if isinstance(e, AppendUnknown) else meaning(e, sent=False, why=self._reason)
            if isinstance(error, AppendUnknown) and not side_by_side.ended:
                self._drop(client, "a write got no answer")
        finally:
            self._pace.end(tokens[0])
            for token in tokens:
                self._questions.end(token, error)

    async def _write_one(
        self, number: int, message: Outgoing, timeout_s: float, ended: Ended, doubt: Doubt | None
    ) -> None:
        outcome: bytes | Exception
        try:
            outcome = await self.write([message], "", timeout_s, doubt=doubt)
        except (AppendUnknown, BufstoreError) as e:
            outcome = e
        ended(number, outcome)

    def _addressed(self, messages: Sequence[Outgoing]) -> Sequence[Outgoing]:
        on = self.published_on
        return [replace(m, subject=on(m.subject)) for m in messages] if self._config.domain else messages

    async def _answer(
        self,
        subjects: Sequence[str],
        send: Callable[[str], Awaitable[None]],
        timeout_s: float,
        *,
        again: bool = False,
        paced: bool = False,
        doubt: Doubt | None = None,
    ) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        accepted: list[bytes] = []

        def heard(outcome: bytes | Exception) -> bool:
            settle(answer, outcome)
            if not isinstance(outcome, bytes):
                return False
            if doubt is None or not doubt.refused(outcome):
                accepted.append(outcome)
            return not accepted  # another leader may answer, too

        token = self._questions.ask(subjects, heard)
        sent, asked_at = False, _now()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                if paced:
                    self._pace.begin(token, limit, timeout_s)
                await send(f"{self._inbox}.{token}")
                sent = True
                pause = AGAIN_S
                while again and not (await asyncio.wait([answer], timeout=pause))[0]:
                    await send(f"{self._inbox}.{token}")
                    pause *= 2
                first = await answer
                if paced and not leaderless(first):
                    self._choice.wrote(_now())
                if doubt is not None and not accepted:
                    await self._proven(doubt)
                return accepted[0] if accepted else first
        except FAILURES as e:
            if isinstance(e, TimeoutError):
                await what_came()
                if accepted:
                    return accepted[0]
                if not self._choice.single:  # a node behind a single address says so
                    self._failed(asked_at)
            raise meaning(e, sent=sent, why=self._reason) from None
        finally:
            self._questions.forget(token)
            if answer.done() and not answer.cancelled():
                answer.exception()  # otherwise asyncio reports an error that came while `send` failed
            if paced:
                self._pace.end(token)

    async def _proven(self, doubt: Doubt) -> None:
        try:
            await doubt.prove()
        except BufstoreError as e:  # the message was sent, and a leader that stores it may answer later
            raise AppendUnknown(f"a node that may no longer be the leader refused the write: {e}") from None

    @contextlib.contextmanager
    def answers(
        self, subject: str, heard: Callable[[bytes, bytes], None], end: Callable[[bytes | Exception], bool]
    ) -> Iterator[str]:
        """Give the block a reply subject for a request on `subject` that may have several answers: `heard` gets each.

        `end` gets AppendUnknown when the connection is lost, ConfigError when NATS does not permit the request.
        """
        token = self._questions.ask([subject], end, heard)
        try:
            yield f"{self._inbox}.{token}"
        finally:
            self._questions.forget(token)

    def _on_answer(self, subject: str, reply: str, data: bytes, headers: bytes) -> None:
        token = subject.rpartition(".")[2]
        if token.endswith(OF_READ):
            # Also when the read was given up: what it asked for is anybody's data, and may look like a server's error.
            self._questions.heard(token, data, headers)
            return
        if headers and status_of(headers)[0] == "503":
            self._failed(_now())
            self._questions.end(token, LogUnavailable("JetStream does not answer (it is starting, or has no leader)"))
            return
        if leaderless(data):
            self._failed(_now())
        self._questions.end(token, data)

    def _failed(self, since: float) -> None:
        """Note that a request sent at `since` was not served, and leave a server that has served nothing for long."""
        client = self._client
        if self._choice.failed(since, _now()) and client is not None:
            self._drop(client, "JetStream on this server answers no request; trying another node if there is one")

    def _on_forbidden_publish(self, subject: str) -> None:
        """NATS refused what we sent on `subject`, and of a batch all: tell the waiter at once."""
        self._questions.refuse(*may_not_publish(subject, self._config.api))

    async def _connect(self) -> None:
        """Connect to the next server that accepts us. An error of one server says nothing about the others."""
        errors: dict[Server, Exception] = {}
        for server in self._choice.round(_now()):
            try:
                self._client = client = await self._connected_to(server)
            except Exception as e:
                errors[server] = e
                continue
            self._choice.connected(server, told_by(client))
            self._lives.made(_now())
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
            if isinstance(e, Exception) and (reason := why(e, client, server.url)) is not e:
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
                elif self._client is not None and await self._asking.permitted(self._client, _now()):
                    self._drop(self._client, "NATS permits a subscription again")
                continue
            pause_s, news = self._lives.ended(_now(), self._reason)
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


def _now() -> float:
    return asyncio.get_running_loop().time()
