"""Reads whose two answers come from different moments, or from long ago: in memory and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from bufstore import BufferConfig, LogConfig, LogUnavailable, ReadNotFresh, StoreUnavailable
from bufstore.buffer.chain import Watermark
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.ports.ledger import Cursor, FlushFailed
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore
from bufstore.langgraph.ancestors import Walk
from bufstore.langgraph.domain import Tail
from bufstore.langgraph.history import History
from bufstore.langgraph.model import BlobRow, CheckpointRow, LangGraphChange, Tables, WriteRow
from bufstore.langgraph.protocol import Part
from bufstore.langgraph.read_cache import _FOLLOWED_MAX, ReadCache
from bufstore.memory import MemoryNats
from langgraph_savers import META, checkpoint, config
from thorough import seldom
from unit.fake_log import run

CONFIG = BufferConfig(log=LogConfig(partitions=2), flush_interval_s=0.5, lease_s=4, retain_after_flush_s=60.0)


class Store(MemoryCheckpointStore):
    """A store that can answer before the log's tail is asked for, and that can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_first: list[asyncio.Event] = []
        self.down = self.went_back = False
        #: The thread that a flush may not write now.
        self.held: str | None = None

    def behind(self, config: BufferConfig) -> Any:
        ledger, backing = super().behind(config)
        read, cursors = ledger.watermark, ledger.cursors

        async def watermark(thread_id: str) -> Watermark:
            self._check()
            return await read(thread_id)

        async def reached() -> dict[int, Cursor]:
            self._check()
            return await cursors()

        ledger.watermark, ledger.cursors = watermark, reached  # type: ignore[method-assign]
        return ledger, backing

    def _check(self) -> None:
        if self.down:
            raise StoreUnavailable("it is away")

    async def apply(self, connection: Any, batch: Sequence[LangGraphChange]) -> None:
        self._check()
        if any(change.thread_id == self.held for change in batch):
            raise FlushFailed("55P03", Verdict.ISOLATE)
        await super().apply(connection, batch)

    async def answers(self) -> None:
        self._check()

    async def state(self, thread_id: str) -> Tail:
        self._check()
        if self.rows_first:
            await self.rows_first[0].wait()
        return await super().state(thread_id)

    async def latest(self, thread_id: str, ns: str, namespaces_max: int) -> Part:
        self._check()
        part = await super().latest(thread_id, ns, namespaces_max)
        if self.rows_first:
            await self.flush()
            self.rows_first.pop().set()
        return part

    async def rows(self, *asked: Any) -> Part:
        return Part(Watermark(), Tables()) if self.went_back else await super().rows(*asked)

    async def flush(self) -> None:
        """Do nothing; the test replaces it."""


async def _opened(store: Store, nats: MemoryNats, *, flusher: bool = True, **options: Any) -> AsyncBufferedSaver:
    """Open a saver; without a flusher, it sees only what it asks of the log."""
    return await AsyncBufferedSaver.open(store, nats=nats, config=replace(CONFIG, flusher=flusher), **options)


async def _values(saver: AsyncBufferedSaver) -> Any:
    found = await saver.aget_tuple(config("t"))
    return None if found is None else found.checkpoint["channel_values"]


