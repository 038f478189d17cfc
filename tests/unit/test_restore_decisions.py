"""What a restore does with a thread's entries, whatever their history; without Spark."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import BufferConfig, BufferedThreadStore, LogConfig, Run
from bufstore.buffer import producers, recent_keys
from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import Base, Entry, Item, Malformed, StoredEntry, entry_id, id_of, items_of
from bufstore.buffer.flush.deciding import decide_thread
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.ports.ledger import Decision, FlushFailed
from bufstore.buffer.subjects import Subjects
from bufstore.errors import StoreUnavailable
from bufstore.jetstream.messages import Outgoing
from bufstore.memory import MemoryNats
from bufstore.memory.ledger import MemoryLedger
from bufstore.memory.log import MemoryStream
from bufstore.spark import Deployment
from bufstore.spark.log_archive import portions as portions_module
from bufstore.spark.log_archive.applicable import RestoreCounts, applicable
from bufstore.spark.log_archive.entry_table import APPLIED, SUPERSEDED, known_of, thread_rows
from bufstore.spark.log_archive.into_log import Wanted, _units, wanted
from bufstore.spark.log_archive.into_postgres import IntoPostgres, decided
from bufstore.spark.log_archive.large_threads import without_given_up_one_by_one
from bufstore.threads.coalesce import coalesce
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.model import decode_message, encode_messages, encode_run
from bufstore.threads.payload import AnyPayload, Payload, Removal, encode_payload
from bufstore.threads.write import save_of
from thorough import examples
from unit.fake_log import run

SUBJECTS = Subjects("thread", 4)
THEN = datetime(2026, 11, 22, tzinfo=UTC)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("append", "whole", "flush", "flush and purge")),
        st.integers(0, 1),  # the process that writes
        st.lists(st.integers(0, 3), max_size=3),
    ),
    min_size=1,
    max_size=12,
)


class World:
    """A log, the store behind it, and processes."""

    def __init__(self) -> None:
        self.nats, self.inner = MemoryNats(), MemoryThreadStore()
        self._runs = itertools.count()

    @asynccontextmanager
    async def store(self, **options: Any) -> AsyncIterator[BufferedThreadStore]:
        """Open a store as a process does; by default without a flusher."""
        log = LogConfig(subject=SUBJECTS.prefix, partitions=SUBJECTS.partitions, failover_window_s=20.0)
        config = BufferConfig(**({"log": log, "flusher": False, "append_timeout_s": 2.0} | options))
        async with await BufferedThreadStore.open(self.inner, nats=self.nats, config=config) as store:
            yield store

    @property
    def stream(self) -> MemoryStream:
        return self.nats.streams[LogConfig.stream]

    def new_run(self) -> Run:
        return Run(run_id=f"run-{next(self._runs)}", thread_id="t")

    async def flush(self) -> None:
        """Flush everything as a flusher does, and purge nothing."""
        async with self.store(flusher=True, retain_after_flush_s=3600.0) as store:
            await store.force_flush_all()

    async def flush_and_purge(self) -> None:
        """Flush, and wait until everything is purged but the last group, which is another thread's."""
        async with self.store(flusher=True, retain_after_flush_s=20.0) as store:
            await store.checkpoint("elsewhere", [], Run(run_id=f"else-{next(self._runs)}", thread_id="elsewhere"))
            await store.force_flush_all()
            async with asyncio.timeout(600):
                while self.stream.last_of(SUBJECTS.groups) != self.stream.messages[0].seq:  # noqa: ASYNC110
                    await asyncio.sleep(1)

    async def held(self) -> int:
        return len(await self.inner.load_messages("t") or [])


async def in_log(store: BufferedThreadStore) -> list[Item]:
    """The thread's entries that the log holds."""
    return items_of([message async for _, message in store.buffer.log.scan(threads=["t"])], "t")


