"""Exclusive work: items per key, in order, one at a time, however many workers there are.

A submitter only stores the item. A delivery of the item says that its key may have work. The receiver reads the key's
record: if nobody holds the key, it takes the key's first item. If another worker holds the key, that holder looks again
when it is done; should it die, its own delivery comes again. When further items of a key wait, the turn of the next one
comes with a message behind all that is stored: keys take turns. Whatever becomes of deliveries, each worker looks at
some of the oldest items now and then, and finds those that nobody works on (`_look`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Self

from msgspec.structs import replace

from bufstore import elapsed
from bufstore.config import ToNats, as_nats_config, as_seconds
from bufstore.errors import (
    ConfigError,
    InvalidRecord,
    LogFull,
    LogUnavailable,
    MalformedEntry,
    SubmitUnknown,
    TokenBusy,
    TokenLost,
    TokenQueueFull,
    Unavailable,
)
from bufstore.holding import while_held
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.ensure import ensure_stream
from bufstore.jetstream.errors import ConsumerMissing, MessageMissing, NobodyStores, SubjectFull
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing
from bufstore.jetstream.pulls import Delivery
from bufstore.jetstream.shared_consumer import SharedConsumer, consumer_config
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import token, untoken
from bufstore.jetstream.walk import Walk
from bufstore.log_lines import LogLines
from bufstore.tasks import end, outlasted, own_cancels_only, spawn
from bufstore.tokens import model
from bufstore.tokens.fence import REFUSED, Hold, Keyed, Register, holder_name
from bufstore.tokens.model import WORKERS, Policy, Record, Statistics, TokensConfig
from bufstore.tokens.task import Afterwards, Task
from bufstore.types import check_id

_log = LogLines(__name__)

_ID = "bufstore.id"
#: The most items that workers may have at once, and the most workers that may wait for some.
_TOLD_MAX, _ASKING_MAX = 100_000, 10_000
#: After an error a worker waits this long, and up to twice that, before it asks again.
_PAUSE_S = 0.5
#: For how long a worker that is to stop tries to mark as done what it has done.
_ENDING_S = 10.0
#: How many items a worker looks at, of about how many bytes, and how often in `ttl_s`.
_LOOKED_AT, _LOOKED_AT_BYTES, _LOOKS = 50, 1 << 20, 10

Handler = Callable[[Task], Awaitable[None]]


class ExclusiveWork(Keyed):
    """One kind of exclusive work; made by `open`."""

    def __init__(self, connection: Connection, api: str, config: TokensConfig, holder: str = "") -> None:
        self._items = NatsStream(connection, api, f"{config.name}-items", config.replicas, consumed_whole=True)
        self._fences = NatsStream(connection, api, f"{config.name}-fence", config.replicas)
        super().__init__(connection, Register(self._fences, config.timeout_s), f"{config.name}.fence.")
        self._config = config
        self._holder = holder_name(holder)
        #: The id that tells the stream of items from an earlier or later stream of the same name.
        self._id = ""
        self._stored = Register(self._items, config.timeout_s)  # for the ages of items
        # Only idle workers ask the consumer for items, and many of them wait at once.
        wanted = consumer_config(WORKERS, config.ttl_s, _TOLD_MAX, max_waiting=_ASKING_MAX)
        self._consumer = SharedConsumer(connection, self._items, wanted, "TokensConfig")
        self._pulls = self._consumer.pulls
        self._afterwards = Afterwards(self._finish, self._is_replaced, self._turn_to)
        self._walk = Walk(self._items, f"{config.name}.item.*", config.timeout_s, _LOOKED_AT, _LOOKED_AT_BYTES)
        #: When to look for items that nobody was told of, and how many were found.
        self._look_at, self._found = 0.0, 0
        #: The workers that could take no work at their last try.
        self._failing: set[object] = set()

    @classmethod
    async def open(cls, nats: ToNats, config: TokensConfig | None = None, *, holder: str = "") -> Self:
        """Connect, and create or check the streams. Raises ConfigError, ConfigDrift, LogUnavailable.

        `holder`: the name that others see as the holder of keys taken here; by default host and process.
        """
        config, nats_config = config or TokensConfig(), as_nats_config(nats)
        connection = Connection(nats_config, "bufstore-tokens")
        work = cls(connection, nats_config.api, config, holder)
        await connection.open_with(work._prepare)
        return work

    async def _prepare(self) -> None:
        c, ours = self._config, "TokensConfig"
        info = await ensure_stream(self._items, model.items_config(c), ours, {_ID: secrets.token_hex(8)})
        self._id = str((info["config"].get("metadata") or {}).get(_ID, ""))
        await ensure_stream(self._fences, model.fence_config(c), ours, {})
        await self._consumer.setup()

    async def submit(self, key: str, payload: bytes = b"") -> None:
        """Add an item of work for a key. When this returns, the item is stored, and will be worked on.

        Raises TokenBusy or TokenQueueFull as `TokensConfig.policy` says, LogFull, TooLarge, InvalidId, InvalidRecord
        and LogUnavailable: then nothing was submitted. Raises SubmitUnknown when the item may have been submitted.
        """
        name = token(check_id(key, "the key"))
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise InvalidRecord(f"payload must be bytes, not {type(payload).__name__}")
        payload = bytes(payload)
        self._items.check_size(payload)
        c = self._config
        try:
            await self._items.publish(Outgoing(f"{c.name}.item.{name}", payload), c.timeout_s)
        except SubjectFull:
            if c.policy is Policy.QUEUE:
                raise TokenQueueFull(key, c.waiting_max) from None
            raise TokenBusy(key, (await self._register.read(self._prefix + name))[1].holder) from None
        except NobodyStores:
            await self._items.info(c.timeout_s)  # if the stream is gone, this names it
            raise
        except AppendUnknown as e:
            raise SubmitUnknown(key, str(e)) from None

    async def take(self, wait_s: float = 5.0) -> Task | None:
        """Return the next item whose key is free, or None when there is none for `wait_s`.

        Raises LogUnavailable. Raises ConfigError or ConfigDrift where somebody has removed the workers' consumer, and
        it cannot be made again.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + as_seconds(wait_s, "wait_s")
        while True:
            if loop.time() >= self._look_at:
                self._look_at = loop.time() + self._config.ttl_s / _LOOKS
                taking = self._look()
            else:
                delivery = await self._consumer.next(max(min(deadline, self._look_at) - loop.time(), 0.001))
                if delivery is None:
                    if loop.time() >= deadline:
                        return None
                    continue
                taking = self._begin_or_return(delivery)
            if (task := await self._to_the_end(taking)) is not None:
                return task

    async def run(
        self, handler: Handler, stopping: asyncio.Event, *, concurrency: int = 1, dead_letter: Handler | None = None
    ) -> None:
        """Work until `stopping`: call `handler` with each item, and mark the item done when it returns.

        An item whose handler fails is tried again, later each time. A handler whose token is lost is cancelled. An item
        that was started `TokensConfig.max_attempts` times, also by processes that died of it, goes to `dead_letter`
        instead; when that returns, the item is done. While NATS refuses or is away, it tries again; once `stopping` is
        set, it tries for some 10 s to mark as done what ends.
        """
        if self._config.max_attempts and dead_letter is None:
            raise ConfigError(
                "TokensConfig.max_attempts needs a `dead_letter` handler, which gets items that used up their attempts"
            )
        if type(concurrency) is not int or concurrency < 1:
            raise ConfigError(f"concurrency must be an int, at least 1, not {concurrency!r}")
        workers = [spawn(self._work_on(handler, dead_letter or handler, stopping)) for _ in range(concurrency)]
        for worker in workers:
            worker.add_done_callback(self._failing.discard)
        try:
            await asyncio.gather(*map(outlasted, workers))
        finally:  # when one worker has failed, none goes on after this call has ended
            for worker in workers:
                worker.cancel()  # once: a second cancel would stop the worker in the middle of handing back
                self._takes.leave(worker)
            await asyncio.gather(*map(outlasted, workers), return_exceptions=True)

    # For people.

    async def _free(self, subject: str, seq: int, record: Record) -> bool:
        name = subject.rpartition(".")[2]
        # Without a holder, an item that waits may wait for its next attempt: go on then.
        if record.holder or await self._waiting(name, 1):
            free = replace(record, holder="", mark=secrets.token_hex(8), lease_s=0.0, turn=False)
            try:
                await self._register.write(subject, free, seq)
            except Conflict:
                return False
            await self._give_turn(name)
        return True

    async def statistics(self) -> Statistics:
        """Return how much there is to do, as the server counts it. Raises LogUnavailable."""
        stream, consumer = await asyncio.gather(self._items.info(), self._consumer.info())
        state, untold, told = stream["state"], consumer["num_pending"], consumer["num_ack_pending"]
        again = consumer["num_redelivered"]
        return Statistics(state["messages"], state["bytes"], model.oldest_s(stream), untold, told, again, self._found)

    # Taking.

    async def _hand_back(self, held: Task) -> None:
        async with held:
            await held.release()

    async def _begin_or_return(self, delivery: Delivery) -> Task | None:
        try:
            name = delivery.subject.rpartition(".")[2]
            return await self._begin(untoken(name), name, delivery)
        except MalformedEntry as e:
            _log.error("removed a malformed message from the items: %s", e, extra={"action": "token_malformed"})
            await self._remove(delivery.seq)
            return None
        except REFUSED:
            await self._pulls.hand_back(delivery)
            raise

    async def _begin(self, key: str, name: str, delivery: Delivery | None) -> Task | None:
        """Take the key's first item; None when there is none, or its turn is not now. `delivery` told of the key."""
        c, subject = self._config, self._prefix + name
        # A delivery that comes again may be the only one that will tell of the key when its holder is gone.
        again, is_turn = delivery is None or delivery.times > 1, _is_turn(delivery)
        while True:
            (seq, record), items = await asyncio.gather(self._register.read(subject), self._waiting(name, 2))
            if items and items[0].seq <= model.done_to(record, self._id):
                await self._remove(items[0].seq)  # its holder died just before it removed the item, or this leader lags
                continue
            if not items:
                await self._drop(delivery)
                return None
            if record.lease_s and not (record.turn and (again or is_turn)):
                # The holder looks again when it is done. Without one the item is delayed, and a turn may be all that
                # tells of it: its own delivery may be lost.
                if not again and (record.holder if is_turn else c.per_key > 1):
                    await self._drop(delivery)
                    return None
                (seen,) = await self._register.seen({"last_by_subj": subject})
                if seen.seq != seq:
                    continue
                if (left := seen.record.lease_s - seen.age_s) > 0:
                    await self._pulls.hand_back(delivery, left + 0.001)
                    return None
            began = elapsed.now_s()
            item = items[0]
            attempt = model.attempt_of(record, item.seq)
            mark = secrets.token_hex(8)
            mine = Record(self._holder, mark, item=item.seq, stream=self._id, attempt=attempt, lease_s=c.ttl_s)
            try:
                given = await self._register.write(subject, mine, seq)
            except Conflict:
                continue
            hold = Hold(key, self._register, subject, given, mine, began, self._takes)
            task = Task(hold, item.body, delivery, len(items) > 1, self._pulls, self._afterwards)
            if not task.is_over:
                return task
            with contextlib.suppress(TokenLost, Unavailable, *REFUSED):  # this process stood still: it comes again
                await task.release()
            return None

    async def _waiting(self, name: str, limit: int) -> list[Any]:
        c = self._config
        return await self._items.after(f"{c.name}.item.{name}", 0, c.timeout_s, limit=min(limit, c.per_key))

    async def _finish(self, task: Task) -> None:
        """Clean up after an item that is done for good, and see to the next. A failure here only costs time."""
        name, delivery = token(task.key), task.delivery
        try:
            # Look only now: a later item has a delivery of its own, whose receiver finds that we are done.
            if task.others_wait or any(item.seq != task.item for item in await self._waiting(name, 2)):
                try:
                    await self._give_turn(name)
                except LogFull:
                    await self._remove(task.item)  # this makes room
                    await self._give_turn(name)
            await asyncio.gather(self._remove(task.item), self._drop(delivery))
        except (Unavailable, *REFUSED) as e:
            _log.info("cannot clean up after %r, which is done: %s", task.key, e, extra={"action": "token_finish"})
            await self._pulls.hand_back(delivery)  # the delivery that told us tells another worker

    async def _is_replaced(self, task: Task) -> bool:
        if self._config.per_key > 1:
            return False
        items = await self._waiting(token(task.key), 1)
        return bool(items) and items[0].seq != task.item

    async def _turn_to(self, task: Task) -> None:
        with contextlib.suppress(Unavailable, *REFUSED):  # this only costs time
            await self._give_turn(token(task.key))

    async def _give_turn(self, name: str) -> None:
        """Store a message that tells of the key, behind all that is stored now."""
        with contextlib.suppress(SubjectFull):  # the key has such messages already
            try:
                await self._items.publish(Outgoing(f"{self._config.name}.turn.{name}", b""), self._config.timeout_s)
            except AppendUnknown as e:
                raise LogUnavailable(str(e)) from None

    async def _drop(self, delivery: Delivery | None) -> None:
        """Acknowledge a delivery: it need not come again. An item stays stored; a turn's message is removed first."""
        if delivery is not None and _is_turn(delivery):
            await self._remove(delivery.seq)
        await self._pulls.answer(delivery, b"+ACK")

    async def _remove(self, seq: int) -> None:
        with contextlib.suppress(MessageMissing):  # the message was replaced meanwhile, or removed already
            await self._items.delete(seq, self._config.timeout_s)

    async def _look(self) -> Task | None:
        """Look at some of the oldest items, others each time, and take one that nobody works on.

        Its delivery was lost, or its holder's: a consumer was made anew, messages were removed by hand, or a leader
        that the others had left answered. An item counts only after it and its key's record have stood for `ttl_s`, and
        not while it, or its key's turn, is still to be delivered, however long that takes.
        """
        c = self._config
        if model.is_young(await self._items.info(), c.ttl_s):
            return None
        page, told = await asyncio.gather(self._walk.next(_LOOKED_AT), self._told())
        firsts = {message.subject.rpartition(".")[2]: message.seq for message in reversed(page)}
        seen = await self._register.seen(*({"last_by_subj": self._prefix + name} for name in firsts))
        for (name, item), (_, record, age_s) in zip(firsts.items(), seen, strict=True):
            if item > told or age_s < record.lease_s + c.ttl_s:
                continue
            stored, turn = await self._stored.seen({"seq": item}, {"last_by_subj": f"{c.name}.turn.{name}"})
            if turn.seq > told or stored.age_s < c.ttl_s:
                continue
            with contextlib.suppress(MalformedEntry):
                if (task := await self._begin(untoken(name), name, None)) is not None:
                    self._found += 1
                    self._look_at = 0.0  # there may be more
                    _log.warning(
                        "found an overlooked item of %r: nobody had it", task.key, extra={"action": "token_found"}
                    )
                    return task
        return None

    async def _told(self) -> float:
        """Return the sequence up to which workers were told of items; any, if they are told of no more."""
        try:
            consumer = await self._consumer.info()
        except ConsumerMissing:
            return math.inf
        # Who looks asks for nothing meanwhile: a lone worker has only the second sign.
        stands = consumer["num_waiting"] or consumer["num_ack_pending"] >= consumer["config"]["max_ack_pending"]
        return math.inf if stands else consumer["delivered"]["stream_seq"]

    # Running.

    async def _work_on(self, handler: Handler, dead_letter: Handler, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            taking = spawn(self.take())
            try:
                await _unless(stopping, taking)
            except asyncio.CancelledError:
                self._takes.abandon(taking, self._hand_back)  # `taking` may just have ended with a task
                raise
            try:
                task = None if taking.cancelled() else taking.result()
                self._failing.discard(asyncio.current_task())
            except REFUSED as e:
                if isinstance(e, ConfigError) and not self._connection.closes_here():
                    raise  # this is a process that was forked off; on another event loop `closes_here` raises
                if not self._failing:
                    _log.warning("cannot take work; will try again: %s", e, extra={"action": "token_take"})
                self._failing.add(asyncio.current_task())
                pause_s = _PAUSE_S * (1 + random.random())  # noqa: S311 - no secret
                await _unless(stopping, spawn(asyncio.sleep(pause_s)))
                continue
            if task is not None:
                handle = dead_letter if 0 < self._config.max_attempts < task.attempt else handler
                await self._handle(handle, task, stopping)

    async def _handle(self, handler: Handler, task: Task, stopping: asyncio.Event) -> None:
        async with task:
            working = spawn(_called(handler, task))
            await _unless(task.lost, working)
            if working.cancelled():
                return
            error = working.exception()
            try:
                if error is None:
                    await while_held(lambda tried_s: task.lost.is_set() or (stopping.is_set() and tried_s > _ENDING_S))(
                        task.done
                    )
                else:
                    _log.error("work on %r failed", task.key, exc_info=error, extra={"action": "token_failed"})
                    await task.retry(model.backoff_s(task.attempt))
            except (TokenLost, *REFUSED) as e:
                _log.warning("%s", e, extra={"action": "token_lost"})


def _is_turn(delivery: Delivery | None) -> bool:
    """True when the delivery is no item, but says that it is its key's turn."""
    return delivery is not None and ".turn." in delivery.subject


async def _called(handler: Handler, task: Task) -> None:
    with own_cancels_only():  # else the handler would count as cancelled because its token is lost
        await handler(task)


async def _unless(stopping: asyncio.Event, task: asyncio.Future[Any]) -> None:
    """Wait for the end of `task`; cancel it when `stopping` comes first, or when the caller is cancelled."""
    stop = spawn(stopping.wait())
    try:
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(task, stop)
