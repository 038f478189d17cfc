"""A mailbox in one JetStream bucket: each step is one atomic batch, whose compare-and-set is on the thread's key.

`bufstore.mailbox.nats_keys` documents the keys. Everything is in one stream because only that makes a step atomic; see
docs/adr/0013.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from msgspec.structs import replace

from bufstore.config import NatsConfig, ToNats, as_nats_config, check_name
from bufstore.elapsed import since_start_s
from bufstore.errors import ConfigError, LogUnavailable
from bufstore.jetstream.buckets import bucket, placed
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.drift import check
from bufstore.jetstream.ensure import ensure_stream
from bufstore.jetstream.errors import ConsumerMissing, StreamMissing
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.jetstream.shared_consumer import consumer_config
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import token, untoken
from bufstore.mailbox.config import MailboxConfig, NatsMailboxNames
from bufstore.mailbox.counters import MailboxGauges
from bufstore.mailbox.decisions import Step, as_seen
from bufstore.mailbox.model import DEFAULT_PRIORITY, Dispatch, MailboxThread, Status
from bufstore.mailbox.nats_bucket import GROWS_BY, Bucket
from bufstore.mailbox.nats_keys import Keys
from bufstore.mailbox.nats_signals import NatsLive, NatsSignals
from bufstore.mailbox.nats_sweeps import NatsSweeps
from bufstore.mailbox.ports import Backend, KeyTaken, Live, LiveHandler, Signal
from bufstore.mailbox.steps import AT_ONCE
from bufstore.mailbox.store import MailboxStore
from bufstore.newest import Newest
from bufstore.tasks import together

#: How many of a queue's first dispatches are read ahead at most, of about how many bytes, and for how many threads;
#: their order cannot change. A read costs the server more the longer the queue is: a long one is read many at a time.
_AHEAD_MAX = 512
_AHEAD_BYTES = 1 << 20
_THREADS_AHEAD = 2000
#: How long `held` waits for a copy, which may have died with the question; its caller asks again soon anyway.
_SOON_S = 1.0
#: How long an outcome or error may be that takes only its own length of what is kept for the steps behind it.
_SHORT = 256


class NatsBackend(NatsSweeps, Backend):
    """Queues and steps in a bucket, beside its sweeps, signals and live deliveries."""

    def __init__(
        self, nats: NatsConfig, names: NatsMailboxNames, config: MailboxConfig, *, found: bool = False
    ) -> None:
        """`found`: it is there already, and its consumer, which has settings of the app's, is not for us to make."""
        self._names = names
        self._found = found
        self._config = config
        self._connection = Connection(nats, "bufstore mailbox")
        keys = Keys(names.bucket)
        self._connection.on_connect(self._forget)
        self._stream = NatsStream(self._connection, nats.api, keys.stream, names.replicas)
        bucket = Bucket(self._connection, self._stream, keys, config.timeout_s, names.max_bytes)
        wait_s = config.signal_ack_wait_s
        wanted = consumer_config(names.consumer, wait_s, names.signals_pending_max, filter_subject=keys.of("s", "*"))
        signals = NatsSignals(self._connection, self._stream, wanted, "MailboxConfig, NatsMailboxNames")
        patience_s = max(wait_s, config.signal_nack_max_delay_s) + 2 * config.sweep_interval_s
        super().__init__(bucket, signals, patience_s)
        self._live = NatsLive(bucket, names)
        #: The first dispatches of each queue, in order, by thread and priority.
        self._ahead: Newest[str, defaultdict[int, _Ahead]] = Newest(_THREADS_AHEAD)
        #: Threads that had a step refused: something in their queue may have ended already (see `nats_keys`).
        self._doubted: Newest[str, bool] = Newest(_THREADS_AHEAD)  # a forgotten doubt returns with the next refusal

    async def open(self) -> None:
        await self._connection.open_with(self._prepare)
        self._bucket.writes.start()

    async def _forget(self, _: object) -> None:
        self._ahead.clear()  # a server that went back to an older state gives passed sequences again

    async def _prepare(self) -> None:
        made = {"bufstore.consumer": self._names.consumer, "bufstore.live": self._names.live_subject}
        wanted = bucket(self._names.bucket, self._names, self._names.max_bytes)
        asked_at = since_start_s()
        info = await ensure_stream(self._stream, wanted, "NatsMailboxNames", made)
        edit = f"nats stream edit {self._keys.stream}, for all instances"
        check(f"bucket {self._names.bucket}", made, info["config"].get("metadata") or {}, "NatsMailboxNames", edit)
        self._bucket.set_clock(info, asked_at)
        if not self._found:
            await self._signals.setup()

    def closes_here(self) -> bool:
        return self._connection.closes_here()

    async def aclose(self) -> None:
        await self._bucket.writes.aclose()
        await self._connection.aclose()

    def now_ms(self) -> int:
        return self._bucket.now_ms()

    # Writing

    async def add(self, dispatch: Dispatch, *, own_id: bool, now_ms: int) -> Dispatch:
        t = token(dispatch.thread_id)
        subject, *places = self._keys.by_id(dispatch.thread_id, dispatch.dispatch_id)
        wanted = {self._keys.of("i", t, token(dispatch.dispatch_id)): True} if own_id else {}
        if dispatch.dedupe_key is not None:
            wanted[self._keys.of("k", t, token(dispatch.dedupe_key))] = False
        # An id that we chose has no key: its dispatch alone shows that it is taken.
        found = await self._bucket.last([subject, *wanted, *(places if own_id else ())])
        state = self._keys.state(found.get(subject), dispatch.thread_id)
        active = state.active is not None and own_id and state.active.dispatch_id == dispatch.dispatch_id
        if active or any(m.body and self._keys.kind(m.subject) in "qrx" for m in found.values()):
            raise KeyTaken(dispatch.dispatch_id, same_id=True)
        keys, holder = [], token(dispatch.dispatch_id).encode()
        for key, same_id in wanted.items():
            held = found.get(key)
            if held is not None and held.body:
                await self._check_key(dispatch.thread_id, held, same_id)
            keys.append(Outgoing(key, holder, expected=held.seq if held is not None else 0))
        d, messages = self._keys.enqueued(dispatch, state, keys)
        seq = await self._bucket.put_new(messages)
        return self._keys.dispatch(StoredMessage("", seq, None, messages[-1].body)) if not d.position else d

    async def _check_key(self, thread_id: str, held: StoredMessage, same_id: bool) -> None:
        holder = untoken(held.body.decode())
        _, d = await self.find(thread_id, holder)
        if not same_id and (d is None or d.status.finished):
            return
        if d is None:
            _, *places = self._keys.by_id(thread_id, holder)
            if not any(m.body for m in (await self._bucket.last(places)).values()):
                return  # a purge that was interrupted has left the key
        raise KeyTaken(holder, same_id=same_id)

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        messages = self._keys.step(before, step, now_ms)
        try:
            room = GROWS_BY // 2 if step.adds > _SHORT else step.adds  # a claim has taken its part, or will
            seq = await self._bucket.put(messages, room)
        except BaseException as e:
            self._ahead.pop(before.thread_id, None)
            if isinstance(e, Conflict):
                self._doubted[before.thread_id] = True
            raise
        for was in (move.before for move in step.moves if move.before is not None):
            for ahead in self._ahead.get(before.thread_id, {}).values():
                ahead.dispatches.pop(was.dispatch_id, None)
        return self._keys.state(StoredMessage("", seq, None, messages[-1].body), before.thread_id)

    # Reading

    async def thread(self, thread_id: str) -> MailboxThread:
        subject = self._keys.thread(thread_id)
        return self._keys.state((await self._bucket.last([subject])).get(subject), thread_id)

    async def first(self, thread_id: str, now_ms: int) -> tuple[MailboxThread, Dispatch | None]:
        return (await self._look(thread_id, now_ms))[:2]

    async def _look(
        self, thread_id: str, now_ms: int, *more: str
    ) -> tuple[MailboxThread, Dispatch | None, list[Dispatch], list[int]]:
        """Return what `first` does, what was handed back or delayed, and the last sequences of the subjects `more`."""
        subject, t = self._keys.thread(thread_id), token(thread_id)
        filters = [self._keys.of("p", t, "*"), self._keys.of("r", t, "*")]
        deadline = time.monotonic() + self._config.timeout_s
        while time.monotonic() < deadline:
            found, _ = await asyncio.gather(
                self._bucket.every([*more, subject], filters), self._read_ahead(thread_id, DEFAULT_PRIORITY)
            )
            seqs = [found.pop(s).seq if s in found else 0 for s in more]
            thread = self._keys.state(found.pop(subject, None), thread_id)
            if thread.active is not None:
                return thread, None, [], seqs
            of_r = [m for m in found.values() if self._keys.kind(m.subject) == "r"]
            handed_back = [d for d, _ in self._bucket.dispatches(of_r)]
            heads = [d for d in handed_back if d.available_at_ms <= now_ms]
            known = {d.dispatch_id for d in handed_back}
            for priority in (DEFAULT_PRIORITY, *self._keys.priorities(found.values())):
                ahead = islice((await self._read_ahead(thread_id, priority)).values(), AT_ONCE)
                heads += [d for d in ahead if d.dispatch_id not in known]
            heads.sort(key=lambda d: d.order)
            left = await self._not_ended(thread_id, heads[:AT_ONCE])
            if left or not heads:  # else all these had ended and are removed now: those behind them are still unread
                return thread, left[0] if left else None, handed_back, seqs
        raise LogUnavailable("every queued dispatch that could be read in time had already ended")

    async def ack_signal(self, signal: Signal) -> bool:
        # The look comes before the answer: whatever comes after the look has a signal of its own.
        now_ms, subject = self.now_ms(), self._keys.signal(signal.thread_id).subject
        thread, first, handed_back, (newest,) = await self._look(signal.thread_id, now_ms, subject)
        number, soon = signal.mark.seq, 0.0
        if newest <= number:
            if newest < number or thread.active is not None:
                return False  # what was read is older than the signal, or the thread is claimed
            if first is None:
                # A sweeper whose clock is ahead of ours has signalled work that is not due here yet: it will not again.
                soon = min((d.available_at_ms - now_ms for d in handed_back), default=float("inf")) / 1000
            if first is not None or 0 < soon <= self._config.signal_nack_max_delay_s:
                await self.put_off(signal, soon)
                return True
            if thread.step:
                try:
                    await self._bucket.put([self._keys.written(replace(thread, answered=number), thread.version)])
                except (Conflict, AppendUnknown):
                    return False
        await self._signals.pulls.answer(signal.mark, b"+ACK")
        return True

    async def put_off(self, signal: Signal, delay_s: float | None) -> None:
        if delay_s is None:
            await self._signals.pulls.answer(signal.mark, b"+WPI")
        else:
            await self._signals.pulls.hand_back(signal.mark, delay_s)

    async def wake(self, thread_id: str) -> None:
        await self._bucket.put([self._keys.signal(thread_id)])

    async def gauges(self) -> MailboxGauges:
        info, consumer = await self._stream.info(), await self._signals.info()
        first = [d.created_at_ms for place in self._keys.places()[:2] for d in await self._first_of(place)]
        return MailboxGauges(
            oldest_queued_s=(self.now_ms() - min(first)) / 1000 if first else None,
            signals_waiting=consumer["num_pending"],
            signals_out=consumer["num_ack_pending"],
            signals_again=consumer["num_redelivered"],
            bytes=info["state"]["bytes"],
            bytes_max=info["config"]["max_bytes"],
        )

    async def _first_of(self, subject: str) -> list[Dispatch]:
        """Return some of the first dispatches that wait, found soon: those that left are marked for a second only."""
        async for page in self._bucket.pages(subject, 16):
            if waiting := await self._bucket.waiting(page):
                return waiting
        return []

    async def held(self, thread_ids: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        try:
            async with asyncio.timeout(_SOON_S):
                states = await self._bucket.states(thread_ids)
        except TimeoutError:
            raise LogUnavailable(
                "the replica that was asked did not answer in time; another may answer the next call"
            ) from None
        return {t: (s.version, s.active.token if s.active is not None else 0, s.epoch) for t, s in states.items()}

    async def _not_ended(self, thread_id: str, queued: list[Dispatch]) -> list[Dispatch]:
        """Return `queued`; of a thread in doubt, without those that ended or were handed back: these are purged."""
        if thread_id not in self._doubted or not queued:
            return queued
        now_at = {s: d for d in queued for s in (self._keys.ended(d), self._keys.returned(d))}
        found = await self._bucket.last(list(now_at))
        ended = {now_at[s].dispatch_id: m.seq for s, m in found.items() if m.body and s != self._keys.queued(now_at[s])}
        left, gone = ([d for d in queued if (d.dispatch_id in ended) is been] for been in (False, True))
        if not gone:
            self._doubted.pop(thread_id, None)
            return queued
        # Purged, not replaced: the server keeps a record of a purge, so they do not come back each time it is killed.
        purge, at = self._bucket.stream.purge, self._keys.queued
        await together(purge(at(d), max(ended[d.dispatch_id], d.position)) for d in gone)
        self._ahead.pop(thread_id, None)
        return left

    async def _read_ahead(self, thread_id: str, priority: int) -> Mapping[str, Dispatch]:
        """Return the first dispatches of a queue, read only when none is known: later ones come behind them."""
        self._ahead[thread_id] = queues = self._ahead.get(thread_id) or defaultdict(_Ahead)
        ahead = queues[priority]
        subject = self._keys.of("q", token(thread_id), str(priority), "*")
        while not ahead.dispatches:
            found = await self._bucket.read(subject, ahead.floor, ahead.next_read)
            more = len(found) >= ahead.next_read
            if self._stream.replicated and not more and not any(m.body for m in found):
                # What any copy shows first is the first of the queue; only the leader knows whether there is none.
                seq = found[-1].seq if found else ahead.floor
                found += await self._stream.after(subject, seq, self._config.timeout_s, 2)
            ahead.read(found, [d for d, _ in self._bucket.dispatches(found)])
            if not more:
                break
        return ahead.dispatches

    async def find(self, thread_id: str, dispatch_id: str) -> tuple[MailboxThread, Dispatch | None]:
        version = None
        while True:
            found = await self._bucket.last(self._keys.by_id(thread_id, dispatch_id))
            thread = self._keys.state(found.pop(self._keys.thread(thread_id), None), thread_id)
            if thread.active is not None and thread.active.dispatch_id == dispatch_id:
                return thread, thread.active
            # The dispatch may be in several places (see `nats_keys`): its end (x) counts first, then its return (r).
            places = sorted(found.values(), key=lambda m: self._keys.kind(m.subject), reverse=True)
            if there := [d for d, _ in self._bucket.dispatches(places)]:
                return thread, there[0]
            # On replicas the reads are not of one moment: the dispatch may have moved between places meanwhile.
            if not self._stream.replicated or thread.version == version:
                return thread, None
            version = thread.version

    async def queued(self, thread_id: str, below_epoch: int, limit: int) -> list[Dispatch]:
        self._ahead.pop(thread_id, None)  # another process may have taken out what is superseded
        new, returned, _ = self._keys.places(token(thread_id))
        deadline = time.monotonic() + self._config.timeout_s
        most: int | None = limit
        while time.monotonic() < deadline:
            active = (await self.thread(thread_id)).active
            messages = await self._bucket.all(new, most)
            found = self._bucket.dispatches(messages + await self._bucket.all(returned))
            known = {d.dispatch_id: d for d, _ in found if active is None or d.dispatch_id != active.dispatch_id}
            wanted = [d for d in known.values() if d.epoch < below_epoch][:limit]
            left = await self._not_ended(thread_id, wanted)
            if left or (not wanted and (most is None or len(messages) < limit)):
                return left
            most = limit if wanted else None  # `wanted` had ended and is removed; or the first are of a later epoch
        raise LogUnavailable("every queued dispatch that could be read in time had already ended")

    # For people

    async def all_of(self, thread_id: str) -> tuple[MailboxThread, list[Dispatch]]:
        subject = self._keys.thread(thread_id)
        # The places are read one after the other, in the direction in which dispatches move.
        found = await self._bucket.every([subject], self._keys.places(token(thread_id)))
        held = self._keys.state(found.pop(subject, None), thread_id).active
        # What was claimed since then may be in none of the places: the thread after them shows it.
        thread = await self.thread(thread_id)
        # In the order q, r, x.
        messages = sorted(found.values(), key=lambda m: self._keys.kind(m.subject))
        dispatches = {d.dispatch_id: d for d, _ in self._bucket.dispatches(messages)}
        if held is not None and not dispatches.get(held.dispatch_id, held).status.finished:
            dispatches[held.dispatch_id] = held
        if thread.active is not None:
            dispatches.pop(thread.active.dispatch_id, None)
        return thread, list(dispatches.values())

    async def queued_threads(self, limit: int) -> list[str]:
        found = [m for place in self._keys.places()[:2] for m in await self._bucket.all(place)]
        return list({d.thread_id: None for d in await self._bucket.waiting(found)})[:limit]

    async def finished(self, limit: int) -> list[Dispatch]:
        return [d for d, _ in self._bucket.dispatches(await self._bucket.all(self._keys.places()[2], limit))]

    async def counts(self) -> dict[Status, int]:
        states: dict[str, MailboxThread] = {}
        found: dict[tuple[str, str], Status] = {}
        # The threads are read before the places and after them, as in `all_of`.
        threads, (new, returned, ended) = self._keys.of("t", "*"), self._keys.places()
        for place in (threads, new, returned, ended, threads):
            messages = await self._bucket.all(place)
            if place == threads:
                states |= self._bucket.readable(messages)
                found |= {(t, s.active.dispatch_id): Status.CLAIMED for t, s in states.items() if s.active is not None}
                continue
            for d, _ in self._bucket.dispatches(messages):
                thread = states.setdefault(d.thread_id, MailboxThread(thread_id=d.thread_id))
                found[d.thread_id, d.dispatch_id] = as_seen(d, thread).status
        return {**dict.fromkeys(Status, 0), **Counter(found.values())}

    # Signals

    async def signals(self, limit: int, timeout_s: float) -> list[Signal]:
        return [Signal(self, t, came.times, came) for t, came in await self._signals.pull(limit, timeout_s)]

    async def deliver_live(self, thread_id: str, payload: bytes, timeout_s: float) -> Live:
        return await self._live.deliver(thread_id, payload, timeout_s)

    async def listen_live(self, thread_id: str, handler: LiveHandler) -> Callable[[], Awaitable[None]]:
        return await self._live.listen(thread_id, handler)


class _Ahead:
    """The first dispatches of one queue that are known."""

    def __init__(self) -> None:
        #: The dispatches by id, in the queue's order.
        self.dispatches: dict[str, Dispatch] = {}
        #: The sequence up to which the stream has nothing of the queue but `dispatches`, now and later.
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

    Opening raises ConfigError, LogUnavailable, and ConfigDrift when the bucket or the consumer is not as configured.
    """

    def __init__(
        self, nats: ToNats, *, names: NatsMailboxNames | None = None, config: MailboxConfig | None = None
    ) -> None:
        config = config or MailboxConfig()
        super().__init__(NatsBackend(as_nats_config(nats), names or NatsMailboxNames(), config), config)


async def find_mailbox(nats: NatsConfig, bucket: str) -> MailboxStore:
    """Return the mailbox in this bucket, to be opened, with the settings it has. Raises ConfigError, LogUnavailable."""
    check_name(bucket, "the bucket's name")
    connection = Connection(nats, "bufstore mailbox")
    stream = NatsStream(connection, nats.api, f"KV_{bucket}", 1)
    await connection.open()
    try:
        found = (await stream.info())["config"]
        made = found.get("metadata") or {}
        if "bufstore.consumer" not in made:
            raise ConfigError(f"the bucket {bucket!r} is not a mailbox")
        names = {"consumer": made["bufstore.consumer"], "live_subject": made["bufstore.live"]}
        names |= {"max_bytes": found["max_bytes"], **placed(found)}
        config = MailboxConfig()
        with suppress(ConsumerMissing):
            consumer = (await stream.consumer(names["consumer"]))["config"]
            names["signals_pending_max"] = consumer["max_ack_pending"]
            wait_s = consumer["ack_wait"] / 1e9
            fetch_s = min(wait_s, config.signal_fetch_expires_s)
            config = MailboxConfig(signal_ack_wait_s=wait_s, signal_fetch_expires_s=fetch_s)
        return MailboxStore(NatsBackend(nats, NatsMailboxNames(bucket=bucket, **names), config, found=True), config)
    except StreamMissing:
        raise ConfigError(f"there is no mailbox {bucket!r} on this server") from None
    finally:
        await connection.aclose()