async def history(operations: list[tuple[str, int, list[int]]]) -> tuple[list[Item], list[Any]]:
    """A thread's entries as an archive has them, and the messages that they make."""
    world = World()
    archive: dict[int, Item] = {}
    async with world.store() as one, world.store() as other:
        for kind, process, messages in operations:
            writer = (one, other)[process]
            if kind == "append":
                await writer.checkpoint_append("t", messages, world.new_run())
            elif kind == "whole":
                await writer.checkpoint("t", messages, world.new_run())
            archive |= {item.seq: item for item in await in_log(one)}
            if kind.startswith("flush"):
                await (world.flush() if kind == "flush" else world.flush_and_purge())
        shown = list(await one.load_messages("t") or [])
    return list(archive.values()), shown


async def bring_back(world: World, items: list[Item], count: int = 1000) -> Wanted:
    """Restore the entries into the log of `world`; stop after at most `count` of them."""
    async with world.store() as store:
        log, subject = store.buffer.log, SUBJECTS.of("t")
        held = await log.after(subject, 0)
        end = 1 + await log.end(5)
        row = await world_row(store)
        found = wanted("t", row, await world.held(), [entry_id(m) for m in held], items, end)
        behind = held[-1].seq if held else 0
        for unit in _units(subject, found.entries[:count]):
            behind = await log.publish_batch([msgspec.structs.replace(unit[0], expected=behind), *unit[1:]], 5)
    return found


async def world_row(store: BufferedThreadStore) -> Watermark:
    rows = await store.buffer.ledger.watermarks(["t"])
    return rows["t"][0] if "t" in rows else Watermark()


@examples(40)
@given(
    operations=OPERATIONS,
    parts=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 4), st.sampled_from(("", "flush", "purge"))), max_size=4
    ),
)
def test_a_thread_in_parts_and_again_is_as_it_was(
    operations: list[tuple[str, int, list[int]]], parts: list[tuple[int, int, str]]
) -> None:
    async def main() -> None:
        items, shown = await history(operations)
        world = World()
        async with world.store() as store:
            # Positions in a new log are higher, because its generation starts higher.
            world.stream.store([Outgoing(SUBJECTS.proof, b"")] * 100)
            archived = 0
            for more, count, then in parts:  # newly archived; stopped after so many; what the flushers do then
                archived += more
                if items[:archived]:
                    assert not (await bring_back(world, items[:archived], count)).reason
                if then == "flush":
                    await world.flush()
                elif then == "purge":
                    await world.flush_and_purge()
            if items:
                assert not (await bring_back(world, items)).reason
                again = await bring_back(world, items)
                assert (again.entries, again.present) == ([], len(items))
            assert list(await store.load_messages("t") or []) == shown
            await world.flush()
            assert await world.inner.load_messages("t") == (shown if items else None)
            assert await store.quarantined() == 0

    run(main())


@examples(50)
@given(operations=OPERATIONS, cuts=st.sets(st.integers(0, 12)))
def test_the_table_says_what_a_thread_holds(operations: list[tuple[str, int, list[int]]], cuts: set[int]) -> None:
    """The messages are those of applied entries, without those that later ones drop; the rows may be made in parts."""

    async def main() -> None:
        found, shown = await history(operations)
        items = sorted(found, key=lambda item: item.seq)
        rows: list[dict[str, Any]] = []
        for start, end in itertools.pairwise(sorted({0, *(c for c in cuts if c < len(items)), len(items)})):
            applied = [row for row in rows if row["effect"] == APPLIED]
            known = known_of(rows[-1]["position"], applied[-1] if applied else None) if rows else None
            rows += thread_rows("t", 0, known, ((item, THEN) for item in items[start:end]))
        held: list[Any] = []
        for row in rows:
            if row["effect"] == APPLIED:
                assert len(held) >= row["keep"]
                held[row["keep"] :] = [json.loads(message["json"]) for message in row["messages"]]
                assert [message["number"] for message in row["messages"]] == list(range(row["keep"], len(held)))
        assert held == shown
        assert {row["effect"] for row in rows} <= {APPLIED}, "nobody gave up here"

    run(main())


def test_a_thread_that_went_on_is_left_alone() -> None:
    async def main() -> None:
        items, _ = await history([("append", 0, [1]), ("append", 0, [2])])
        world = World()
        async with world.store() as one:
            await bring_back(world, items[:1])
            await one.checkpoint_append("t", ["mine"], world.new_run())
            found = await bring_back(world, items)
            assert (found.entries, found.refused) == ([], 2)
            assert "in the log is not among the archived entries" in found.reason
            await world.flush_and_purge()
            assert "in Postgres is not among" in (await bring_back(world, items)).reason
            assert await one.load_messages("t") == [1, "mine"]

    run(main())


