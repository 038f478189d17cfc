"""Requests and writes on whichever client is connected, until they are answered."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from msgspec.structs import replace
from nats.aio.client import Client

from bufstore.config import NatsConfig
from bufstore.errors import BufstoreError, LogUnavailable
from bufstore.jetstream import frames
from bufstore.jetstream.client import ListeningClient
from bufstore.jetstream.errors import NobodyStores
from bufstore.jetstream.failures import FAILURES, may_not_publish, meaning, too_large
from bufstore.jetstream.headers import status_of
from bufstore.jetstream.messages import AppendUnknown, Outgoing
from bufstore.jetstream.pace import Pace, Watch
from bufstore.jetstream.posted import Posted
from bufstore.jetstream.questions import OF_READ, Doubt, Questions
from bufstore.jetstream.server_choice import Server, ServerChoice, leaderless
from bufstore.jetstream.side_by_side import Ended, SideBySide
from bufstore.tasks import settle, what_came

#: A request without an answer is sent again after this time, then after twice as long, and so on.
AGAIN_S = 0.5


class Exchange(ABC):
    """See the module's text."""

    def __init__(self, config: NatsConfig, first: int) -> None:
        """`first`: the number of the server to begin with."""
        self._config = config
        self.published_on = config.published_on
        self._client: ListeningClient | None = None
        #: Where answers arrive, on the client that is connected.
        self._inbox = ""
        self._questions = Questions()
        self._pace = Pace()
        self._choice = ServerChoice([*map(Server, config.servers)], first)
        #: Why there is no client.
        self._reason = "not connected yet"

    @abstractmethod
    def client(self) -> ListeningClient:
        """Return the live client. Raises LogUnavailable (or Closed) when there is none, ConfigError on another loop."""

    @abstractmethod
    def _drop(self, client: Client, reason: str) -> None:
        """Throw a client away, unless that was done already."""

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

    @property
    def posts(self) -> bool:
        """Whether `post` is possible now, for a small message."""
        return self._client is not None and frames.goes_straight(self._client)

    def post(self, message: Outgoing, timeout_s: float, ended: Callable[[bytes | Exception], None]) -> Posted | None:
        """Send a small message before this returns, without a task; None if that is not possible: see `write`.

        `ended` is called once, later, with the answer, or the error of `write`.
        """
        try:
            client = self.client()
        except BufstoreError:
            return None
        (message,) = self._addressed([message])

        def told(posted: Posted, outcome: bytes | Exception) -> None:
            if isinstance(outcome, AppendUnknown):
                if posted.expired() and not self._choice.single:
                    self._failed(posted.at)
                self._drop(client, "a write got no answer")
            elif isinstance(outcome, bytes) and not leaderless(outcome):
                self._choice.wrote(now())
            ended(outcome)

        posted = Posted(self._questions, self._pace, message.subject, timeout_s, told)
        sent = False
        try:
            sent = frames.send_now(client, message, f"{self._inbox}.{posted.token}")
        finally:
            if not sent:
                posted.cancel()
        return posted if sent else None

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
                self._choice.wrote(now())
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
        sent, asked_at = False, now()
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
                    self._choice.wrote(now())
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
            self._failed(now())
            self._questions.end(token, NobodyStores("JetStream does not answer (it is starting, or has no leader)"))
            return
        if leaderless(data):
            self._failed(now())
        self._questions.end(token, data)

    def _failed(self, since: float) -> None:
        """Note that a request sent at `since` was not served, and leave a server that has served nothing for long."""
        client = self._client
        if self._choice.failed(since, now()) and client is not None:
            self._drop(client, "JetStream on this server answers no request; trying another node if there is one")

    def _on_forbidden_publish(self, subject: str) -> None:
        """NATS refused what we sent on `subject`, and of a batch all: tell the waiter at once."""
        self._questions.refuse(*may_not_publish(subject, self._config.api))


def now() -> float:
    """The loop's time."""
    return asyncio.get_running_loop().time()
