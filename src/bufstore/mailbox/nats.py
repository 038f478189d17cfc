"""A mailbox in one JetStream bucket: each step is one atomic batch, whose compare-and-set is on the thread's key.

Docs of the keys: `bufstore.mailbox.nats_keys`. Everything is in one stream because only that makes a step atomic; see
docs/adr/0013.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

from bufstore.config import NatsConfig, as_nats_config
from bufstore.errors import Closed, ConfigDrift, TooLarge
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.drift import check
from bufstore.jetstream.errors import StreamMissing, TooManyResults
from bufstore.jetstream.group_commit import GroupCommit
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import token, untoken
from bufstore.mailbox.config import MailboxConfig, NatsMailboxNames
from bufstore.mailbox.decisions import Claiming, Step, is_expired
from bufstore.mailbox.model import DEFAULT_PRIORITY, Dispatch, MailboxThread, Status
from bufstore.mailbox.nats_agenda import Agenda
from bufstore.mailbox.nats_keys import THREAD_GONE_S, Keys, bucket_config
from bufstore.mailbox.nats_signals import NatsLive, NatsSignals
from bufstore.mailbox.ports import InSteps, KeyTaken, Live, LiveHandler, Queue, Signal
from bufstore.mailbox.steps import AT_ONCE
from bufstore.mailbox.store import MailboxStore

_PAGE = 1000
#: So many of a queue's first are read ahead at most, for so many threads; their order cannot change.
#: What a read costs the server grows with the queue: so of a long one many are read at once.
#: Every step reads before it writes, which takes less than this share of a group's time.
_LINGER = 0.3
_AHEAD_MAX = 512
_AHEAD_BYTES = 1 << 20
_THREADS_AHEAD = 2000
_OVERHEAD = 512


class NatsBackend:
    """See `bufstore.mailbox.ports.Backend`."""

    def __init__(self, nats: NatsConfig, names: NatsMailboxNames, config: MailboxConfig) -> None:
        self._names = names
        self._config = config
        self._keys = Keys(names.bucket)
        self._connection = Connection(nats, "bufstore mailbox")
        self._stream = NatsStream(self._connection, nats.api, f"KV_{names.bucket}", names.replicas)
        self._writes = GroupCommit(self._stream, linger=_LINGER)
        self._signals = NatsSignals(self._connection, self._stream, nats.api, names)
        self._live = NatsLive(self._connection, self._stream, names)
        self._agenda = Agenda(self._stream, self._keys, self._put, config.timeout_s)
        self._replicated = names.replicas > 1
        #: Per thread and priority: the first of the queue, in order.
        self._ahead: OrderedDict[tuple[str, int], _Ahead] = OrderedDict()
        #: Sequences under ``r``, by subject, as they were read.
        self._returned: OrderedDict[str, int] = OrderedDict()
        #: Threads of which a step was refused: something queued may have ended already (see `Keys`).
        self._doubted: set[str] = set()
        #: The server's clock minus ours.
        self._offset_ms = 0
        self._open = False
        self._priorities = asyncio.Lock()

    async def open(self) -> None:
        await self._connection.open()
        try:
            await self._ensure_bucket()
            await self._signals.setup(self._config.signal_ack_wait_s)
        except BaseException:
            await self._connection.aclose()
            raise
        self._writes.start()
        self._open = True

    async def aclose(self) -> None:
        self._open = False
        await self._writes.aclose()
        await self._connection.aclose()

    async def destroy(self) -> None:
        """Remove the bucket with all that is in it."""
        await self._stream.api(f"STREAM.DELETE.KV_{self._names.bucket}")

    async def _ensure_bucket(self) -> None:
        name = f"KV_{self._names.bucket}"
        try:
            info = await self._stream.api(f"STREAM.INFO.{name}")
        except StreamMissing:
            # A bucket that is made again goes on above all numbers of the one before: tokens stay unique.
            first = int(time.time()) << 20
            info = await self._stream.api(f"STREAM.CREATE.{name}", bucket_config(self._names, first))
        way = f"nats stream edit {name}"
        check(f"bucket {self._names.bucket}", bucket_config(self._names), info["config"], "NatsMailboxNames", way)
        metadata = info["config"].get("metadata") or {}
        for field, ours in (("consumer", self._names.consumer), ("live_subject", self._names.live_subject)):
            found = metadata.get("bufstore." + field.removesuffix("_subject"))
            if found != ours:
                raise ConfigDrift(
                    f"the mailbox in bucket {self._names.bucket}",
                    field,
                    expected=ours,
                    found=found,
                    way_out="All instances of a mailbox have the same names: set NatsMailboxNames."
                    f"{field} to {found!r}, or choose another bucket.",
                )
        self._set_clock(info)

    def _set_clock(self, info: Mapping[str, Any]) -> None:
        if ts := info.get("ts"):
            self._offset_ms = round(
                1000 * (datetime.fromisoformat(str(ts)[:26].rstrip("Z") + "+00:00").timestamp() - time.time())
            )

    def now_ms(self) -> int:
        return round(1000 * time.time()) + self._offset_ms

    # Writing

    async def _put(self, messages: Sequence[Outgoing]) -> int:
        if not self._open:
            raise Closed("the mailbox is closed or not open")
        limit = self._connection.client().max_payload
        for message in messages:
            if len(message.body) + _OVERHEAD > limit:
                raise TooLarge(len(message.body), limit - _OVERHEAD)
        return await self._writes.submit(messages)

    async def add(self, dispatch: Dispatch, *, own_id: bool, now_ms: int) -> Dispatch:
        t = token(dispatch.thread_id)
        wanted: dict[str, bool] = {}
        if own_id:
            wanted[self._keys.of("i", t, token(dispatch.dispatch_id))] = True
        if dispatch.dedupe_key is not None:
            wanted[self._keys.of("k", t, token(dispatch.dedupe_key))] = False
        subject = self._keys.thread(dispatch.thread_id)
        found = await self._stream.last([subject, *wanted], self._config.timeout_s)
        keys = []
        for key, same_id in wanted.items():
            held = found.get(key)
            if held is not None and held.body:
                await self._check_key(dispatch.thread_id, held, same_id)
            body = token(dispatch.dispatch_id).encode()
            keys.append(Outgoing(key, body, expected=held.seq if held is not None else 0))
        state = self._keys.state(found.get(subject), dispatch.thread_id)
        if self._keys.is_new_priority(dispatch, state):
            state = await self._add_priority(dispatch)
        d, messages = self._keys.enqueued(dispatch, state, keys)
        seq = await self._put(messages)
        return self._keys.dispatch(StoredMessage("", seq, None, messages[-1].body)) if not d.position else d

    async def _add_priority(self, dispatch: Dispatch) -> MailboxThread:
        # One at a time in this process: of many at once that all try, all but one would have to try again.
        async with self._priorities:
            state = await self.thread(dispatch.thread_id)
            if self._keys.is_new_priority(dispatch, state):
                message = self._keys.new_priority(dispatch, state)
                seq = await self._put([message])
                state = self._keys.state(StoredMessage("", seq, None, message.body), dispatch.thread_id)
            return state

    async def _check_key(self, thread_id: str, held: StoredMessage, same_id: bool) -> None:
        holder = untoken(held.body.decode())
        if not same_id:
            _, d = await self.find(thread_id, holder)
            if d is None or d.status.finished:
                return
        raise KeyTaken(holder, same_id=same_id)

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        messages = self._keys.step(before, step, self._returned, now_ms)
        try:
            seq = await self._put(messages)
        except BaseException as e:
            self._forget(before.thread_id, before.priorities)
            if isinstance(e, Conflict):
                if len(self._doubted) >= _THREADS_AHEAD:
                    self._doubted.clear()  # the next refusal raises the doubt again
                self._doubted.add(before.thread_id)
            raise
        for move in step.moves:
            if move.before is not None:
                self._returned.pop(self._keys.queued(move.before), None)
                ahead = self._ahead.get((before.thread_id, move.before.priority))
                if ahead is not None:
                    ahead.dispatches.pop(move.before.dispatch_id, None)
        return self._keys.state(StoredMessage("", seq, None, messages[-1].body), before.thread_id)

    def _forget(self, thread_id: str, priorities: Iterable[int]) -> None:
        for priority in (DEFAULT_PRIORITY, *priorities):
            self._ahead.pop((thread_id, priority), None)

    # Reading

    async def _last(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """The last message of each; of one moment, on a stream without replicas."""
        if not self._open:
            raise Closed("the mailbox is closed or not open")
        if not self._replicated:
            return await self._stream.last(subjects, self._config.timeout_s)
        # From the leader first: what the rest, of a follower, shows too old is refused by the compare-and-set.
        exact = [s for s in subjects if "*" not in s]
        found = await self._stream.last(exact, self._config.timeout_s)
        if wild := [s for s in subjects if "*" in s]:
            found |= await self._stream.last(wild, self._config.timeout_s)
        return found

    async def claim_first(self, thread_id: str, claiming: Claiming, step_id: str) -> MailboxThread | None:
        raise InSteps

    async def thread(self, thread_id: str) -> MailboxThread:
        subject = self._keys.thread(thread_id)
        return self._keys.state((await self._last([subject])).get(subject), thread_id)

    async def queue(self, thread_id: str, now_ms: int) -> Queue:
        subject = self._keys.thread(thread_id)
        returned = self._keys.of("r", token(thread_id), "*")
        try:
            found, _ = await asyncio.gather(
                self._last([subject, returned]), self._read_ahead(thread_id, DEFAULT_PRIORITY)
            )
        except TooManyResults:
            found = await self._last([subject])
            found |= {m.subject: m for m in await self._all(returned)}
        thread = self._keys.state(found.pop(subject, None), thread_id)
        if thread.active is not None:
            return Queue(thread, [])
        handed_back = self._noted(found.values())
        heads = [d for d in handed_back if d.available_at_ms <= now_ms]
        known = {d.dispatch_id for d in handed_back}
        for priority in (DEFAULT_PRIORITY, *thread.priorities):
            ahead = islice((await self._read_ahead(thread_id, priority)).values(), AT_ONCE)
            heads += [d for d in ahead if d.dispatch_id not in known]
        heads = await self._not_ended(thread_id, sorted(heads, key=lambda d: d.order)[:AT_ONCE])
        return Queue(thread, heads)

    async def _not_ended(self, thread_id: str, queued: list[Dispatch]) -> list[Dispatch]:
        """Of a thread in doubt: without those that have ended, or been handed back, which are removed once more."""
        if thread_id not in self._doubted or not queued:
            return queued
        now_at = {s: d for d in queued for s in (self._keys.ended(d), self._keys.returned(d))}
        found = await self._last(list(now_at))
        ended = {now_at[s].dispatch_id for s, m in found.items() if m.body and s != self._keys.queued(now_at[s])}
        left = [d for d in queued if d.dispatch_id not in ended]
        if len(left) == len(queued):
            self._doubted.discard(thread_id)
            return queued
        await self._write_each([self._keys.gone(self._keys.queued(d)) for d in queued if d.dispatch_id in ended])
        self._forget(thread_id, {d.priority for d in queued})
        return left

    async def _read_ahead(self, thread_id: str, priority: int) -> Mapping[str, Dispatch]:
        """The first of a queue; read only when none is known: what comes later comes behind them."""
        key = (thread_id, priority)
        ahead = self._ahead.setdefault(key, _Ahead())
        self._ahead.move_to_end(key)
        subject = self._keys.of("q", token(thread_id), str(priority), "*")
        while not ahead.dispatches:
            found = await self._stream.after(subject, ahead.floor, self._config.timeout_s, ahead.next_read)
            more = len(found) >= ahead.next_read
            ahead.read(found, [self._keys.dispatch(m) for m in found if m.body])
            if not more:
                break
        if len(self._ahead) > _THREADS_AHEAD:
            self._ahead.popitem(last=False)
        return ahead.dispatches

    def _noted(self, found: Iterable[StoredMessage]) -> list[Dispatch]:
        """Dispatches of messages under ``r``; where they were is remembered for their removal."""
        dispatches = []
        for message in found:
            self._returned[message.subject] = message.seq
            if message.body:
                dispatches.append(self._keys.dispatch(message))
        while len(self._returned) > 50_000:
            self._returned.popitem(last=False)
        return dispatches

    async def find(self, thread_id: str, dispatch_id: str) -> tuple[MailboxThread, Dispatch | None]:
        found = await self._last(self._keys.by_id(thread_id, dispatch_id))
        thread = self._keys.state(found.pop(self._keys.thread(thread_id), None), thread_id)
        if thread.active is not None and thread.active.dispatch_id == dispatch_id:
            return thread, thread.active
        # It may be in several places (see `Keys`): its end counts, then that it was handed back.
        for subject in self._keys.by_id(thread_id, dispatch_id)[1:3]:
            if subject in found and found[subject].body:
                return thread, self._noted([found[subject]])[0]
        for message in found.values():
            if message.body:
                return thread, self._keys.dispatch(message)
        return thread, None

    async def _all(self, subject: str, limit: int | None = None) -> list[StoredMessage]:
        """All (or the first `limit`) that a filter has, in the stream's order."""
        messages: list[StoredMessage] = []
        seq = 0
        while limit is None or len(messages) < limit:
            page = await self._stream.after(subject, seq, self._config.timeout_s, _PAGE)
            messages += [m for m in page if m.body]
            if len(page) < _PAGE:
                break
            seq = page[-1].seq
        return messages[:limit]

    async def queued(self, thread_id: str, below_epoch: int | None, limit: int) -> list[Dispatch]:
        t = token(thread_id)
        active = (await self.thread(thread_id)).active
        found = [self._keys.dispatch(m) for m in await self._all(self._keys.of("q", t, "*", "*"), limit)]
        found += self._noted(await self._all(self._keys.of("r", t, "*")))
        known = {d.dispatch_id: d for d in found if active is None or d.dispatch_id != active.dispatch_id}
        wanted = [d for d in known.values() if below_epoch is None or d.epoch < below_epoch][:limit]
        return await self._not_ended(thread_id, wanted)

    async def all_of(self, thread_id: str) -> tuple[MailboxThread, list[Dispatch]]:
        t, subject = token(thread_id), self._keys.thread(thread_id)
        filters = [self._keys.of("q", t, "*", "*"), self._keys.of("r", t, "*"), self._keys.of("x", t, "*")]
        try:
            found = await self._last([subject, *filters])
        except TooManyResults:
            # Read one after the other, in the direction in which dispatches move.
            found = await self._last([subject])
            for f in filters:
                found |= {m.subject: m for m in await self._all(f)}
        thread = self._keys.state(found.pop(subject, None), thread_id)
        # In the order q, r, x: of what is in several places (see `Keys`) the last counts.
        messages = sorted((m for m in found.values() if m.body), key=lambda m: self._keys.kind(m.subject))
        dispatches = {d.dispatch_id: d for d in map(self._keys.dispatch, messages)}
        if thread.active is not None:
            dispatches.pop(thread.active.dispatch_id, None)
        return thread, list(dispatches.values())

    async def _states(self, thread_ids: Iterable[str]) -> dict[str, MailboxThread]:
        subjects = {self._keys.thread(t): t for t in thread_ids}
        found = await self._last(list(subjects)) if subjects else {}
        return {t: self._keys.state(found.get(s), t) for s, t in subjects.items()}

    async def queued_threads(self, limit: int) -> list[str]:
        epochs: dict[str, int] = {}
        for kind in (self._keys.of("q", "*", "*", "*"), self._keys.of("r", "*", "*")):
            for message in await self._all(kind):
                d = self._keys.dispatch(message)
                epochs[d.thread_id] = max(d.epoch, epochs.get(d.thread_id, 0))
        states = await self._states(epochs)
        return [t for t, epoch in epochs.items() if epoch >= states[t].epoch][:limit]

    async def finished(self, limit: int) -> list[Dispatch]:
        return [self._keys.dispatch(m) for m in await self._all(self._keys.of("x", "*", "*"), limit)]

    async def counts(self) -> dict[Status, int]:
        counts = dict.fromkeys(Status, 0)
        states = {}
        for message in await self._all(self._keys.of("t", "*")):
            state = self._keys.state(message, "")
            states[state.thread_id] = state
            counts[Status.CLAIMED] += state.active is not None
        for kind in (self._keys.of("q", "*", "*", "*"), self._keys.of("r", "*", "*"), self._keys.of("x", "*", "*")):
            for message in await self._all(kind):
                d = self._keys.dispatch(message)
                thread = states.get(d.thread_id)
                stale = d.status is Status.QUEUED and thread is not None and d.epoch < thread.epoch
                counts[Status.SUPERSEDED if stale else d.status] += 1
        return counts

    # Keeping order

    async def purge(self, finished_before_ms: int, limit: int) -> int:
        old: list[StoredMessage] = []
        for message in await self._all(self._keys.of("x", "*", "*"), limit):
            if (self._keys.dispatch(message).completed_at_ms or 0) >= finished_before_ms:
                break
            old.append(message)
        if not old:
            return 0
        dispatches = [self._keys.dispatch(m) for m in old]
        await self._drop_keys(dispatches)
        request = {"filter": self._keys.of("x", "*", "*"), "seq": old[-1].seq + 1}
        await self._stream.api(f"STREAM.PURGE.KV_{self._names.bucket}", request)
        await asyncio.gather(*(self._drop_thread(t) for t in {d.thread_id for d in dispatches}))
        return len(old)

    async def _drop_keys(self, finished: Sequence[Dispatch]) -> None:
        holders: dict[str, bytes] = {}
        for d in finished:
            t, body = token(d.thread_id), token(d.dispatch_id).encode()
            holders[self._keys.of("i", t, token(d.dispatch_id))] = body
            if d.dedupe_key is not None:
                holders[self._keys.of("k", t, token(d.dedupe_key))] = body
        found = await self._last(list(holders))
        # Not the key of a later dispatch.
        await self._drop([m for s, m in found.items() if m.body == holders[s]])

    async def _drop_thread(self, thread_id: str) -> None:
        """Forget a thread of which nothing is left. Its epoch and tokens are not needed: their numbers only grow."""
        t, subject = token(thread_id), self._keys.thread(thread_id)
        try:
            found = await self._last([subject, self._keys.of("q", t, "*", "*"), self._keys.of("r", t, "*")])
        except TooManyResults:
            return
        message = found.pop(subject, None)
        state = self._keys.state(message, thread_id)
        # A priority that is not the default must not be forgotten: somebody may just be using it.
        left = any(m.body for m in found.values())
        if message is not None and message.body and not (state.active or state.priorities or left):
            await self._write_each([self._keys.gone(subject, message.seq, ttl_s=THREAD_GONE_S)])

    async def _drop(self, messages: Iterable[StoredMessage]) -> None:
        await self._write_each([self._keys.gone(m.subject, m.seq) for m in messages])

    async def _write_each(self, messages: Iterable[Outgoing]) -> None:
        writes = [self._put([m]) for m in messages]
        for outcome in await asyncio.gather(*writes, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, (Conflict, AppendUnknown)):
                raise outcome

    async def expiring(self, now_ms: int, limit: int) -> list[MailboxThread]:
        due = await self._agenda.leases(now_ms, limit)
        states = await self._states(due)
        expired = [s for s in states.values() if is_expired(s, now_ms)]
        await self._agenda.settle(due, {s.thread_id for s in expired}, now_ms)
        return expired[:limit]

    async def signal_due(self, now_ms: int, limit: int) -> int:
        return await self._agenda.signal(now_ms, limit)

    async def sweeps(self, interval_s: float) -> bool:
        try:
            await self._put([Outgoing(self._keys.prefix + "sweep", b"-", expected=0, ttl_s=max(1, int(interval_s)))])
        except Conflict:
            return False
        self._set_clock(await self._stream.api(f"STREAM.INFO.KV_{self._names.bucket}"))
        await self._signals.forget_answered()
        return True

    async def signals(self, limit: int, timeout_s: float, ack_wait_s: float) -> list[Signal]:
        return await self._signals.pull(limit, timeout_s)

    async def deliver_live(self, thread_id: str, payload: bytes, timeout_s: float) -> Live:
        if len(payload) + _OVERHEAD > self._connection.client().max_payload:
            raise TooLarge(len(payload), self._connection.client().max_payload - _OVERHEAD)
        return await self._live.deliver(thread_id, payload, timeout_s)

    async def listen_live(self, thread_id: str, handler: LiveHandler) -> Callable[[], Awaitable[None]]:
        return await self._live.listen(thread_id, handler)