def test_what_is_broken_or_ahead_is_refused() -> None:
    items = run(history([("append", 0, [1])]))[0]
    (item,) = items
    assert isinstance(item, StoredEntry)
    broken = wanted("t", Watermark(flushed_seq=9, applied_id=3, broken_since=9), 0, [], items, 50)
    ahead = wanted("t", Watermark(flushed_seq=90, applied_id=item.entry.id), 1, [], [*items, *items], 50)
    assert ("quarantine" in broken.reason, broken.entries) == (True, [])
    assert ahead.entries == []


def test_a_thread_whose_last_entry_in_the_log_cannot_be_read_is_left_alone() -> None:
    """Regression: a restore wrote it anew over what others had written, or called all of it present."""
    items: list[Item] = [stored(10, 1, "a", base=Base.NONE), stored(20, 2, "b", keep=1, prev_id=1)]
    unreadable = Malformed("thread.x", 30, (), "a newer envelope", "t")
    for held in ([0], [8, 9, 0], [1, 0]):
        for archived in (items, [*items, unreadable]):
            found = wanted("t", Watermark(), 0, held, archived, 50)
            assert (found.entries, found.present, found.refused) == ([], 0, len(archived))
            assert found.reason == "the last entry of thread 't' in the log cannot be read"
    assert wanted("t", Watermark(), 0, [1, 0, 2], items, 50).present == 2


@pytest.mark.parametrize(
    ("row", "ids", "later"),
    [
        (Watermark(flushed_seq=500), [1, 2, 3, 4], Watermark(flushed_seq=500)),
        (Watermark(flushed_seq=500, applied_id=2, gone=True), [3, 4], Watermark()),
    ],
    ids=["nothing applied", "buried"],
)
def test_what_is_restored_behind_a_row_is_flushed(row: Watermark, ids: list[int], later: Watermark) -> None:
    """Regression: entries that a restore counted as applied were superseded or parked by the flush.

    The first entry of the thread had been discarded, or its tombstone was buried before the flush.
    """
    items: list[Item] = [
        stored(10, 1, "a", base=Base.NONE),
        stored(20, 2, None, prev_id=1),
        stored(30, 3, "b", prev_id=2),
        stored(40, 4, "c", keep=1, prev_id=3),
    ]
    entries = wanted("t", row, 0, [], items, 900).entries
    assert [entry.id for entry in entries] == ids
    for of_flush in (row, later):
        written = [StoredEntry("t", 1000 + n, entry) for n, entry in enumerate(entries)]
        todo, change = decide_thread("t", of_flush, written, {}, coalesce, complete=True)
        assert ([item.entry.id for item in todo.apply], list(todo.park)) == (ids, [])
        assert change is not None
        assert [decode_message(m) for m in change.messages] == ["b", "c"]


@pytest.mark.parametrize("cause", ["malformed", "hole"])
def test_up_to_what_cannot_be_applied(cause: str) -> None:
    items = run(history([("append", 0, [n]) for n in range(4)]))[0]
    if cause == "hole":
        del items[2]
    else:
        items[2] = Malformed("thread.x", items[2].seq, (), "checksum mismatch", "t")
    found = wanted("t", Watermark(), 0, [], items, 50)
    assert (len(found.entries), found.refused) == (2, len(items) - 2)
    assert f"position {items[2].seq}" in found.reason
    decision, counts = decided({"t": Watermark()}, {}, {"t": items})
    assert (counts.applied, counts.refused, len(decision.batch)) == (2, len(items) - 2, 1)


def stored(
    seq: int, id_: int, message: str | None, *, keep: int = 0, thread_id: str = "t", run_id: str = "r", **fields: Any
) -> StoredEntry:
    """An entry that appends a message or, for None, deletes the thread."""
    made = Run(run_id=run_id, thread_id=thread_id)
    payload: AnyPayload = Removal()
    if message is not None:
        payload = Payload(keep, encode_messages([message]), encode_run(made), save_of(made))
    version = keep + (message is not None)
    given: dict[str, Any] = {
        "prev_id": 0,
        "base": Base.CHAINED,
        "seen": 0,
        "self_contained": message is None,
        "keys": b"",
    }
    entry = Entry(id=id_, version=version, payload=encode_payload(payload), **(given | fields))
    return StoredEntry(thread_id, seq, entry)


