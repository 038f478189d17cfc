"""A sweeper's work in a mailbox's bucket: leases that are over, due dispatches, lost signals, finished records."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from bufstore import elapsed
from bufstore.errors import LogFull, MalformedEntry
from bufstore.jetstream.errors import ConsumerMissing, TooManyResults
from bufstore.jetstream.fresh_reads import PAGE
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.jetstream.subject_tokens import token
from bufstore.jetstream.walk import Walk
from bufstore.mailbox.decisions import is_expired
from bufstore.mailbox.model import Dispatch, MailboxThread
from bufstore.mailbox.nats_bucket import Bucket
from bufstore.mailbox.nats_keys import GONE_S, SLOT_MS, THREAD_GONE_S, Entry
from bufstore.mailbox.nats_signals import NatsSignals

#: The age from which an entry of a lease is dropped although the state that was written with it is not seen.
_FORGOTTEN_MS = 24 * 3600_000
#: From when on an end in the future is of a clock that jumped.
_JUMPED_MS = 24 * 3600_000
#: After how many intervals a turn to sweep that has not changed is taken over.
_TURNS = 4
_WALK_BYTES, _WALK_MAX = 512 << 10, 512
_WINDOW = 3600_000 // SLOT_MS

#: Deals with due entries. Returns the threads that it dealt with, and the entries (subjects) that stay.
_Handle = Callable[[dict[StoredMessage, Entry]], Awaitable[tuple[Collection[str], Collection[str]]]]


class NatsSweeps:
    """See `bufstore.mailbox.ports.Backend` for what the methods promise."""

    def __init__(self, bucket: Bucket, signals: NatsSignals, patience_s: float) -> None:
        """`patience_s`: how long workers may have the signal of a free thread."""
        self._bucket = bucket
        self._keys = bucket.keys
        self._signals = signals
        self._patience_s = patience_s
        self._leases, self._delays = (_Agenda(kind, bucket) for kind in "ld")
        self._walks = [_Walk(bucket, place) for place in self._keys.places()[:2]]
        #: The turn to sweep that another instance has, by the sequence of its message, and since when we have seen it.
        self._turn = (0, 0.0)
        #: The sequence up to which workers have had the signals, as of when answered ones were last removed.
        self._delivered = 0

    async def sweeps(self, interval_s: float) -> bool:
        # An instance without the turn sets its clock, too.
        asked_at = elapsed.since_start_s()
        self._bucket.set_clock(await self._bucket.stream.info(), asked_at)
        turn = Outgoing(self._keys.prefix + "sweep", b"-", expected=0, ttl_s=max(1, int(interval_s / 2)))
        if await self._bucket.put_each([turn]) and not await self._take_over(turn, interval_s):
            return False
        await self.forget_answered()
        return True

    async def _take_over(self, turn: Outgoing, interval_s: float) -> bool:
        """Take the turn if somebody has it for far too long; return whether we have it.

        A server whose clock went back removes what has a time to live only when its clock is there again.
        """
        there = (await self._bucket.copy([turn.subject])).get(turn.subject)
        now = elapsed.now_s()
        if there is None or there.seq != self._turn[0]:
            self._turn = (there.seq if there is not None else 0, now)
            return False
        if now - self._turn[1] < _TURNS * max(1.0, interval_s):
            return False
        return not await self._bucket.put_each([replace(turn, expected=there.seq)])

    async def forget_answered(self) -> None:
        """Remove the signals up to the consumer's ack floor, in one request."""
        try:
            info = await self._signals.info()
        except ConsumerMissing:
            await self._signals.setup()
            return
        self._delivered = int(info["delivered"]["stream_seq"])
        if floor := int(info["ack_floor"]["stream_seq"]):
            await self._bucket.stream.purge(self._keys.of("s", "*"), floor)

    async def expiring(self, now_ms: int, limit: int) -> list[MailboxThread]:
        expired: dict[str, MailboxThread] = {}

        async def look(ripe: dict[StoredMessage, Entry]) -> tuple[Collection[str], Collection[str]]:
            states = await self._bucket.states({e.thread_id for e in ripe.values()})
            expired.update({t: s for t, s in states.items() if is_expired(s, now_ms)})
            return expired, {
                m.subject
                for m, e in ripe.items()
                # An entry is written together with a state: a copy that shows only the entry is behind.
                if e.thread_id in expired or (states[e.thread_id].version < m.seq and e.at_ms > now_ms - _FORGOTTEN_MS)
            }

        await self._leases.sweep(now_ms, limit, look)
        return list(expired.values())[:limit]

    async def signal_due(self, now_ms: int, limit: int) -> int:
        async def signal(ripe: dict[StoredMessage, Entry]) -> tuple[Collection[str], Collection[str]]:
            threads = {e.thread_id for e in ripe.values()}
            failed = await self._bucket.put_each(self._keys.signal(t) for t in threads)
            told = {t for t in threads if self._keys.signal(t).subject not in failed}
            running = [m for m, e in ripe.items() if (e.slot + 1) * SLOT_MS > now_ms and e.thread_id in told]
            await self._bucket.put_each(self._keys.gone(m.subject, m.seq) for m in running)
            return told, {m.subject for m, e in ripe.items() if e.thread_id not in told}

        return len(await self._delays.sweep(now_ms, limit, signal))

    async def signal_lost(self, due_ms: int, limit: int) -> int:
        lost = 0
        for walk in self._walks:
            first: dict[str, StoredMessage] = {}
            for d, m in self._bucket.dispatches(await walk.next(limit)):
                if d.available_at_ms <= due_ms:
                    first.setdefault(d.thread_id, m)
            # Most threads have their signal, so a copy is asked first.
            told = self._told(first, await self._bucket.copy(self._told_by(first)))
            late = {w for w in told if w.signal <= self._delivered}
            overdue = walk.since(late, time.monotonic() - self._patience_s)
            for t in {w.thread_id for w in told if not w.signal} | {w.thread_id for w in overdue}:
                seen = self._told([t], await self._bucket.last(self._told_by([t])))
                # Read after the thread: a dispatch that was read before may have been claimed and ended since.
                queued = (await self._bucket.last([first[t].subject])).get(first[t].subject)
                is_so = any(not w.signal or w in overdue for w in seen)
                if is_so and queued is not None and queued.seq == first[t].seq:
                    lost += not await self._bucket.put_each([self._keys.signal(t)])
        return lost

    def _told_by(self, thread_ids: Iterable[str]) -> list[str]:
        return [s for t in thread_ids for s in (self._keys.thread(t), self._keys.signal(t).subject)]

    def _told(self, thread_ids: Iterable[str], found: Mapping[str, StoredMessage]) -> set[_Waiting]:
        """Return those of the threads that are free."""
        free = set()
        for thread_id in thread_ids:
            subject, signal = self._told_by([thread_id])
            with suppress(MalformedEntry):
                state = self._keys.state(found.get(subject), thread_id)
                told = found[signal].seq if signal in found else 0
                if state.active is None:
                    free.add(_Waiting(thread_id, state.version, told if told > state.answered else 0))
        return free

    async def purge(self, finished_before_ms: int, limit: int) -> int:
        subject, position, old = self._keys.of("x", "*", "*"), 0, 0
        size = 1  # mostly nothing is old enough
        while old < limit:
            size = min(size, limit - old)
            page = await self._bucket.read(subject, position, size)
            readable = list(self._bucket.dispatches(page))
            # An end far ahead is of a clock that jumped: nothing behind it may wait.
            kept = range(finished_before_ms, max(finished_before_ms, self._bucket.now_ms()) + _JUMPED_MS)
            stay = (i for i, (d, *_) in enumerate(readable) if (d.completed_at_ms or 0) in kept)
            part = readable[: next(stay, len(readable))]
            if part:
                threads = {d.thread_id for d, _ in part}
                # Once the records are gone, the ids may be used again: what is read before leaves the keys of later
                # dispatches alone.
                keys = await self._keys_of([d for d, _ in part])
                # The records last: when this is broken off, or a removal has no answer, they lead the next purge to the
                # keys. An end keeps its id taken without a key.
                try:
                    if not await self._drop(keys, threads, patient=False):
                        break
                    await self._bucket.stream.purge(subject, part[-1][1].seq)
                except LogFull:  # the records make room
                    await self._bucket.stream.purge(subject, part[-1][1].seq)
                    await self._drop(keys, threads, patient=True)
                old += len(part)
            if len(part) < len(readable) or len(page) < size:
                break
            position, size = page[-1].seq, 64
        return old

    async def _drop(self, keys: Iterable[StoredMessage], threads: Iterable[str], *, patient: bool) -> bool:
        """Remove these keys, and these threads if nothing waits in them. `patient`: see `Bucket.put_each`.

        Return False if the answer to a removal was lost. What somebody else has removed or written meanwhile is theirs.
        """
        failed = await self._bucket.put_each((self._keys.gone(m.subject, m.seq) for m in keys), patient=patient)
        of_threads = await asyncio.gather(*(self._forget_thread(t, patient=patient) for t in threads))
        return not any(isinstance(e, AppendUnknown) for errors in (failed, *of_threads) for e in errors.values())

    async def _keys_of(self, finished: Sequence[Dispatch]) -> list[StoredMessage]:
        """The keys by which these are known."""
        holders: dict[str, bytes] = {}
        for d in finished:
            t, body = token(d.thread_id), token(d.dispatch_id).encode()
            holders[self._keys.of("i", t, token(d.dispatch_id))] = body
            if d.dedupe_key is not None:
                holders[self._keys.of("k", t, token(d.dedupe_key))] = body
        found = await self._bucket.last(list(holders))
        return [m for s, m in found.items() if m.body == holders[s]]

    async def _forget_thread(self, thread_id: str, *, patient: bool) -> Mapping[str, Exception]:
        """Do as `_drop_thread`, once more where somebody wrote meanwhile: an answer to its signal leads nobody here."""
        failed = await self._drop_thread(thread_id, patient=patient)
        overtaken = any(isinstance(e, Conflict) for e in failed.values())
        return await self._drop_thread(thread_id, patient=patient) if overtaken else failed

    async def _drop_thread(self, thread_id: str, *, patient: bool) -> Mapping[str, Exception]:
        """Forget a thread if nothing is left of it; return why keys of its are not surely removed, by subject.

        Its epoch and tokens are not needed: their numbers only grow.
        """
        t, subject = token(thread_id), self._keys.thread(thread_id)
        try:
            # First read what is to be removed: an enqueue that the second read misses has rewritten its ``p`` since.
            kept = await self._bucket.last([subject, self._keys.of("p", t, "*")])
            queued = await self._bucket.last(self._keys.places(t)[:2])
            state = self._keys.state(kept.get(subject), thread_id)
        except (TooManyResults, MalformedEntry):
            return {}
        if state.active or any(m.body for m in queued.values()):
            return {}
        gone = (
            self._keys.gone(s, m.seq, ttl_s=(GONE_S, THREAD_GONE_S)[s == subject]) for s, m in kept.items() if m.body
        )
        return await self._bucket.put_each(gone, patient=patient)


