"""Random histories of a thread as the log has them, and an oracle that reads them entry by entry."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bufstore.buffer import recent_keys
from bufstore.buffer.append.appender import Tip
from bufstore.buffer.chain import Parked, Watermark, plan
from bufstore.buffer.domain import Inapplicable
from bufstore.buffer.entry import Base, Entry, Item, Malformed, StoredEntry
from bufstore.threads.coalesce import coalesce
from bufstore.threads.digests import MessageMemory, digests_of, ids_of
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.model import Run, RunStatus, Thread, ThreadChange, encode_messages, encode_run
from bufstore.threads.payload import decode_payload
from bufstore.threads.write import Call, save_of

THREAD = "t"


def call_of(messages: Sequence[Any], run: Run) -> Call:
    encoded = encode_messages(messages)
    return Call(THREAD, encoded, digests_of(encoded), ids_of(messages), encode_run(run), save_of(run))


@dataclass
class Oracle:
    """The plain meaning of the log, one entry at a time."""

    messages: list[bytes] = field(default_factory=list)
    runs: dict[str, bytes] = field(default_factory=dict)
    thread: Thread | None = None
    watermark: Watermark = field(default_factory=Watermark)
    parked: list[int] = field(default_factory=list)

    def take(self, item: Item, *, poison: bool = False) -> None:
        watermark = self.watermark
        if isinstance(item, Malformed):
            self._park(item)
            return
        e = item.entry
        if e.base is not Base.CHAINED and (
            watermark.flushed_seq > e.seen or (e.base is Base.NONE and watermark.flushed_seq)
        ):
            self.watermark = Watermark(
                item.seq, watermark.applied_id, watermark.version, watermark.keys, watermark.broken_since
            )  # the entry came too late
            return
        builds_on_this = e.self_contained or e.base is Base.UNKNOWN or e.prev_id == watermark.applied_id
        if poison or not builds_on_this:
            self._park(item)
            return
        payload = decode_payload(e.payload)
        self.messages = self.messages[: payload.keep] + list(payload.messages)
        self.runs[payload.save.run_id] = payload.run
        save = payload.save
        run = Run(run_id=save.run_id, thread_id=THREAD, status=save.status, parent_thread_id=save.parent_thread_id)
        before = self.thread or Thread(thread_id=THREAD)
        after = before.with_run(run)
        self.thread = Thread(
            thread_id=THREAD,
            version=len(self.messages),
            parent_thread_id=after.parent_thread_id,
            latest_run_id=after.latest_run_id,
            active_run_id=after.active_run_id,
            open_run_id=after.open_run_id,
        )
        broken = None if e.self_contained else watermark.broken_since
        self.watermark = Watermark(
            item.seq, e.id, len(self.messages), recent_keys.merge(watermark.keys, e.keys), broken
        )

    def _park(self, item: Item) -> None:
        watermark = self.watermark
        self.parked.append(item.seq)
        since = watermark.broken_since if watermark.broken_since is not None else item.seq
        self.watermark = Watermark(item.seq, watermark.applied_id, watermark.version, watermark.keys, since)


@dataclass
class Story:
    """Entries in the order of the log, in chapters: at the end of each, all is flushed and purged."""

    chapters: list[list[Item]]
    poison: frozenset[int]

    def told(self) -> Oracle:
        oracle = Oracle()
        for item in (item for chapter in self.chapters for item in chapter):
            oracle.take(item, poison=isinstance(item, StoredEntry) and item.entry.id in self.poison)
        return oracle


def write_story(chance: random.Random, *, chapters: int = 3, length: int = 8, damage: bool = False) -> Story:
    """A story in which several writers, each with its own memory, write to one thread."""
    writers: list[Tip[MessageMemory] | None] = [None] * 3
    seq, entry_id, run_number = 0, 0, 0
    poison: set[int] = set()
    told: list[list[Item]] = []
    late: list[Entry] = []
    oracle = Oracle()
    content: list[Any] = []  # what the last writer believes the thread holds
    for _ in range(chapters):
        chapter: list[Item] = []
        for _ in range(chance.randint(1, length)):
            seq += chance.randint(1, 3)
            if damage and chance.random() < 0.1:
                chapter.append(Malformed("s", seq, (), "damage", THREAD))
                oracle.take(chapter[-1])
                writers = [None] * 3
                continue
            if not chapter and late and chance.random() < 0.5:
                # An entry that its writer gave up long ago lands on the purged subject.
                landed = StoredEntry(THREAD, seq, late.pop())
                chapter.append(landed)
                oracle.take(landed)
                continue
            w = chance.randrange(3)
            last = chapter[-1] if chapter else None
            tip = writers[w]
            if tip is None or tip.seq != (last.seq if last else 0) or (last is None):
                tip = _look_up(chance, oracle, chapter, seq - 1)
            readable = tip.memory is not None and oracle.watermark.broken_since is None
            if chance.random() < 0.4:
                run_number += 1
            run = Run(
                run_id=f"run {run_number - chance.randint(0, min(2, run_number))}",
                thread_id=THREAD,
                status=chance.choice(list(RunStatus)),
                parent_thread_id=chance.choice([None, "p1", "p2"]),
                steps=seq,
            )
            if readable and chance.random() < 0.5:
                new = [f"m{seq}.{i}" for i in range(chance.randint(0, 3))]
                draft = call_of(new, run).appending(tip)
                content = [*content, *new]
            else:
                cut = chance.randint(0, len(content))
                content = [*content[:cut], *(f"w{seq}.{i}" for i in range(chance.randint(0, 4)))]
                tip_for = tip if readable else _without_memory(tip)
                draft = call_of(content, run).whole_list(tip_for)
            entry_id += 1
            entry = Entry(
                id=entry_id,
                prev_id=tip.id,
                base=tip.base,
                seen=tip.seen,
                version=draft.version,
                self_contained=draft.self_contained,
                keys=recent_keys.add(tip.keys, recent_keys.item(recent_keys.key_of(entry_id), b"")),
                payload=draft.payload,
            )
            if tip.base is not Base.CHAINED and chance.random() < 0.5:
                draft.undo()
                late.append(entry)  # given up: the entry may land in a later chapter
                writers[w] = None
                continue
            if damage and chance.random() < 0.1:
                poison.add(entry_id)
            stored = StoredEntry(THREAD, seq, entry)
            chapter.append(stored)
            oracle.take(stored, poison=entry_id in poison)
            writers[w] = Tip(seq, entry_id, Base.CHAINED, 0, draft.version, entry.keys, draft.memory)
        told.append(chapter)
        writers = [None] * 3
    return Story(told, frozenset(poison))


def _without_memory(tip: Tip[MessageMemory]) -> Tip[MessageMemory]:
    return Tip(tip.seq, tip.id, tip.base, tip.seen, tip.version, tip.keys, None)


def _look_up(chance: random.Random, oracle: Oracle, chapter: list[Item], seen: int) -> Tip[MessageMemory]:
    """The tip that a writer finds that remembers nothing of the thread."""
    watermark = oracle.watermark
    memory = MessageMemory(digests_of(oracle.messages), digests_of(oracle.messages))
    if not chapter:
        if chance.random() < 0.5:
            return Tip(0, 0, Base.UNKNOWN, seen, 0, b"", None)
        base = Base.STORED if watermark.flushed_seq else Base.NONE
        return Tip(0, watermark.applied_id, base, seen, watermark.version, watermark.keys, memory)
    last = chapter[-1]
    if chance.random() < 0.5:
        if isinstance(last, Malformed):
            return Tip(last.seq, 0, Base.CHAINED, 0, 0, b"", None, broken_since=last.seq)
        return Tip(last.seq, last.entry.id, Base.CHAINED, 0, last.entry.version, last.entry.keys, None)
    broken = watermark.broken_since is not None
    return Tip(
        last.seq,
        watermark.applied_id,
        Base.CHAINED,
        0,
        watermark.version,
        watermark.keys,
        None if broken else memory,
        broken,
    )


class Flushed:
    """A store and a row that change only as a flush changes them."""

    def __init__(self) -> None:
        self.store = MemoryThreadStore()
        self.watermark = Watermark()
        self.parked: list[Parked] = []
        self.changes = 0

    async def window(self, items: Sequence[Item], log: Sequence[Item], poison: frozenset[int]) -> None:
        """Do what the flusher does with a delivery. `log`: what it can fetch to fill a gap."""
        complete = False
        known = set(poison)
        while True:
            todo = plan(self.watermark, items, complete=complete, poison=dict.fromkeys(known, "poison"))
            if todo.gap_before is not None:
                last = max(i.seq for i in items)
                items = [*(i for i in log if self.watermark.flushed_seq < i.seq < last), *items]
                complete = True
                continue
            try:
                if todo.apply:
                    await apply(self.store, coalesce(THREAD, self.watermark.version, todo.apply))
                    self.changes += 1
            except Inapplicable as e:
                known.add(e.entry_id)
                continue
            self.watermark = todo.watermark
            self.parked += todo.park
            return


async def apply(store: MemoryThreadStore, change: ThreadChange) -> None:
    """Apply a change; if it says that it appends, check that it does: its messages may be copied without a look."""
    there = await store.load_messages(change.thread_id) or []
    assert not change.appends or change.keep == len(there)
    await store.apply(None, [change])