@pytest.mark.parametrize(
    ("behind", "ids", "refused"),
    [
        ([stored(30, 3, None, prev_id=2)], [1, 3], 1),
        ([stored(30, 3, "whole", prev_id=2, self_contained=True)], [1, 3], 1),
        ([stored(30, 3, "b", keep=1, prev_id=1)], [1, 3], 1),
        ([stored(30, 3, "c", keep=2, prev_id=2), stored(40, 4, None, prev_id=3)], [1, 4], 2),
        ([stored(30, 3, None, prev_id=2), stored(40, 9, "lost", keep=1, prev_id=8)], [1, 3], 2),
    ],
    ids=["deletion", "whole list", "discarded", "delta, deletion", "broken anew"],
)
def test_what_took_effect_behind_poison_does_so_again(behind: list[Item], ids: list[int], refused: int) -> None:
    """Regression: a restore brought back deleted and erased threads of which an entry had been parked."""
    items = [stored(10, 1, "a", base=Base.NONE), Malformed("thread.x", 20, (), "checksum mismatch", "t"), *behind]
    found = applicable("t", Watermark(), 0, items)
    assert ([item.entry.id for item in found.plan.apply], found.refused) == (ids, refused)
    assert "position 20: checksum mismatch" in found.reason
    assert (found.plan.park, found.plan.watermark.broken_since, found.plan.watermark.applied_id) == ((), None, ids[-1])
    assert [entry.id for entry in wanted("t", Watermark(), 0, [], items, 50).entries] == ids
    _, counts = decided({"t": Watermark()}, {}, {"t": items})
    assert (counts.applied, counts.refused) == (len(ids), refused)


@pytest.mark.parametrize(
    ("row", "later", "ids"),
    [
        (Watermark(), [stored(40, 4, "d", keep=1, prev_id=1)], [1, 4]),
        (Watermark(), [stored(40, 4, "d", keep=1, prev_id=1, base=Base.STORED, seen=35)], [1, 4]),
        (Watermark(), [stored(40, 4, "d", prev_id=0)], [4]),
        (Watermark(), [stored(40, 4, None, prev_id=1)], [1, 4]),
        (Watermark(flushed_seq=10, applied_id=1, version=1), [stored(40, 4, "d", keep=1, prev_id=1)], [4]),
        # A copy of an entry, and an entry whose writer had not seen the others, say nothing.
        (Watermark(), [stored(40, 3, "c", keep=2, prev_id=2)], [1, 2, 3]),
        (Watermark(), [stored(40, 4, "d", keep=1, prev_id=1, base=Base.STORED, seen=15)], [1, 2, 3]),
        # The second time, only what came since is given up.
        (
            Watermark(),
            [
                stored(40, 4, "d", keep=1, prev_id=1),
                stored(50, 5, "e", keep=2, prev_id=4),
                stored(60, 6, "f", keep=2, prev_id=4),
            ],
            [1, 4, 6],
        ),
    ],
    ids=["in the log", "purged", "all of them", "a deletion", "in Postgres", "a copy", "unseen", "twice"],
)
def test_what_was_discarded_stays_away_and_what_was_acknowledged_later_comes_back(
    row: Watermark, later: list[Item], ids: list[int]
) -> None:
    """Regression: entries that an operator had discarded came back, and all that followed them was refused."""
    items: list[Item] = [
        stored(10, 1, "a", base=Base.NONE),
        stored(20, 2, "b", keep=1, prev_id=1),
        stored(30, 3, "c", keep=2, prev_id=2),
        *later,
    ]
    found = applicable("t", row, row.version, items)
    assert [item.entry.id for item in found.plan.apply] == ids
    assert found.plan.watermark.broken_since is None
    if 4 in ids:
        assert "given up" in found.reason
    if not row.flushed_seq:
        assert [entry.id for entry in wanted("t", row, 0, [], items, 70).entries] == ids
        for size in range(1, 7):
            assert restored_in_portions(items, size) == (ids, found.refused)