class _Waiting(NamedTuple):
    """A free thread with work: the number of its state, and that of its signal (0: none, or it was answered)."""

    thread_id: str
    version: int
    signal: int


class _Walk(Walk):
    """A walk through all queued dispatches."""

    def __init__(self, bucket: Bucket, subject: str) -> None:
        super().__init__(bucket.stream, subject, bucket.timeout_s, _WALK_MAX, _WALK_BYTES, least=16)
        #: Since when threads wait whose signal a worker has, as seen in this round and in the round before.
        self._since: dict[_Waiting, float] = {}
        self._before: dict[_Waiting, float] = {}

    def since(self, waiting: set[_Waiting], then: float) -> set[_Waiting]:
        """Return those that have waited unchanged since `then`."""
        now = time.monotonic()
        seen = {w: self._before.get(w, now) for w in waiting}
        self._since |= seen
        if not self.position:
            self._before, self._since = self._since, {}
        return {w for w, since in seen.items() if since <= then}


class _Agenda:
    """The keys under ``l`` or ``d``, which say what becomes due when, in slots of time.

    Only slots that are over or running are read, however much lies ahead: those of the last hour, and with each pass
    one page of everything. The page finds what was left for longer, and what a writer whose clock was far behind has
    put into an earlier slot. Any copy is read: what the copy lacks is at the end, and the next pass finds it.
    """

    def __init__(self, kind: str, bucket: Bucket) -> None:
        self._kind = kind
        self._bucket = bucket
        self._keys = bucket.keys
        self._everything = Walk(bucket.stream, bucket.keys.of(kind, ">"), bucket.timeout_s, _WALK_MAX, _WALK_BYTES)

    async def sweep(self, now_ms: int, limit: int, handle: _Handle) -> set[str]:
        """Give `handle` what is due, earliest first, until it has dealt with `limit` threads; return the threads.

        Slots that are over are removed, except those with an entry that stays.
        """
        threads: set[str] = set()
        left: set[int] = set()
        async for page in self._pages(now_ms // SLOT_MS):
            ripe = {m: entry for m in page if (entry := self._keys.entry(m)).at_ms <= now_ms}
            dealt_with, kept = await handle(ripe)
            threads |= set(dealt_with)
            left |= {entry.slot for m, entry in ripe.items() if m.subject in kept}
            await self._remove(page, left, now_ms)
            if len(threads) >= limit:
                break
        return threads

    async def _pages(self, now: int) -> AsyncIterator[list[StoredMessage]]:
        async for page in self._slots(range(now - _WINDOW, now + 1)):
            yield page
        page = await self._everything.next(PAGE // 10)
        yield [m for m in page if m.body and self._slot(m) < now - _WINDOW]

    async def _slots(self, slots: Sequence[int]) -> AsyncIterator[list[StoredMessage]]:
        """Yield what lies in the slots; they are halved until the server gives each part at once."""
        subjects = [self._keys.of(self._kind, str(slot), ">") for slot in slots]
        try:
            yield [m for m in (await self._bucket.stream.last(subjects, self._bucket.timeout_s)).values() if m.body]
        except TooManyResults:
            if len(slots) > 1:
                half = len(slots) // 2
                for part in (slots[:half], slots[half:]):
                    async for page in self._slots(part):
                        yield page
                return
            async for page in self._bucket.pages(subjects[0]):
                yield [m for m in page if m.body]

    async def _remove(self, page: list[StoredMessage], left: Collection[int], now_ms: int) -> None:
        for slot, entries in itertools.groupby(sorted(page, key=self._slot), self._slot):
            messages = list(entries)
            if slot in left or (slot + 1) * SLOT_MS > now_ms:
                continue
            if slot < now_ms // SLOT_MS - _WINDOW:
                # Only a part of the slot may have been seen.
                await self._bucket.put_each(self._keys.gone(m.subject, m.seq) for m in messages)
            else:
                last = max(m.seq for m in messages)
                await self._bucket.stream.purge(self._keys.of(self._kind, str(slot), ">"), last)

    def _slot(self, message: StoredMessage) -> int:
        return self._keys.entry(message).slot
