"""Exclusive work: items per key, in order, one at a time, however many workers there are.

DIRECT, the default. Items wait in the inbox until they are done. A message per key in the work queue (a second one is
refused) says that the key has items; its receiver works on the first one. When the last item is done, the message is
acknowledged. The submitter makes sure that an item submitted in this very moment is not left behind: its message was
refused, so it looks at the fence. If work is in progress, the holder looks into the inbox again afterwards. If all is
done, the holder may have looked already, so the submitter tries again until its message is accepted or not needed.

SOURCED. The server itself moves an item from the inbox to the work queue when the key is free. It looks every two
seconds, and an item that it cannot move holds up the items of other keys behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_any,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_random_exponential,
)

from bufstore.config import NatsConfig, as_nats_config
from bufstore.errors import (
    LogUnavailable,
    MalformedEntry,
    SubmitUnknown,
    TokenBusy,
    TokenLost,
    TokenQueueFull,
    TooLarge,
)
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import MessageMissing, SubjectFull
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import token, untoken
from bufstore.tokens.fence import Register
from bufstore.tokens.model import Fence, Form, Policy, TokensConfig, decode, encode
from bufstore.tokens.pull import Delivery, Puller
from bufstore.tokens.setup import WORKERS, check_server, ensure, names
from bufstore.tokens.task import Task
from bufstore.types import check_id

_log = logging.getLogger(__name__)

#: The part of max_payload kept for headers.
_HEADERS_BYTES = 1024
#: After an error a worker waits this long, and up to twice that, before it asks again.
_PAUSE_S = 0.5

Handler = Callable[[Task], Awaitable[None]]


class ExclusiveWork:
    """One kind of exclusive work; made by `open`."""

    def __init__(self, connection: Connection, api: str, config: TokensConfig) -> None:
        self._connection = connection
        self._config = config
        inbox, work, fence = names(config)
        self._inbox = NatsStream(connection, api, inbox, config.replicas)
        self._work = NatsStream(connection, api, work, config.replicas)
        self._fences = NatsStream(connection, api, fence, config.replicas)
        self._register = Register(self._fences, config.timeout_s)
        self._pull_subject = f"{api}.CONSUMER.MSG.NEXT.{work}.{WORKERS}"
        self._pullers: list[Puller] = []
        self._idle: list[Puller] = []
        self._returning: set[asyncio.Future[None]] = set()
        connection.on_lost(self._lost)

    @classmethod
    async def open(
        cls, nats: str | Sequence[str] | NatsConfig | Mapping[str, Any], config: TokensConfig | None = None
    ) -> Self:
        """Connect, and create or check the streams. Raises ConfigError, ConfigDrift, LogUnavailable."""
        config = config or TokensConfig()
        nats_config = as_nats_config(nats)
        connection = Connection(nats_config, "bufstore-tokens")
        work = cls(connection, nats_config.api, config)
        await connection.open()
        try:
            check_server(config, connection.client())
            await ensure(config, work._inbox, work._work, work._fences)
        except BaseException:
            await connection.aclose()
            raise
        return work

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Disconnect. Held items go to other workers when their time is over."""
        for puller in self._pullers:
            await puller.aclose()
        await asyncio.gather(*self._returning, return_exceptions=True)
        await self._connection.aclose()

    async def submit(self, key: str, payload: bytes = b"") -> None:
        """Add an item of work for a key. When this returns it is stored, and will be worked on.

        Raises TokenBusy or TokenQueueFull as `TokensConfig.policy` says, TooLarge, InvalidId and LogUnavailable:
        nothing was submitted then. SubmitUnknown: it may have been.
        """
        name = token(check_id(key, "the key"))
        limit = self._inbox.message_bytes_max - _HEADERS_BYTES
        if len(payload) > limit:
            raise TooLarge(len(payload), limit)
        c = self._config
        where = "work" if c.form is Form.SOURCED and c.policy is Policy.REFUSE else "inbox"
        stream = self._work if where == "work" else self._inbox
        try:
            await stream.publish(Outgoing(f"{c.name}.{where}.{name}", payload), c.timeout_s)
        except SubjectFull:
            raise (TokenBusy(key) if c.policy is Policy.REFUSE else TokenQueueFull(key, c.waiting_max)) from None
        except AppendUnknown as e:
            raise SubmitUnknown(key, str(e)) from None
        if c.form is Form.DIRECT:
            await self._announce(key, name)

    async def take(self, wait_s: float = 5.0) -> Task | None:
        """The next item whose key is free, or None when there is none for `wait_s`. Raises LogUnavailable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        puller = self._idle.pop() if self._idle else self._new_puller()
        try:
            while True:
                delivery = await puller.next(max(deadline - loop.time(), 0.001))
                if delivery is None:
                    return None
                # To the end: a key that is taken by half would have no holder until its time is over.
                beginning = asyncio.ensure_future(self._begin_or_return(delivery))
                try:
                    task = await asyncio.shield(beginning)
                except asyncio.CancelledError:
                    beginning.add_done_callback(self._abandon)
                    raise
                if task is not None:
                    return task
        finally:
            self._idle.append(puller)

    async def run(self, handler: Handler, stopping: asyncio.Event, *, concurrency: int = 1) -> None:
        """Work until `stopping`: call `handler` with each item, and mark the item done when it returns.

        An item whose handler fails is tried again, later each time. A handler whose token is lost is cancelled.
        """
        workers = [asyncio.create_task(self._work_on(handler, stopping)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:  # when one has failed, none works on after this has ended
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    # Submitting.

    async def _announce(self, key: str, name: str) -> None:
        """Make sure that the key's holder, or its next one, finds the item just stored."""
        telling = AsyncRetrying(
            wait=wait_random_exponential(multiplier=0.002, max=0.1),
            stop=stop_after_delay(self._config.timeout_s),
            retry=retry_any(
                retry_if_result(lambda told: not told),
                retry_if_exception_type((LogUnavailable, AppendUnknown)),
            ),
        )
        try:
            await telling(self._tell, name)
        except RetryError as e:
            if (error := e.last_attempt.exception()) is not None:
                raise SubmitUnknown(key, f"it is stored, but no worker could be told of it: {error}") from None
            # The holder is between the last look and its ack, and does not go on: when its time is over, the message
            # is delivered again, and the next holder looks.

    async def _tell(self, name: str) -> bool:
        c = self._config
        subject = f"{c.name}.work.{name}"
        try:
            await self._work.publish(Outgoing(subject, b""), c.timeout_s)
            return True
        except SubjectFull:
            pass
        # In this order: a record read later than the message could belong to a later one.
        _, body = await self._register.read(f"{c.name}.fence.{name}")
        fence = decode(body)
        if fence is None or not fence.done:
            return True  # its holder looks into the inbox again when it is done
        waiting = (await self._work.last([subject], c.timeout_s)).get(subject)
        # A message other than the finished one has not been looked at: its receiver finds the item.
        return waiting is not None and waiting.seq != fence.message

    # Taking.

    def _new_puller(self) -> Puller:
        puller = Puller(self._connection, self._pull_subject)
        self._pullers.append(puller)
        return puller

    def _lost(self) -> None:
        for puller in self._pullers:
            puller.lost()

    def _abandon(self, beginning: asyncio.Future[Task | None]) -> None:
        """The caller is gone: hand back what was taken for it."""
        if beginning.cancelled() or beginning.exception() is not None:
            return
        task = beginning.result()
        if task is not None:
            returning = asyncio.ensure_future(task.__aexit__())
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)

    async def _begin_or_return(self, delivery: Delivery) -> Task | None:
        try:
            return await self._begin(delivery)
        except MalformedEntry as e:
            _log.error("removed a malformed message from the work queue: %s", e, extra={"action": "token_malformed"})
            await self._ack(delivery)
            return None
        except LogUnavailable:
            with contextlib.suppress(LogUnavailable):
                await self._give_back(delivery, 0)
            raise

    async def _begin(self, delivery: Delivery) -> Task | None:
        """The task of a delivery; None when it is not for us, or there is nothing to do."""
        c = self._config
        name = delivery.subject.rpartition(".")[2]
        subject = f"{c.name}.fence.{name}"
        key = untoken(name)
        while True:
            began = asyncio.get_running_loop().time()
            # The first renewal tells that the delivery did not wait in a buffer of ours for too long.
            _, (seq, body), first = await asyncio.gather(
                self._extend(delivery), self._register.read(subject), self._first_item(delivery, name)
            )
            before = decode(body)
            if before is not None and before.outranks(delivery.seq, delivery.count):
                return None  # another holder got it after us
            if before is not None and before.done and before.message == delivery.seq:
                if c.form is Form.SOURCED:
                    await self._ack(delivery)
                    return None
                if first is not None and first.seq == before.item:
                    await self._remove(before.item)  # its holder died just before
                    continue
            if first is None:
                # The holder before is done and has left this message, or the item was taken away by hand.
                if before is None or not before.done or before.message != delivery.seq:
                    await self._close(delivery, subject, seq)
                    continue
                await self._ack(delivery)
                return None
            fence = Fence(secrets.token_hex(8), delivery.seq, delivery.count, first.seq)
            mine = encode(fence)
            try:
                given = await self._register.write(subject, mine, seq, mine=lambda b, mine=mine: b == mine)  # type: ignore[misc]
            except Conflict:
                continue
            return Task(
                key=key,
                payload=first.body,
                token=given,
                delivery=delivery,
                fence=fence,
                subject=subject,
                register=self._register,
                extend=self._extend,
                give_back=self._give_back,
                finish=self._finish,
                ttl_s=c.ttl_s,
                confirmed_at=began,
            )

    async def _first_item(self, delivery: Delivery, name: str) -> StoredMessage | None:
        if self._config.form is Form.SOURCED:
            return StoredMessage(delivery.subject, delivery.seq, None, delivery.body)
        found = await self._inbox.after(f"{self._config.name}.inbox.{name}", 0, self._config.timeout_s, limit=1)
        return found[0] if found else None

    async def _close(self, delivery: Delivery, subject: str, seq: int) -> None:
        """Write that nothing of this message is in work, before the inbox is looked into for the last time."""
        record = encode(Fence(secrets.token_hex(8), delivery.seq, delivery.count, 0, done=True))
        try:
            await self._register.write(subject, record, seq, mine=lambda b: b == record)
        except Conflict:
            return  # looked at again by the caller

    async def _finish(self, task: Task, seq: int) -> None:
        """After the item is done for good: clean up, and see to the next. Failing here costs time, nothing else."""
        delivery = task.delivery
        try:
            if self._config.form is Form.SOURCED:
                await self._ack(delivery)
                return
            name = token(task.key)
            await self._remove(task.fence.item)
            # Only now: an item that comes after this look is announced by its submitter, which finds us done.
            if await self._first_item(delivery, name) is None:
                await self._ack(delivery)
                return
            # The message's receiver looks: submitters need not wait until then.
            record = encode(Fence("", delivery.seq, delivery.count, task.fence.item))
            with contextlib.suppress(Conflict):  # another worker has it
                subject = f"{self._config.name}.fence.{name}"
                await self._register.write(subject, record, seq, mine=lambda body: body == record)
                await self._give_back(delivery, 0)
        except (LogUnavailable, AppendUnknown) as e:
            _log.info("cannot clean up after %r, which is done: %s", task.key, e, extra={"action": "token_finish"})

    async def _remove(self, item: int) -> None:
        with contextlib.suppress(MessageMissing):  # replaced meanwhile, or removed already
            await self._inbox.api(f"STREAM.MSG.DELETE.{names(self._config)[0]}", {"seq": item, "no_erase": True})

    async def _extend(self, delivery: Delivery) -> None:
        """Tell the server that the delivery is being worked on, and hear that it knows."""
        await self._respond(delivery, b"+WPI")

    async def _give_back(self, delivery: Delivery, delay_s: float) -> None:
        delay = b' {"delay": %d}' % round(delay_s * 1_000_000_000) if delay_s > 0 else b""
        await self._respond(delivery, b"-NAK" + delay)

    async def _ack(self, delivery: Delivery) -> None:
        await self._respond(delivery, b"+ACK")

    async def _respond(self, delivery: Delivery, what: bytes) -> None:
        try:
            await self._connection.request(delivery.reply, what, self._config.timeout_s)
        except AppendUnknown as e:
            raise LogUnavailable(str(e)) from None

    # Running.

    async def _work_on(self, handler: Handler, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                task = await _unless(stopping, self.take())
            except LogUnavailable as e:
                _log.warning("cannot take work; tries again: %s", e, extra={"action": "token_take"})
                await _unless(stopping, asyncio.sleep(_PAUSE_S * (1 + random.random())))  # noqa: S311 - no secret
                continue
            if task is not None:
                await self._handle(handler, task)

    async def _handle(self, handler: Handler, task: Task) -> None:
        async with task:
            working = asyncio.ensure_future(handler(task))
            losing = asyncio.ensure_future(task.lost.wait())
            try:
                await asyncio.wait([working, losing], return_when=asyncio.FIRST_COMPLETED)
            finally:
                losing.cancel()
                working.cancel()
                await asyncio.gather(working, losing, return_exceptions=True)
            try:
                if working.cancelled():
                    return
                if working.exception() is None:
                    await task.done()
                    return
                _log.error(
                    "work on %r failed", task.key, exc_info=working.exception(), extra={"action": "token_failed"}
                )
                await task.retry(min(2.0**task.attempt / 10, 60.0))
            except (TokenLost, LogUnavailable) as e:
                _log.warning("%s", e, extra={"action": "token_lost"})


async def _unless(stopping: asyncio.Event, waiting: Any) -> Any:
    """What is waited for, or None when `stopping` comes first."""
    task, stop = asyncio.ensure_future(waiting), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, stop):
            each.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)