def restored_in_portions(items: list[Item], size: int) -> tuple[list[int], int]:
    """Restore a thread with so many entries at a time; return the ids of those applied, and how many were refused."""
    row, version, applied, refused = Watermark(), 0, [], 0
    with patch.object(portions_module, "ENTRIES_MAX", size):
        portions = list(portions_module.portions(iter([("t", iter(items))]), without_given_up_one_by_one))
    assert all(len(portion["t"]) <= size for portion, _ in portions)
    for portion, _ in portions:
        found = applicable("t", row, version, portion["t"])
        applied += [item.entry.id for item in found.plan.apply]
        row, version, refused = found.plan.watermark, found.plan.watermark.version, refused + found.refused
    return applied, refused


@pytest.mark.parametrize(
    ("items", "ids"),
    [
        (
            [
                stored(10, 1, "a", base=Base.NONE),
                stored(20, 2, "b", keep=1, prev_id=1),
                stored(30, 3, "c", keep=2, prev_id=2),
                # A restore into the log has written two of them again.
                stored(40, 2, "b", keep=1, prev_id=1),
                stored(50, 3, "c", keep=2, prev_id=2),
                stored(60, 4, "d", keep=3, prev_id=3),
            ],
            [1, 2, 3, 4],
        ),
        (
            [
                stored(10, 1, "a", base=Base.NONE),
                stored(20, 2, "b", keep=1, prev_id=1),
                stored(30, 1, "a", base=Base.NONE),  # too late
                stored(40, 3, "c", keep=2, prev_id=2),
            ],
            [1, 2, 3],
        ),
        (
            [
                stored(10, 1, "a", base=Base.NONE),
                stored(20, 2, "b", keep=1, prev_id=1),
                Malformed("thread.x", 30, (), "checksum mismatch", "t"),
                stored(40, 3, "whole", self_contained=True),  # its writer knew no id
            ],
            [1, 2, 3],
        ),
    ],
    ids=["written again", "a late copy", "behind garbage"],
)
def test_what_had_an_effect_was_not_given_up(items: list[Item], ids: list[int]) -> None:
    found = applicable("t", Watermark(), 0, items)
    assert [item.entry.id for item in found.plan.apply] == ids


async def test_what_was_discarded_stays_away_beside_an_entry_that_postgres_refuses() -> None:
    """The portion is then divided, and what tells that it was given up stands in the other half."""
    postgres = Refusing()
    threads: dict[str, list[Item]] = {
        "t": [
            stored(10, 1, "a", base=Base.NONE, run_id="t"),
            stored(20, 2, "b", keep=1, prev_id=1, run_id="t"),
            stored(30, 3, "c", keep=2, prev_id=2, run_id="t"),
            stored(40, 4, "d", keep=1, prev_id=1, run_id="t"),
        ],
        "u": [stored(5, 11, "u", thread_id="u", base=Base.NONE)],
        "v": [stored(35, 21, "v", thread_id="v", base=Base.NONE)],
    }
    counts = await postgres.restore(threads)
    assert (counts.applied, counts.refused) == (3, 3)
    assert await postgres.load_messages("t") == ["a", "d"]


