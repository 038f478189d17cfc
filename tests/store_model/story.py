"""The oracle: what the log says of each thread, entry by entry, and what each call meant.

The archive keeps every message that the log ever took, also purged ones. From it a thread's *story* is told in the
plainest way: entry by entry, without coalescing and overlays. Each entry must come from one call, and change the thread
exactly as that call changes a thread of `MemoryThreadStore`; and what any part of the system shows of a thread must be
a chapter of its story. An unknown outcome allows both possibilities until the archive shows the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from bufstore.buffer.entry import Base, Item, Malformed, StoredEntry, item_of
from bufstore.buffer.operate.replay import Outcome
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.model import Thread, decode_metadata, decode_run
from bufstore.threads.payload import AnyPayload, Payload, Removal, decode_payload

#: The store refuses to save a run whose id begins like this.
BAD_RUN = "bad-run"


class Seen(msgspec.Struct, frozen=True):
    """A thread at one moment, encoded."""

    thread: Thread | None = None
    messages: tuple[bytes, ...] = ()
    #: Sorted by id.
    runs: tuple[tuple[str, bytes], ...] = ()
    state: bytes | None = None

    @property
    def latest_run(self) -> bytes | None:
        latest = self.thread.latest_run_id if self.thread is not None else None
        return dict(self.runs).get(latest) if latest is not None else None


NOTHING = Seen()


def seen_in(store: MemoryThreadStore, thread_id: str) -> Seen:
    """The thread as a memory store holds it."""
    runs = {run_id: record for run_id, (owner, record) in store._runs.items() if owner == thread_id}
    return Seen(
        store._threads.get(thread_id),
        tuple(store._messages.get(thread_id, ())),
        tuple(sorted(runs.items())),
        store._states.get(thread_id),
    )


def store_with(thread_id: str, seen: Seen, others: Sequence[str]) -> MemoryThreadStore:
    """A memory store that holds the thread, and `others` without content."""
    store = MemoryThreadStore()
    if seen.thread is not None:
        store._threads[thread_id] = seen.thread
        store._messages[thread_id] = list(seen.messages)
    if seen.state is not None:
        store._states[thread_id] = seen.state
    store._runs.update({run_id: (thread_id, record) for run_id, record in seen.runs})
    store._threads.update({t: Thread(thread_id=t) for t in others if t != thread_id})
    return store


def told(seen: Seen, thread_id: str, payload: AnyPayload) -> Seen:
    """The thread after one more entry."""
    if isinstance(payload, Removal):
        return NOTHING
    if payload.keep > len(seen.messages):
        raise ValueError(f"keeps {payload.keep} of {len(seen.messages)} messages")
    thread = seen.thread or Thread(thread_id=thread_id)
    messages = (*seen.messages[: payload.keep], *payload.messages)
    runs, state = dict(seen.runs), seen.state
    if isinstance(payload, Payload):
        run = decode_run(payload.run)
        runs[run.run_id] = payload.run
        thread = thread.with_run(run)
    else:
        if payload.run is not None and payload.run_id is not None:
            runs[payload.run_id] = payload.run
        if payload.metadata is not None:
            thread = msgspec.structs.replace(thread, metadata=decode_metadata(payload.metadata))
        if payload.parent is not None:
            thread = msgspec.structs.replace(thread, parent_thread_id=payload.parent[0])
        state = payload.state if payload.state is not None else state
    thread = msgspec.structs.replace(thread, version=len(messages))
    return Seen(thread, messages, tuple(sorted(runs.items())), state)


class Point(msgspec.Struct, frozen=True):
    """A thread after everything up to `seq`: its content, and what its row must be."""

    seq: int = 0
    seen: Seen = NOTHING
    applied_id: int = 0
    broken: bool = False
    #: Whether the row is gone, because the thread was deleted.
    buried: bool = False

    def after(self, item: Item, thread_id: str, *, refuses: bool) -> tuple[Point, str]:
        """The next point, and the fate of the entry: applied, parked or superseded."""
        replace = msgspec.structs.replace
        if isinstance(item, Malformed):
            return replace(self, seq=item.seq, broken=True, buried=False), "parked"
        e, flushed = item.entry, 0 if self.buried else self.seq
        deleted = self.applied_id != 0 and self.seen.thread is None
        if e.base is not Base.CHAINED and (flushed > e.seen or (e.base is Base.NONE and flushed and not deleted)):
            return replace(self, seq=item.seq, buried=False), "superseded"
        anew = e.base is Base.UNKNOWN or (e.base is Base.NONE and deleted)
        follows = e.self_contained or anew or e.prev_id == self.applied_id
        if not follows or (refuses and is_bad(item)):
            return replace(self, seq=item.seq, broken=True, buried=False), "parked"
        seen = told(self.seen, thread_id, decode_payload(e.payload))
        return Point(item.seq, seen, e.id, self.broken and not e.self_contained), "applied"


def is_bad(item: Item) -> bool:
    """Whether the store refuses the entry."""
    if isinstance(item, Malformed):
        return False
    payload = decode_payload(item.entry.payload)
    run_id = payload.save.run_id if isinstance(payload, Payload) else getattr(payload, "run_id", None)
    return run_id is not None and run_id.startswith(BAD_RUN)


@dataclass
class Event:
    """A replay, a discard or the burial of a tombstone, at a moment when everything up to `seq` was flushed."""

    seq: int
    replayed: list[int] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    buried: bool = False


class Story:
    """One thread, from its first entry on."""

    def __init__(self, thread_id: str) -> None:
        self.thread_id = thread_id
        self.items: list[Item] = []
        self.events: list[Event] = []
        self.fate: dict[int, str] = {}
        #: The entries in quarantine, and the base on which each was parked.
        self.parked: dict[int, int] = {}
        #: Whether there was an entry that is not, or may not be, applied.
        self.tainted = False
        #: The state of the thread after each entry, by the entry's id, as its writer saw it.
        self.views: dict[int, Seen] = {0: NOTHING}
        self._points = [Point()]

    def feed(self, message: StoredMessage) -> Item:
        """Add the message to the story. Returns its item."""
        item = item_of(message, self.thread_id)
        self.items.append(item)
        self.tainted = self.tainted or isinstance(item, Malformed) or is_bad(item)
        self._tell(item)
        if isinstance(item, StoredEntry) and self.fate[item.seq] != "superseded":
            base = self.base_of(item)
            self.views[item.entry.id] = told(base, self.thread_id, decode_payload(item.entry.payload))
        return item

    def base_of(self, item: StoredEntry) -> Seen:
        """The thread as the writer of the entry saw it."""
        e = item.entry
        if self.tainted and not e.self_contained and e.prev_id in self.views:
            return self.views[e.prev_id]
        return next((p.seen for p in reversed(self._points) if p.seq < item.seq), NOTHING)

    def _tell(self, item: Item) -> None:
        before = self._points[-1]
        point, fate = before.after(item, self.thread_id, refuses=True)
        self._points.append(point)
        self.fate[item.seq] = fate
        if fate == "parked":
            self.parked[item.seq] = before.applied_id

    def tell_again(self) -> None:
        """Tell the story from its beginning, because its events have changed."""
        events = sorted(self.events, key=lambda e: e.seq)
        self._points, self.fate, self.parked = [Point()], {}, {}
        for item in self.items:
            while events and events[0].seq < item.seq:
                self._happen(events.pop(0))
            self._tell(item)
        for event in events:
            self._happen(event)

    def _happen(self, event: Event) -> None:
        of = {item.seq: item for item in self.items}
        point = self._points[-1]
        if event.buried:
            self._points[-1] = Point(point.seq, buried=True)
            return
        base = point.applied_id
        for seq in event.replayed:
            item = of[seq]
            assert isinstance(item, StoredEntry)
            seen = told(point.seen, self.thread_id, decode_payload(item.entry.payload))
            point = Point(point.seq, seen, item.entry.id, point.broken)
            self.fate[seq] = "applied"
            del self.parked[seq]
        if event.replayed:
            for seq, parked_on in self.parked.items():
                if seq > event.replayed[-1] and parked_on == base:
                    self.parked[seq] = point.applied_id
        for seq in event.discarded:
            self.parked.pop(seq, None)
            self.fate[seq] = "discarded"
        self._points[-1] = msgspec.structs.replace(point, broken=point.applied_id in self.parked.values())

    def replayable(self) -> list[tuple[int, Outcome]]:
        """The outcome of each quarantined entry in a replay of the whole thread, when the store accepts everything."""
        of = {item.seq: item for item in self.items}
        base = applied = self._points[-1].applied_id
        found = []
        for seq, parked_on in sorted(self.parked.items()):
            item = of[seq]
            if isinstance(item, Malformed):
                outcome = Outcome.UNDECODABLE
            elif parked_on != base:
                outcome = Outcome.SUPERSEDED
            elif not item.entry.self_contained and item.entry.prev_id != applied:
                outcome = Outcome.WAITS
            else:
                outcome, applied = Outcome.APPLIED, item.entry.id
            found.append((seq, outcome))
        return found

    # --- what may be seen

    @property
    def end(self) -> int:
        return self.items[-1].seq if self.items else 0

    def at(self, seq: int) -> Point:
        """The thread once everything up to `seq` is flushed."""
        return next(p for p in reversed(self._points) if p.seq <= seq)

    def shown(self, flushed: int, end: int) -> Point:
        """What a read shows when the thread is flushed up to one position, and the log is read up to another."""
        point = self.at(flushed)
        if not flushed:  # there is no row: the thread was never flushed, or its row was buried
            point = next((p for p in reversed(self._points) if p.buried), point)
        for item in self.items:
            if point.seq < item.seq <= end:
                point, _ = point.after(item, self.thread_id, refuses=False)
        return point

    def alone(self, end: int) -> list[Point]:
        """What the log alone shows up to a position, from any snapshot on: it does not know what was parked."""
        points = []
        for i, first in enumerate(self.items):
            if isinstance(first, StoredEntry) and first.entry.self_contained and first.seq <= end:
                point = Point(applied_id=first.entry.prev_id)
                for item in self.items[i:]:
                    if item.seq <= end:
                        point, _ = point.after(item, self.thread_id, refuses=False)
                points.append(point)
        return points

    def between(self, first: int, last: int) -> list[int]:
        """The positions that the thread had between two positions of the log, both included."""
        ends = [0, *(item.seq for item in self.items)]
        start = max(s for s in ends if s <= max(first, 0))
        return [s for s in ends if start <= s <= last]


class Archive:
    """All entries that the log took, as stories."""

    def __init__(self, thread_of: Callable[[str], str], messages: list[StoredMessage]) -> None:
        self._thread_of = thread_of
        self.messages = messages
        self.stories: dict[str, Story] = {}
        self._read = 0

    def story(self, thread_id: str) -> Story:
        return self.stories.setdefault(thread_id, Story(thread_id))

    def news(self) -> Iterator[tuple[Story, Item]]:
        """The items that were added since the last call, with their stories."""
        while self._read < len(self.messages):
            message = self.messages[self._read]
            self._read += 1
            try:
                thread_id = self._thread_of(message.subject)
            except MalformedEntry:
                continue
            story = self.story(thread_id)
            yield story, story.feed(message)