class _Ahead:
    """The first of one queue, as far as they are known."""

    def __init__(self) -> None:
        #: By id, in order.
        self.dispatches: dict[str, Dispatch] = {}
        #: Up to here the stream has nothing (any more) of the queue but `dispatches`, and nothing will come.
        self.floor = 0
        self.next_read = 2

    def read(self, found: list[StoredMessage], dispatches: list[Dispatch]) -> None:
        self.dispatches = {d.dispatch_id: d for d in dispatches}
        if found:
            self.floor = found[-1].seq
        if len(found) >= self.next_read and sum(len(m.body) for m in found) < _AHEAD_BYTES // 2:
            self.next_read = min(_AHEAD_MAX, 4 * self.next_read)


class NatsMailboxStore(MailboxStore):
    """A `MailboxStore` in one JetStream bucket. `nats` as for `BufferedThreadStore.open`.

    Opening raises ConfigError, ConfigDrift when the bucket or the consumer is not as configured, LogUnavailable.
    """

    def __init__(
        self,
        nats: str | Sequence[str] | NatsConfig | Mapping[str, Any],
        *,
        names: NatsMailboxNames | None = None,
        config: MailboxConfig | None = None,
    ) -> None:
        config = config or MailboxConfig()
        super().__init__(NatsBackend(as_nats_config(nats), names or NatsMailboxNames(), config), config)