def test_a_thread_with_discarded_entries_is_restored_as_it_was() -> None:
    """The same with a real quarantine."""

    class Picky(MemoryThreadStore):
        async def apply(self, connection: Any, batch: Sequence[Any]) -> None:
            if any(run_id.startswith("poison") for change in batch for run_id in change.runs):
                raise FlushFailed("a constraint", Verdict.POISON)
            await super().apply(connection, batch)

    async def main() -> None:
        world = World()
        world.inner = Picky()
        async with world.store(flusher=True, retain_after_flush_s=3600.0) as store:
            for n, run_id in enumerate(["one", "poison", "one"]):
                await store.checkpoint_append("t", [n], Run(run_id=run_id, thread_id="t"))
            while len(parked := await store.quarantine.page()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert await store.quarantine.discard([entry.seq for entry in parked]) == 2
            for n in (3, 4):
                await store.checkpoint_append("t", [n], Run(run_id="one", thread_id="t"))
            await store.force_flush_all()
            assert await store.load_messages("t") == [0, 3, 4]
            found = applicable("t", Watermark(), 0, await in_log(store))
        assert (len(found.plan.apply), found.refused) == (3, 2)
        assert [decode_message(m) for m in found.change.messages] == [0, 3, 4]

    run(main())


@pytest.mark.parametrize("held", [[], [1, 2]])
def test_restored_entries_remember_the_keys_and_producers_of_those_before_them(held: list[int]) -> None:
    """Regression: between restore and flush, a repeated write with a number or key took effect again."""

    def key(name: str) -> bytes:
        return recent_keys.item(name, b"")

    # Its writer found "b" in Postgres only, and so did not know the keys before it; the next one knew only "c".
    items: list[Item] = [
        stored(10, 1, "a", base=Base.NONE, keys=key("a"), producers=producers.item("p", 1)),
        stored(
            20, 2, "b", keep=1, prev_id=1, base=Base.STORED, seen=15, keys=key("b"), producers=producers.item("p", 2)
        ),
        stored(30, 3, "c", keep=2, prev_id=2, keys=key("c"), keys_complete=False, producers=None),
        stored(40, 4, "d", keep=3, prev_id=3, keys=key("d"), keys_complete=False, producers=None),
    ]
    found = wanted("t", Watermark(), 0, held, items, 50).entries
    assert [e.id for e in found] == [1, 2, 3, 4][len(held) :]
    assert all(recent_keys.holds(found[-1].keys, key(name)) for name in "abcd")
    assert producers.holds(found[-1].producers or b"", producers.item("p", 2))
    assert not producers.holds(found[-1].producers or b"", producers.item("p", 3))


def test_a_thread_in_quarantine_stays_there_when_nothing_heals_it() -> None:
    row = Watermark(flushed_seq=10, applied_id=1, version=1, broken_since=10)
    lost = stored(30, 9, "lost", keep=1, prev_id=8)
    found = applicable("t", row, 1, [stored(20, 3, "b", keep=1, prev_id=1), lost])
    assert (found.refused, found.plan.watermark.broken_since) == (1, 10)
    assert applicable("t", row, 1, [stored(20, 3, None, prev_id=2), lost]).plan.watermark.broken_since is None


def test_a_thread_that_was_buried_and_made_again_is_there_again() -> None:
    """The log had forgotten the deletion, and Postgres the row: the thread's first new entry expects nothing."""
    items: list[Item] = [
        stored(10, 1, "a", base=Base.NONE),
        stored(20, 2, None, prev_id=1),
        stored(25, 3, "too late", base=Base.NONE, seen=5),
        stored(30, 4, "b", base=Base.NONE, seen=28),
        stored(40, 5, "c", keep=1, prev_id=4),
    ]
    wanted_ids = [1, 2, 4, 5]
    found = applicable("t", Watermark(), 0, items)
    assert ([i.entry.id for i in found.plan.apply], found.refused) == (wanted_ids, 0)
    assert (found.plan.watermark.version, found.plan.watermark.gone) == (2, False)
    behind = applicable("t", Watermark(flushed_seq=20, applied_id=2, gone=True), 0, items)
    assert ([i.entry.id for i in behind.plan.apply], behind.refused) == ([4, 5], 0)
    assert [e.id for e in wanted("t", Watermark(), 0, [], items, 50).entries] == wanted_ids
    assert [e.id for e in wanted("t", Watermark(), 0, [1, 2], items, 50).entries] == [4, 5]
    rows = list(thread_rows("t", 0, None, iter([(item, THEN) for item in items])))
    assert [row["effect"] for row in rows] == [APPLIED, APPLIED, SUPERSEDED, APPLIED, APPLIED]
    known = known_of(20, rows[1])
    assert list(thread_rows("t", 0, known, iter([(item, THEN) for item in items[2:]]))) == rows[2:]
    decision, counts = decided({"t": Watermark()}, {}, {"t": items})
    assert (counts.refused, [change.messages for change in decision.batch]) == (0, [encode_messages(["b", "c"])])


def test_messages_that_were_there_before_the_log_are_missed() -> None:
    """The log's first entry keeps two messages that no archive has."""
    items = run(history([("whole", 0, [1, 2]), ("append", 0, [3])]))[0][1:]
    (item,) = items
    assert isinstance(item, StoredEntry)
    first = StoredEntry("t", item.seq, msgspec.structs.replace(item.entry, base=Base.NONE, prev_id=0))
    assert "older than the log" in applicable("t", Watermark(), 0, [first]).reason
    assert "older than the log" in wanted("t", Watermark(), 1, [], [first], 50).reason
    assert applicable("t", Watermark(), 2, [first]).reason == ""


class Refusing(MemoryThreadStore):
    """A database that refuses a run of which it has another thread's; with a ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = MemoryLedger(self)

    async def versions(self, thread_ids: Sequence[str]) -> dict[str, int]:
        return {t: len(m) for t in thread_ids if (m := await self.load_messages(t)) is not None}

    async def restore(self, threads: Mapping[str, Sequence[Item]]) -> RestoreCounts:
        """Restore into it what an archive has of these threads."""
        deployment = Deployment(nats="nats://h", postgres="postgresql://h/db")
        into = IntoPostgres(deployment, LogConfig(), dry_run=False)
        into._store, into._ledger = self, self.ledger  # type: ignore[assignment]
        return await into.apply(threads)

    async def flush(self, item: StoredEntry) -> None:
        """Flush one entry; park it, if it is refused."""
        poison: dict[int, str] = {}

        def decide(rows: Mapping[str, Watermark]) -> Decision:
            todo, change = decide_thread(item.thread_id, rows[item.thread_id], [item], poison, coalesce, complete=True)
            batch = [change] if change is not None else []
            return Decision(batch=batch, watermarks={item.thread_id: todo.watermark}, parked=todo.park)

        try:
            await self.ledger.flush([], [item.thread_id], decide)
        except FlushFailed as e:
            poison[item.entry.id] = str(e)
            await self.ledger.flush([], [item.thread_id], decide)

    async def held(self, threads: Iterable[str]) -> dict[str, list[Any] | None]:
        return {thread_id: await self.load_messages(thread_id) for thread_id in threads}


async def test_of_two_threads_with_one_run_the_one_that_made_it_has_it() -> None:
    """Regression: the first by its id got the run, and the other one, which had made it, was left out."""
    threads = {
        "a": [
            stored(5, 11, "a0", thread_id="a", run_id="ra", base=Base.NONE),
            stored(20, 12, "a1", thread_id="a", keep=1, prev_id=11),
        ],
        "b": [
            stored(10, 21, "b0", thread_id="b", base=Base.NONE),
            stored(30, 22, "b1", thread_id="b", keep=1, prev_id=21),
        ],
    }
    database = Refusing()
    counts = await database.restore(threads)
    assert (counts.threads, counts.applied, counts.refused) == (2, 3, 1)
    assert counts.reasons == [
        "thread 'a', position 20: Postgres refuses it: run 'r' belongs to a thread other than 'a'"
    ]
    assert await database.held(threads) == {"a": ["a0"], "b": ["b0", "b1"]}


class Picky(Refusing):
    """A database that refuses whatever has thread "b", with a verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self._verdict = verdict

    async def apply(self, connection: Any, batch: Sequence[Any]) -> None:
        if any(change.thread_id == "b" for change in batch):
            raise FlushFailed("a trigger says no", self._verdict)
        await super().apply(connection, batch)


@pytest.mark.parametrize("verdict", Verdict)
async def test_of_threads_of_which_postgres_refuses_one_the_others_come_back(verdict: Verdict) -> None:
    """Regression: where a trigger refused one thread, nothing was restored, and nobody was told which one it was."""
    database = Picky(verdict)
    threads = {t: [stored(n, n, t, thread_id=t, run_id=t, base=Base.NONE)] for n, t in enumerate("abcd", 1)}
    if verdict in (Verdict.POISON, Verdict.ISOLATE, Verdict.SUSPECT):
        counts = await database.restore(threads)
        assert (counts.threads, counts.applied, counts.refused) == (4, 3, 1)
        assert counts.reasons == ["thread 'b', position 2: Postgres refuses it: a trigger says no"]
        assert await database.held(threads) == {"a": ["a"], "b": None, "c": ["c"], "d": ["d"]}
    else:
        with pytest.raises(StoreUnavailable):
            await database.restore(threads)


@pytest.mark.parametrize("verdict", [Verdict.ISOLATE, Verdict.SUSPECT])
async def test_behind_what_postgres_refuses_for_now_nothing_of_the_thread_is_restored(verdict: Verdict) -> None:
    """Regression: a later whole list was applied over it, and the next run took all of the thread for restored."""

    class ForNow(Refusing):
        refuses = True

        async def apply(self, connection: Any, batch: Sequence[Any]) -> None:
            if self.refuses and any("not now" in change.runs for change in batch):
                raise FlushFailed("a trigger says no", verdict)
            await super().apply(connection, batch)

    database = ForNow()
    threads = {
        "a": [
            stored(5, 11, "a0", thread_id="a", run_id="ra", base=Base.NONE),
            stored(10, 12, "a1", thread_id="a", run_id="not now", keep=1, prev_id=11),
            stored(20, 13, "whole", thread_id="a", run_id="ra", prev_id=12, self_contained=True),
        ],
        "b": [stored(7, 21, "b0", thread_id="b", run_id="rb", base=Base.NONE)],
    }
    counts = await database.restore(threads)
    assert (counts.threads, counts.applied, counts.refused) == (2, 2, 2)
    assert counts.reasons == ["thread 'a', position 10: Postgres refuses it: a trigger says no"]
    assert await database.held(threads) == {"a": ["a0"], "b": ["b0"]}
    database.refuses = False
    again = await database.restore(threads)
    assert (again.applied, again.present, again.refused) == (2, 2, 0)
    assert await database.held(threads) == {"a": ["whole"], "b": ["b0"]}


async def test_of_a_thread_only_what_a_flush_would_park_is_left_out() -> None:
    """Regression: all of a thread was left out for one entry, also where a full checkpoint had healed it."""
    database = Refusing()
    await database.restore({"b": [stored(10, 21, "b0", thread_id="b", base=Base.NONE)]})
    threads = {
        "a": [
            stored(5, 11, "a0", thread_id="a", run_id="ra", base=Base.NONE),
            stored(20, 12, "poison", thread_id="a", keep=1, prev_id=11),
            stored(30, 13, "whole", thread_id="a", run_id="ra", prev_id=12, self_contained=True),
            stored(40, 14, "more", thread_id="a", run_id="ra", keep=1, prev_id=13),
        ]
    }
    counts = await database.restore(threads)
    assert (counts.threads, counts.applied, counts.refused) == (1, 3, 1)
    assert counts.reasons == [
        "thread 'a', position 20: Postgres refuses it: run 'r' belongs to a thread other than 'a'"
    ]
    assert await database.held(threads) == {"a": ["whole", "more"]}
    again = await database.restore(threads)
    assert (again.applied, again.present, again.refused) == (0, 4, 0)


@examples(100)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=14))
def test_a_restore_applies_what_a_flush_would(entries: list[tuple[str, int, bool]]) -> None:
    """Entries of three threads, which name runs of each other: what a flush parks is refused, and nothing else."""

    async def main() -> None:
        flushed, restored = Refusing(), Refusing()
        threads: dict[str, list[Item]] = {}
        versions: dict[str, int] = {}
        for n, (thread_id, run_number, whole) in enumerate(entries, 1):
            mine = threads.setdefault(thread_id, [])
            keep = 0 if whole else versions.get(thread_id, 0)
            versions[thread_id] = keep + 1
            chain: dict[str, Any] = {"base": Base.CHAINED, "prev_id": id_of(mine[-1])} if mine else {"base": Base.NONE}
            item = stored(
                n, n, f"{n}", keep=keep, thread_id=thread_id, run_id=f"r{run_number}", self_contained=whole, **chain
            )
            mine.append(item)
            await flushed.flush(item)
        if not threads:
            return
        counts = await restored.restore(threads)
        assert await restored.held(threads) == await flushed.held(threads)
        parked = await flushed.ledger.quarantined()
        assert (counts.refused, counts.applied, counts.present) == (parked, len(entries) - parked, 0)

    run(main())