def test_rows_older_than_the_tail_are_read_again() -> None:
    async def main() -> None:
        store = Store()
        saver = await _opened(store, MemoryNats())
        store.flush = saver.force_flush  # type: ignore[method-assign]
        at = await saver.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await saver.aput(at, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        store.rows_first = [asyncio.Event()]
        assert await _values(saver) == {"a": [2]}
        assert not store.rows_first
        await saver.aclose()

    run(main())


def test_a_fork_from_before_what_is_flushed_fetches_the_values_of_its_branch() -> None:
    async def main() -> None:
        saver = await _opened(Store(), MemoryNats())
        one = await saver.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await saver.aput(one, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        await saver.force_flush()
        await saver.aput(one, checkpoint({"a": "1", "b": "3"}, {"a": [1], "b": [3]}), META, {"b": "3"})
        assert await _values(saver) == {"a": [1], "b": [3]}
        await saver.aclose()

    run(main())


def test_a_failover_during_a_read_takes_no_values_from_it() -> None:
    """The last read comes from a Postgres that lacks a flush which the read before it saw."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        saver, reader = await _opened(store, nats), await _opened(store, nats)
        a = ["x" * (1 << 20)]  # too large for the fork to carry
        one = await saver.aput(config("t"), checkpoint({"a": "1"}, {"a": a}), META, {"a": "1"})
        await saver.aput(one, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        await saver.force_flush()
        fork = await saver.aput(one, checkpoint({"a": "1", "b": "3"}, {"a": a, "b": [3]}), META, {"b": "3"})
        await saver.aput(fork, checkpoint({"a": "1", "b": "4"}, {"a": a, "b": [4]}), META, {"b": "4"})
        store.went_back = True
        with pytest.raises(ReadNotFresh):
            await _values(reader)
        with pytest.raises(ReadNotFresh):
            await reader.engine.of("t").ancestors("t", "", fork["configurable"]["checkpoint_id"], ["a"])
        store.went_back = False
        assert await _values(reader) == {"a": a, "b": [4]}
        await saver.aclose()
        await reader.aclose()

    run(main())


@pytest.mark.parametrize("written_since", [False, True])
@pytest.mark.parametrize("long_ago", [False, True])
def test_what_was_read_counts_as_long_as_nobody_can_have_written_unseen(written_since: bool, long_ago: bool) -> None:
    """The log has forgotten what another process has written since, so only Postgres can tell."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one, other = await _opened(store, nats, flusher=False), await _opened(store, nats)
        at = await other.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await other.force_flush()
        assert await _values(one) == {"a": [1]}
        if written_since:
            await other.aput(at, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
            await other.force_flush()
        for n in range(10):  # the entry at a partition's cursor is not purged
            await other.aput(config(f"other {n}"), checkpoint({}, {}), META, {})
        await asyncio.sleep(600 if long_ago else 1)
        subject = one.engine.buffer.subjects.of("t")
        assert bool(await one.engine.buffer.log.latest(subject, 1)) is not long_ago
        store.down = True
        if long_ago:
            with pytest.raises(StoreUnavailable):
                await _values(one)
        else:
            assert await _values(one) == {"a": [2 if written_since else 1]}
        store.down = False
        await one.aclose()
        await other.aclose()

    run(main())


@pytest.mark.parametrize("purged", [False, True])
def test_rows_below_what_waits_are_not_the_threads_last_in_an_outage(purged: bool) -> None:
    """Regression: a run went on from the older checkpoint, and what it saved there was quarantined."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one = await _opened(store, nats)
        at = await one.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await one.force_flush()
        store.held = "t"
        at = await one.aput(at, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        buffer, rounds = one.engine.buffer, 0
        while (await buffer.ledger.watermark("t")).waits_to == 0 or (purged and await _in_log(one, "t")):
            rounds += 1
            assert rounds < 1000
            for n in range(10):  # the entry at a partition's cursor is not purged
                await one.aput(config(f"other {n}"), checkpoint({}, {}), META, {})
            await asyncio.sleep(10)
        other = await _opened(store, nats)
        for saver in (one, other):
            assert await saver.aget_tuple(at) is not None
            assert await _values(saver) == {"a": [2]}
        store.down = True
        three = checkpoint({"a": "3"}, {"a": [3]})
        for saver in (one, other):
            if purged:
                with pytest.raises((StoreUnavailable, ReadNotFresh)):
                    await _values(saver)
            else:
                assert await _values(saver) == {"a": [2]}
        if purged:
            with pytest.raises(StoreUnavailable):
                await other.aput(at, three, META, {"a": "3"})
        await one.aput(at, three, META, {"a": "3"})  # it knows its own entry
        store.down, store.held = False, None
        await asyncio.sleep(60)
        assert await _values(one) == await _values(other) == {"a": [3]}
        assert await buffer.quarantine.page(after=0, limit=1) == []
        await one.aclose()
        await other.aclose()

    run(main())


async def _in_log(saver: AsyncBufferedSaver, thread_id: str) -> bool:
    buffer = saver.engine.buffer
    return bool(await buffer.log.latest(buffer.subjects.of(thread_id), 1))


def test_what_was_read_is_read_for_as_long_as_postgres_is_away() -> None:
    """Regression: seconds into an outage, reads asked Postgres whether it has all that is below the log's floor."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one, other = await _opened(store, nats), await _opened(store, nats)
        at = await one.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        while not one.engine.buffer.log.floor or await _in_log(one, "t"):
            for n in range(10):
                await one.aput(config(f"other {n}"), checkpoint({}, {}), META, {})
            await asyncio.sleep(10)
        for saver in (one, other):
            assert await _values(saver) == {"a": [1]}
        store.down = True
        for _ in range(4):
            for saver in (one, other):
                assert await _values(saver) == {"a": [1]}
            await asyncio.sleep(4)
        await other.aput(at, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        for saver in (one, other):
            assert await _values(saver) == {"a": [2]}
        store.down = False
        await one.force_flush()
        assert await _values(one) == {"a": [2]}
        await one.aclose()
        await other.aclose()

    run(main())


@pytest.mark.parametrize("proven", [False, True])
def test_in_an_outage_the_log_tells_only_what_it_proves(proven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a node that was cut off showed an older checkpoint than the one that was acknowledged last."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one, other = await _opened(store, nats), await _opened(store, nats, flusher=False)
        at = await one.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await one.aput(at, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        store.down = True
        assert await _values(other) == {"a": [2]}

        async def silent(*_: Any) -> int:
            raise LogUnavailable("no node proves that it leads")

        with monkeypatch.context() as patched:
            if not proven:
                patched.setattr(other.engine.buffer.log, "latest", silent)
            if proven:
                assert await _values(other) == {"a": [2]}
            else:
                with pytest.raises(ReadNotFresh, match="no node proves"):
                    await _values(other)
        store.down = False
        await one.aclose()
        await other.aclose()

    run(main())


@pytest.mark.parametrize("written_since", [False, True])
def test_a_thread_that_was_read_is_never_assumed_to_be_new(written_since: bool) -> None:
    """Nor is a thread assumed to be new when a caller names a checkpoint of it, as a DeltaChannel's history does."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one, other = await _opened(store, nats, new_threads="assume"), await _opened(store, nats)
        first = await other.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        second = await other.aput(first, checkpoint({"a": "2"}, {}), META, {"a": "2"})
        await other.force_flush()
        await _values(one)
        if written_since:
            await other.aput(second, checkpoint({"a": "3"}, {}), META, {"a": "3"})
        for n in range(10):  # the entry at a partition's cursor is not purged
            await other.aput(config(f"other {n}"), checkpoint({}, {}), META, {})
        assert await one.aget_tuple(config("looked at")) is None
        await asyncio.sleep(600)
        if not written_since:
            await _values(one)
        assert not await one.engine.buffer.log.latest(one.engine.buffer.subjects.of("t"), 1)
        store.down = True
        if written_since:
            with pytest.raises(StoreUnavailable):
                await _values(one)
        else:
            assert await _values(one) == {}
        with pytest.raises(StoreUnavailable):
            await one.aget_delta_channel_history(config=config("t"), channels=["a"])
        with pytest.raises(StoreUnavailable):
            await one.aget_tuple(first)
        if written_since:
            for at in (first, config("t")):  # behind what it has read, and as if the thread were new
                with pytest.raises(StoreUnavailable):
                    await one.aput(at, checkpoint({"a": "4"}, {"a": [4]}), META, {"a": "4"})
        with pytest.raises(StoreUnavailable):  # a checkpoint with a parent is not the first
            await one.aput(config("never", "1"), checkpoint({"a": "4"}, {"a": [4]}), META, {"a": "4"})
        assert await one.aget_tuple(config("never read")) is None
        assert await one.aget_tuple(config("looked at")) is None
        store.down = False
        await one.aclose()
        await other.aclose()

    run(main())


def test_a_thread_that_was_read_and_is_not_remembered_is_not_assumed_to_be_new_either() -> None:
    """The thread's rows were evicted for those of others, or never had room."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one, other = await _opened(store, nats, new_threads="assume"), await _opened(store, nats)
        await other.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await other.force_flush()
        await _values(one)
        one.engine.of("t")._reads._cache.forget("t")
        for n in range(10):  # the entry at a partition's cursor is not purged
            await other.aput(config(f"other {n}"), checkpoint({}, {}), META, {})
        await asyncio.sleep(600)
        store.down = True
        with pytest.raises(StoreUnavailable):
            await _values(one)
        store.down = False
        await one.aclose()
        await other.aclose()

    run(main())


@pytest.mark.parametrize("deleted", [False, True])
def test_a_thread_that_this_process_has_written_is_not_assumed_to_be_new(deleted: bool) -> None:
    """Regression: its next turn began without the history, if the log had forgotten the thread."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        saver = await _opened(store, nats, new_threads="assume")
        await saver.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        if deleted:
            await saver.adelete_thread("t")
        for n in range(10):  # the entry at a partition's cursor is not purged
            await saver.aput(config(f"other {n}"), checkpoint({}, {}), META, {})
        await asyncio.sleep(600)
        assert not await _in_log(saver, "t")
        store.down = True
        if deleted:
            assert await _values(saver) is None
        else:
            with pytest.raises((StoreUnavailable, ReadNotFresh)):
                await _values(saver)
        # It knows its own last entry, and writes behind it.
        await saver.aput(config("t"), checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        store.down = False
        await saver.force_flush()
        found = [item.checkpoint["channel_values"] async for item in saver.alist(config("t"))]
        assert found == [{"a": [2]}, *([] if deleted else [{"a": [1]}])]
        await saver.aclose()

    run(main())


def test_a_read_of_a_new_thread_finds_its_first_checkpoint_that_comes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a subgraph could not be read while its root's first checkpoint was on its way."""

    async def main() -> None:
        store = Store()
        saver = await _opened(store, MemoryNats(), new_threads="assume")
        store.down = True
        assert await saver.aget_tuple(config("another")) is None  # now it knows that Postgres is away
        reads = saver.engine.of("t")._reads
        read, looks = reads.checkpoint, 0

        async def meanwhile(*asked: Any) -> Any:
            nonlocal looks
            looks += 1
            if looks > 1:
                return await read(*asked)
            await saver.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
            raise StoreUnavailable("the log had nothing")

        monkeypatch.setattr(reads, "checkpoint", meanwhile)
        assert await _values(saver) == {"a": [1]}
        assert looks == 2
        store.down = False
        await saver.aclose()

    run(main())


def test_a_thread_that_was_assumed_to_be_new_is_not_read_without_values_that_it_names() -> None:
    """A value that came with an earlier checkpoint is in Postgres only."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one, other = await _opened(store, nats, new_threads="assume"), await _opened(store, nats)
        value = {"a": ["x"]}
        await other.aput(config("t"), checkpoint({"a": "1"}, value), META, {"a": "1"})
        await other.force_flush()
        for n in range(10):  # the entry at a partition's cursor is not purged
            await other.aput(config(f"other {n}"), checkpoint({}, {}), META, {})
        await asyncio.sleep(600)
        store.down = True
        assert await one.aget_tuple(config("never read")) is None  # now it knows that Postgres is away
        # A checkpoint with a parent is refused; this one names the value all the same.
        await one.aput(config("t"), checkpoint({"a": "1", "b": "2"}, {**value, "b": [2]}), META, {"b": "2"})
        for saver in (one, other):
            with pytest.raises(StoreUnavailable):
                await _values(saver)
        store.down = False
        await asyncio.sleep(60)
        assert await _values(one) == {**value, "b": [2]}
        await one.aclose()
        await other.aclose()

    run(main())


def test_in_an_outage_a_checkpoint_without_a_parent_is_not_taken_for_the_newest() -> None:
    """Regression: a newer one was only in Postgres, and a run went on from the older one until Postgres was back."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one = await _opened(store, nats)
        newer, older = checkpoint({"a": "9"}, {"a": [9]}, "9"), checkpoint({"a": "5"}, {"a": [5]}, "5")
        await one.aput(config("t"), newer, META, {"a": "9"})
        await one.force_flush()
        while await _in_log(one, "t"):
            for n in range(10):
                await one.aput(config(f"other {n}"), checkpoint({}, {}), META, {})
            await asyncio.sleep(10)
        await one.aput(config("t"), older, META, {"a": "5"})
        await one.force_flush()
        other = await _opened(store, nats)
        store.down = True
        with pytest.raises((StoreUnavailable, ReadNotFresh)):
            await _values(other)
        store.down = False
        assert await _values(one) == {"a": [9]}
        await one.aclose()
        await other.aclose()

    run(main())


def test_in_an_outage_many_outdated_reads_do_not_hide_the_newest_checkpoint() -> None:
    """Regression: each of four tries forgot one of them, and the caller was told that a flush had interrupted it."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one, other = await _opened(store, nats), await _opened(store, nats, flusher=False)
        at: Any = config("t")

        async def put(n: int) -> None:
            nonlocal at
            new = {"a": str(n)} | ({"b": "0"} if not n else {})  # only Postgres knows `b` in the end
            at = await one.aput(at, checkpoint({"a": str(n), "b": "0"}, {"a": [n], "b": ["b"]}), META, new)
            await one.force_flush()

        for n in range(10):
            await put(n)
            assert await other.aget_tuple(at) is not None
        while await _in_log(one, "t"):
            for n in range(10):
                await one.aput(config(f"other {n}"), checkpoint({}, {}), META, {})
            await asyncio.sleep(10)
        for n in range(10, 13):
            await put(n)
        assert await _values(other) == {"a": [12], "b": ["b"]}
        await put(13)
        store.down = True
        assert await _values(other) == {"a": [13], "b": ["b"]}
        store.down = False
        await one.aclose()
        await other.aclose()

    run(main())


@pytest.mark.long
@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("writer", ["nobody", "another", *seldom("this process", "another, which was read")])
def test_nothing_is_written_behind_what_was_read_before_others_went_on(writer: str, followed: bool) -> None:
    """The log no longer shows their entries: a process knows of them only if it has seen all of the log since."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one, other = await _opened(store, nats, flusher=followed), await _opened(store, nats)

        async def purged() -> None:
            for n in range(40):
                await other.aput(config(f"other {n % 4}"), checkpoint({}, {}), META, {})
                await asyncio.sleep(15)
                if followed:
                    await one.engine.buffer.log.latest(one.engine.buffer.subjects.of("else"), 1)
            subject = one.engine.buffer.subjects.of("t")
            assert not await one.engine.buffer.log.latest(subject, 1)
            assert not one.engine.buffer.log.known_head(subject)

        at = await other.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await purged()
        assert await one.aget_tuple(at) is not None
        assert await _values(one) == {"a": [1]}
        if writer != "nobody":
            saver = one if writer == "this process" else other
            at = await saver.aput(at, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        if writer == "another, which was read":
            await other.force_flush()
            assert await _values(one) == {"a": [2]}
        await purged()
        store.down = True
        if writer == "nobody" and followed:
            assert await _values(one) == {"a": [1]}
        save = one.aput(at, checkpoint({"a": "3"}, {"a": [3]}), META, {"a": "3"})
        if refused := writer == "another" or not followed:
            with pytest.raises(StoreUnavailable, match="away"):
                await save
        else:
            await save
        store.down = False
        await asyncio.sleep(60)
        assert await _values(one) == {"a": [3 if not refused else 1 if writer == "nobody" else 2]}
        assert await one.engine.buffer.quarantine.page(after=0, limit=1) == []
        await one.aclose()
        await other.aclose()

    run(main())


@pytest.mark.parametrize("history", ["all", "latest"])
def test_what_a_process_carries_is_what_it_has_read(history: Any) -> None:
    """Regression: a process that lacks a class carried what it had made of the value, under the value's version."""

    class Lacks(JsonPlusSerializer):
        def loads_typed(self, data: tuple[str, bytes]) -> Any:
            return ["not", "the", "value"] if data[0] == "msgpack" else super().loads_typed(data)

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        store.history = history
        one = await _opened(store, nats)
        other = await AsyncBufferedSaver.open(store, nats=nats, config=CONFIG, serde=Lacks())
        values: Any = {"a": {"the": "value"}, "b": 1}
        at = await one.aput(config("t"), checkpoint({"a": "1", "b": "1"}, values), META, {"a": "1", "b": "1"})
        await one.force_flush()
        found = await other.aget_tuple(config("t"))
        assert found is not None
        assert found.checkpoint["channel_values"]["a"] == ["not", "the", "value"]
        lane, puts = other.engine.of("t"), list[Any]()
        append = lane.append

        async def appended(thread_id: str, operation: Any, **options: Any) -> Any:
            puts.append(operation)
            return await append(thread_id, operation, **options)

        lane.append = appended  # type: ignore[method-assign]
        goes_on: Any = found.checkpoint["channel_values"] | {"b": 2}
        await other.aput(at, checkpoint({"a": "1", "b": "2"}, goes_on), META, {"b": "2"})
        (carried,) = [blob for blob in puts[0].blobs if blob.channel == "a"]
        assert JsonPlusSerializer().loads_typed((carried.type, carried.blob)) == {"the": "value"}
        await one.aclose()
        await other.aclose()

    run(main())


@pytest.mark.parametrize(("size", "first"), [(1000, {"a", "b"}), (1 << 20, {"b"})])
def test_the_first_checkpoint_behind_a_read_carries_values_that_are_not_too_large(size: int, first: set[str]) -> None:
    """Another process can then read the thread from the log alone while Postgres is away."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        one, other = await _opened(store, nats), await _opened(store, nats)
        values: Any = {"a": [bytes(size)], "b": [1]}
        at = await one.aput(config("t"), checkpoint({"a": "1", "b": "1"}, values), META, {"a": "1", "b": "1"})
        carried: list[set[str]] = []
        append = other.engine.of("t").append

        async def appended(thread_id: str, operation: Any, **options: Any) -> Any:
            carried.append({blob.channel for blob in operation.blobs})
            return await append(thread_id, operation, **options)

        other.engine.of("t").append = appended  # type: ignore[method-assign]
        for version in ("2", "3"):
            at = await other.aput(at, checkpoint({"a": "1", "b": version}, values), META, {"b": version})
        assert carried == [first, {"b"}]
        await one.aclose()
        await other.aclose()

    run(main())


@pytest.mark.parametrize("history", ["run", "latest"])
def test_a_checkpoint_that_is_overtaken_is_saved_as_it_was_given(history: History) -> None:
    """Another worker deletes the thread, and the caller changes the objects that it gave while the call waits."""

    async def main() -> None:
        store, nats = Store(), MemoryNats()
        store.history = history
        one, other = await _opened(store, nats), await _opened(store, nats)
        values: Any = {"a": ["as given"], "b": ["as given"]}
        at = await one.aput(config("t"), checkpoint({"a": "1", "b": "1"}, values), META, {"a": "1", "b": "1"})
        at = await one.aput(at, checkpoint({"a": "2", "b": "1"}, values), META, {"a": "2"})
        await other.adelete_thread("t")
        saving = asyncio.create_task(one.aput(at, checkpoint({"a": "3", "b": "1"}, values), META, {"a": "3"}))
        await asyncio.sleep(0)
        values["a"][0] = "changed"
        await saving
        assert await _values(other) == {"a": ["as given"], "b": ["as given"]}
        await one.aclose()
        await other.aclose()

    run(main())


def test_the_cache_holds_no_more_bytes_than_it_may() -> None:
    cache = ReadCache(10_000)
    for n in range(100):
        tables = Tables()
        tables.add(blobs=[BlobRow("", "a", "1", "bytes", bytes(1000))])
        cache.put(f"t{n % 20}", ("", None if n % 2 else str(n)), Part(Watermark(flushed_seq=n), tables), 0.0)
        assert sum(read.size for thread in cache._threads.values() for read in thread.reads.values()) == cache._bytes
        assert cache._bytes <= 10_000
    assert cache.get("t19", ("", None)) is not None
    assert cache.get("t0", ("", None)) is None
    assert cache.oldest("nothing") is None
    cache.forget_read_at("t19", 99)
    assert cache.get("t19", ("", None)) is None


def test_what_was_read_is_the_last_until_others_write_or_the_log_forgets_who_did() -> None:
    cache, never = ReadCache(1 << 30), float("inf")

    def read(thread_id: str, position: int) -> None:
        cache.put(thread_id, ("", str(position)), Part(Watermark(flushed_seq=position), Tables()), 1.0)

    read("t", 3)
    read("t", 5)
    assert cache.is_last("t", 5, 0, never) and cache.is_last("t", 5, 5, never)
    assert not cache.is_last("t", 5, 6, 0.0)
    assert not cache.is_last("t", 4, 0, 0.0)  # nothing was read there
    cache.let_go(lambda _: 5)
    assert cache.is_last("t", 5, 0, never) and not cache.is_last("t", 3, 0, never)
    assert cache.is_last("t", 3, 0, 0.0)  # read so lately that the log would show any later entry
    cache.let_go(None)
    assert not cache.is_last("t", 5, 0, never)
    read("t", 5)
    assert cache.is_last("t", 5, 0, never)
    for n in range(_FOLLOWED_MAX):  # as many threads as are followed
        read(str(n), 1)
    cache.let_go(lambda _: 0)
    assert cache.is_last("0", 1, 0, never) and not cache.is_last("t", 5, 0, never)


def test_the_cache_keeps_no_rows_with_the_namespaces_of_an_earlier_read() -> None:
    """Only a thread's first read has its namespaces; rows of that read would be held, and not counted."""
    cache = ReadCache(10_000)
    for n in range(100):
        tables = Tables()
        tables.add(blobs=[BlobRow("", "a", "1", "bytes", bytes(5000))])
        cache.put(f"t{n}", ("", None), Part(Watermark(flushed_seq=1), tables, frozenset({""})), 0.0)
        cache.put(f"t{n}", ("", None), Part(Watermark(flushed_seq=2), Tables()), 0.0)
        assert cache.knows_namespaces(f"t{n}")
        held = sum(read.part.tables.size for thread in cache._threads.values() for read in thread.reads.values())
        assert held <= cache._bytes <= 10_000
    cache.forget_read_at("t99", 2)
    assert not cache.knows_namespaces("t99")
    assert sum(read.size for thread in cache._threads.values() for read in thread.reads.values()) == cache._bytes


def test_the_ancestors_writes_are_those_of_their_own_namespace_and_of_the_channels_asked_for() -> None:
    """An app may give checkpoints of two namespaces the same id."""
    tables, walk = Tables(), Walk("", "1", ["a"])
    tables.add([CheckpointRow("", "1", None, b'{"v":4}', b"{}")])
    tables.add(writes=[WriteRow(ns, "1", "task", 0, "a", "msgpack", b"", "") for ns in ("", "inner")])
    tables.add(writes=[WriteRow("", "1", "task", 1, "b", "msgpack", b"", "")])
    walk.on(tables)
    assert {channel: [write.key for write in writes] for channel, writes in walk.writes.items()} == {
        "a": [("", "1", "task", 0)]
    }
