"""How much of a thread's history is written, and what may be deleted of it: in memory and in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import BufferConfig, ConfigError, LogConfig, ThreadQuarantined
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.operate.replay import Outcome
from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.errors import ConcurrentWriter
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore, PostgresCheckpointStore, memory_store
from bufstore.langgraph import engine as engine_of
from bufstore.langgraph.folded import Folded
from bufstore.langgraph.history import thin
from bufstore.langgraph.model import BlobKey, BlobRow, CheckpointRow, Put
from bufstore.langgraph.outlines import all_but_latest, drop_of, outline_of, within
from bufstore.langgraph.payload import encode_payload
from bufstore.langgraph.protocol import Outline
from bufstore.memory import MemoryNats
from langgraph_savers import META, checkpoint, config
from thorough import examples
from unit.fake_log import run

CONFIG = BufferConfig(log=LogConfig(partitions=2), flush_interval_s=3600.0, lease_s=4)
HERE: Any = {"configurable": {"thread_id": "t"}}


async def opened(history: Any = "all", nats: MemoryNats | None = None) -> AsyncBufferedSaver:
    return await AsyncBufferedSaver.open(
        MemoryCheckpointStore(history=history), nats=nats or MemoryNats(), config=CONFIG
    )


async def listed(saver: AsyncBufferedSaver, thread_id: str = "t") -> list[Any]:
    return [item async for item in saver.alist({"configurable": {"thread_id": thread_id}})]


async def put(saver: AsyncBufferedSaver, at: Any, n: int, days_ago: int = 0, **metadata: Any) -> Any:
    """Save a step that changes one of two channels."""
    found = await saver.aget_tuple(at)
    before: dict[str, Any] = dict(found.checkpoint) if found is not None else {}
    new = {"ab"[n % 2]: f"{n:032}"}
    versions = {**before.get("channel_versions", {}), **new}
    values = {**before.get("channel_values", {}), "ab"[n % 2]: [n]}
    made = checkpoint(versions, values)
    made["ts"] = (datetime.now(UTC) - timedelta(days=days_ago)).isoformat()
    return await saver.aput(at, made, {"source": "loop", "step": n, "parents": {}, **metadata}, new)


steps = st.lists(
    st.tuples(st.sampled_from("12"), st.sampled_from(["loop", "input"]), st.booleans(), st.booleans(), st.booleans()),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("history", ["run", "latest"])
@examples(30)
@given(steps)
def test_what_is_left_out_is_not_missed(history: str, wanted: list[Any]) -> None:
    async def main() -> None:
        saver, all_ = await opened(history), await opened()
        for each in (saver, all_):
            at: Any = config("t")
            for n, (run_id, source, interrupted, flushed, reread) in enumerate(wanted):
                at = await put(each, at, n, source=source, run_id=run_id)
                await each.aput_writes(at, [("a", n)], "task")
                if interrupted:
                    await each.aput_writes(at, [("__interrupt__", n)], "task")
                if flushed:
                    await each.force_flush()
                if reread:  # as a new run does
                    at = (await each.aget_tuple(config("t"))).config  # type: ignore[union-attr]
            await each.force_flush()
        kept, everything = await listed(saver), await listed(all_)
        by_step = {item.metadata["step"]: item for item in everything}
        steps_kept = [item.metadata["step"] for item in kept]
        assert steps_kept[0] == len(wanted) - 1
        for item, older in zip(kept, [*kept[1:], None], strict=True):
            same = by_step[item.metadata["step"]]
            assert item.checkpoint["channel_values"] == same.checkpoint["channel_values"]
            assert item.pending_writes == same.pending_writes
            assert item.parent_config == (older.config if older is not None else None)
        if history == "run":
            stay = {n for n, (_, source, interrupted, _, _) in enumerate(wanted) if interrupted or source == "input"}
            assert stay <= set(steps_kept)
        else:
            assert len(kept) == sum(flushed for *_, flushed, _ in wanted[:-1]) + 1
        for each in (saver, all_):
            await each.aclose()

    run(main())


def test_a_thread_with_a_delta_channel_keeps_its_history() -> None:
    async def main() -> None:
        saver = await opened("latest")
        at: Any = config("t")
        for n in range(4):
            at = await put(saver, at, n, counters_since_delta_snapshot={"a": [n, n]})
        await saver.force_flush()
        assert len(await listed(saver)) == 4
        with pytest.raises(NotImplementedError, match="DeltaChannel"):
            await saver.aprune(["t"])
        assert await saver.aprune_idle(timedelta(days=-1)) == []
        await saver.aclose()

    run(main())


@pytest.mark.parametrize("ahead", ["this machine", "the store"])
def test_a_clock_that_is_ahead_makes_no_thread_idle(monkeypatch: pytest.MonkeyPatch, ahead: str) -> None:
    class Years(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(days=2000)

    async def main() -> None:
        saver = await opened()
        await put(saver, config("live"), 0)
        with monkeypatch.context() as patched:
            patched.setattr(engine_of if ahead == "this machine" else memory_store, "datetime", Years)
            assert await saver.aprune_idle(timedelta(days=1), strategy="delete") == []
        assert len(await listed(saver, "live")) == 1
        await saver.aclose()

    run(main())


def test_a_copied_thread_keeps_its_history() -> None:
    async def main() -> None:
        saver = await opened("latest")
        at: Any = config("t")
        for n in range(4):
            at = await put(saver, at, n)
            await saver.force_flush()
        await saver.acopy_thread("t", "copy")
        assert len(await listed(saver, "copy")) == 4
        await saver.aclose()

    run(main())


def test_a_fork_takes_the_values_along_that_its_base_may_lose() -> None:
    async def main() -> None:
        saver = await opened("latest")
        one = await put(saver, config("t"), 0)
        await put(saver, one, 1)
        base = await saver.aget_tuple(one)
        assert base is not None
        await saver.force_flush()
        assert await saver.aget_tuple(one) is None
        versions = {**base.checkpoint["channel_versions"], "b": "9"}
        made = checkpoint(versions, {**base.checkpoint["channel_values"], "b": [9]})
        fork = await saver.aput(one, made, {"source": "loop", "step": 9, "parents": {}}, {"b": "9"})
        await saver.force_flush()
        assert (await saver.aget_tuple(fork)).checkpoint["channel_values"] == {"a": [0], "b": [9]}  # type: ignore[union-attr]
        await saver.aclose()

    run(main())


@pytest.mark.parametrize("history", ["run", "latest"])
def test_what_was_put_last_keeps_its_values_though_it_is_not_the_newest(history: str) -> None:
    """Regression: of two workers, one lost the values of its own last step, if that was put after a newer one."""

    async def main() -> None:
        nats, store = MemoryNats(), MemoryCheckpointStore(history=history)  # type: ignore[arg-type]
        saver = await AsyncBufferedSaver.open(store, nats=nats, config=CONFIG)
        first = await saver.aput(
            config("t"), checkpoint({"a": "1", "b": "1"}, {"a": [1], "b": [1]}), META, {"a": "1", "b": "1"}
        )
        await saver.force_flush()
        mine = checkpoint({"a": "2.mine", "b": "1"}, {"a": [2], "b": [1]})
        theirs = checkpoint({"a": "2.theirs", "b": "1"}, {"a": [3], "b": [1]})
        assert mine["id"] < theirs["id"]
        await saver.aput(first, theirs, META, {"a": "2.theirs"})
        at = await saver.aput(first, mine, META, {"a": "2.mine"})
        await saver.force_flush()
        last = checkpoint({"a": "2.mine", "b": "3"}, {"a": [2], "b": [3]})
        await saver.aput(at, last, META, {"b": "3"})
        await saver.force_flush()
        found = await saver.aget_tuple(config("t"))
        assert found is not None
        assert (found.checkpoint["id"], found.checkpoint["channel_values"]) == (last["id"], {"a": [2], "b": [3]})
        await saver.aclose()

    run(main())


@pytest.mark.parametrize("between", ["a copy", "the same again"])
@pytest.mark.parametrize("history", ["run", "latest"])
def test_what_was_put_last_keeps_its_values_whatever_stands_beside_it(history: str, between: str) -> None:
    """Regression: a flush left its values out, and the next checkpoint, which did not bring them again, lacked them."""

    async def main() -> None:
        store = MemoryCheckpointStore(history=history)  # type: ignore[arg-type]
        saver = await AsyncBufferedSaver.open(store, nats=MemoryNats(), config=CONFIG)
        await saver.aput(config("source"), checkpoint({"a": "9"}, {"a": [9]}, "2a"), META, {"a": "9"})
        await saver.force_flush()
        mine = checkpoint({"a": "1"}, {"a": [1]}, "1a")
        at = await saver.aput(config("t"), mine, META, {"a": "1"})
        if between == "a copy":
            await saver.acopy_thread("source", "t")
        else:
            await saver.aput(at, checkpoint({"a": "2"}, {"a": [2]}, "1b"), META, {"a": "2"})
            await saver.aput(config("t"), mine, META, {"a": "1"})
        await saver.force_flush()
        await saver.aput(at, checkpoint({"a": "1", "b": "1"}, {"a": [1], "b": [1]}, "3c"), META, {"b": "1"})
        await saver.force_flush()
        found = await saver.aget_tuple(config("t"))
        assert found is not None
        assert found.checkpoint["channel_values"] == {"a": [1], "b": [1]}
        await saver.aclose()

    run(main())


def test_a_drop_that_is_too_large_for_an_entry_is_made_in_parts() -> None:
    """Regression: the thread was never pruned, nor were idle threads behind it."""

    async def main() -> None:
        config_ = replace(CONFIG, log=replace(CONFIG.log, max_entry_bytes=4 << 10))
        store = MemoryCheckpointStore()
        saver = await AsyncBufferedSaver.open(store, nats=MemoryNats(), config=config_)
        at: Any = config("t")
        for n in range(120):
            version = f"{n:032}"
            # One channel changes with every checkpoint, the other one with every tenth.
            values, new = {"a": [n], "b": [n // 10]}, {"a": version} | ({"b": version} if n % 10 == 0 else {})
            versions = {"a": version, "b": f"{n // 10 * 10:032}"}
            at = await saver.aput(at, checkpoint(versions, values), META, new)
        before = await saver.aget_tuple(config("t"))
        await saver.aprune(["t"])
        assert await saver.aget_tuple(config("t")) == before._replace(parent_config=None)  # type: ignore[union-attr]
        await saver.force_flush()
        tables = store._threads["t"]
        assert (len(tables.checkpoints), len(tables.blobs)) == (1, 2)
        await saver.aclose()

    run(main())


@given(st.data())
def test_the_parts_of_a_drop_are_the_drop(data: st.DataObject) -> None:
    ids = [f"{n:03}" for n in range(data.draw(st.integers(1, 30)))]
    blobs = st.frozensets(st.tuples(st.just(""), st.sampled_from("abc"), st.sampled_from("123")))
    there = {i: Outline("", i, None, data.draw(blobs), None, False, False, "") for i in ids}
    gone = data.draw(st.sets(st.sampled_from(ids), min_size=1))
    whole = drop_of([there[i] for i in gone], list(there.values()))
    assert whole is not None
    bytes_max, freed = data.draw(st.integers(20, 400)), set[BlobKey]()
    while drop := drop_of([o for i, o in there.items() if i in gone], list(there.values())):
        part = within(drop, list(there.values()), bytes_max)
        assert len(encode_payload(part)) <= bytes_max or len(part.checkpoints) == 1
        assert part.checkpoints
        for _, i in part.checkpoints:
            del there[i]
        freed |= set(part.blobs)
        assert not freed & {key for o in there.values() for key in o.blobs}
    assert sorted(freed) == whole.blobs


def test_where_a_run_ended_is_kept_though_no_run_says_its_id() -> None:
    """Regression: LangGraph gives no run_id of its own, so that all runs of a flush counted as one."""
    made = [("a", None, "input"), ("b", "a", "loop"), ("c", "b", "loop"), ("d", "c", "input"), ("e", "d", "loop")]
    rows = [CheckpointRow("", i, p, b'{"v":4}', b'{"source":"%s"}' % s.encode()) for i, p, s in made]
    folded = Folded("t", map(Put, rows))
    thin(folded, "run")
    assert [(row.id, row.parent) for row in folded.rows.checkpoints.values()] == [
        ("a", None), ("c", "a"), ("d", "c"), ("e", "d"),
    ]  # fmt: skip


def test_a_circle_of_parents_ends() -> None:
    rows = [CheckpointRow("", i, p, b'{"v":4}', b"{}") for i, p in (("a", "b"), ("b", "a"), ("c", "b"))]
    folded = Folded("t", map(Put, rows))
    thin(folded, "latest")
    assert [row.id for row in folded.rows.checkpoints.values()] == ["c"]
    assert folded.rows.checkpoints["", "c"].parent is None


def _three(*metadata: bytes) -> Folded:
    """Three checkpoints of one flush, each on the one before; the second and third name the same value."""
    puts = [
        Put(CheckpointRow("", i, parent, b'{"v":4,"channel_versions":{"a":"%d"}}' % version, about), blobs)
        for i, parent, version, blobs, about in (
            ("1", None, 1, [BlobRow("", "a", "1", "msgpack", b"one")], metadata[0]),
            ("2", "1", 2, [BlobRow("", "a", "2", "msgpack", b"two")], metadata[1]),
            ("3", "2", 2, [], metadata[2]),
        )
    ]
    return Folded("t", puts)


@pytest.mark.parametrize("history", ["latest", "run"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_checkpoint_with_a_delta_channel_keeps_the_history_of_all(history: Any, which: int) -> None:
    """The values of the others may stand in it, whether they say so or not."""
    metadata = [b"{}", b"{}", b"{}"]
    metadata[which] = b'{"counters_since_delta_snapshot":{"a":[1,1]}}'
    folded = _three(*metadata)
    thin(folded, history)
    assert [row.id for row in folded.rows.checkpoints.values()] == ["1", "2", "3"]
    assert len(folded.rows.blobs) == 2


def test_values_go_with_the_last_checkpoint_that_names_them() -> None:
    everything, newest = _three(b"{}", b"{}", b"{}"), _three(b"{}", b"{}", b"{}")
    thin(everything, "all")
    assert (len(everything.rows.checkpoints), len(everything.rows.blobs)) == (3, 2)
    thin(newest, "latest")
    assert [row.id for row in newest.rows.checkpoints.values()] == ["3"]
    assert [blob.blob for blob in newest.rows.blobs.values()] == [b"two"]


def test_a_mode_that_there_is_not_is_refused() -> None:
    for make in (MemoryCheckpointStore, lambda **mode: PostgresCheckpointStore("", **mode)):
        with pytest.raises(ConfigError, match="history"):
            make(history="none")


@pytest.mark.parametrize("flushed", [1, 2])
def test_a_thread_with_checkpoints_in_quarantine_is_not_pruned(flushed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with one flushed checkpoint, a prune did nothing and said so of a thread that had three.

    With any number, a prune of idle threads with the strategy "delete" deleted what was acknowledged a moment ago.
    """

    async def refused(*_: Any) -> None:
        raise FlushFailed("a trigger refuses it", Verdict.POISON)

    async def main() -> None:
        saver = await opened()
        at: Any = config("t")
        for n in range(flushed):
            at = await put(saver, at, n, days_ago=2)
        await saver.force_flush()
        with monkeypatch.context() as patch:
            patch.setattr(MemoryCheckpointStore, "apply", refused)
            for n in range(flushed, 4):
                at = await saver.aput(at, checkpoint({"a": f"{n:032}"}, {"a": [n]}), META, {"a": f"{n:032}"})
            await saver.force_flush()
        assert await saver.engine.buffer.quarantine.count() == 4 - flushed
        with pytest.raises(ThreadQuarantined):
            await saver.aprune(["t"])
        for strategy in ("keep_latest", "delete"):
            assert await saver.aprune_idle(timedelta(days=1), strategy=strategy) == []
        outcomes = [outcome.outcome for outcome in await saver.engine.buffer.quarantine.replay_thread("t")]
        assert outcomes == [Outcome.APPLIED] * (4 - flushed)
        assert len(await listed(saver)) == 4
        await saver.aclose()

    run(main())


def test_a_thread_that_goes_into_quarantine_meanwhile_is_not_deleted_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: Any) -> None:
        raise FlushFailed("a trigger refuses it", Verdict.POISON)

    async def main() -> None:
        saver = await opened()
        at = await put(saver, config("t"), 0, days_ago=60)
        await saver.force_flush()
        store = saver.engine._store
        outlines = store.outlines

        async def meanwhile(thread_id: str) -> Any:
            monkeypatch.setattr(MemoryCheckpointStore, "apply", refused)
            await put(saver, at, 1)
            await saver.force_flush()
            return await outlines(thread_id)

        store.outlines = meanwhile  # type: ignore[method-assign]
        assert await saver.aprune_idle(timedelta(days=30), strategy="delete") == []
        monkeypatch.undo()
        assert [o.outcome for o in await saver.engine.buffer.quarantine.replay_thread("t")] == [Outcome.APPLIED]
        assert len(await listed(saver)) == 2
        await saver.aclose()

    run(main())


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_a_prune_is_decided_on_the_checkpoints_that_it_deletes(idle: bool, delta: bool) -> None:
    """Regression: what came after the first look was pruned, with history that holds the values of a DeltaChannel."""

    async def main() -> None:
        saver = await opened()
        at: Any = config("t")
        for n in range(2):
            at = await put(saver, at, n, days_ago=60)
        await saver.force_flush()
        store, looks = saver.engine._store, 0
        outlines = store.outlines

        async def meanwhile(thread_id: str) -> Any:
            nonlocal at, looks
            found = await outlines(thread_id)
            looks += 1
            if looks == 1:
                new: dict[str, Any] = {"counters_since_delta_snapshot": {"a": [1, 1]}} if delta else {}
                at = await put(saver, at, 2, **new)
            return found

        store.outlines = meanwhile  # type: ignore[method-assign]
        if idle:
            assert await saver.aprune_idle(timedelta(days=30)) == []
        elif delta:
            with pytest.raises(NotImplementedError, match="DeltaChannel"):
                await saver.aprune(["t"])
        else:
            await saver.aprune(["t"])
        assert len(await listed(saver)) == (3 if idle or delta else 1)
        await saver.aclose()

    run(main())


@pytest.mark.parametrize("meanwhile", ["deleted", "forgotten"])
def test_a_copy_whose_target_is_deleted_meanwhile_does_not_go_on(meanwhile: str) -> None:
    """Regression: the older checkpoints were written all the same, and the newest of these was the thread's newest."""

    async def main() -> None:
        saver = await opened()
        at: Any = config("source")
        for n in range(4):
            new = {"a": f"{n:032}"}
            at = await saver.aput(at, checkpoint(new, {"a": [n, "x" * 3_000_000]}), META, new)
        lane = saver.engine.of("target")
        append = lane.append

        async def interrupted(thread_id: str, operation: Any, **options: Any) -> Any:
            receipt = await append(thread_id, operation, **options)
            lane.append = append  # type: ignore[method-assign]
            if meanwhile == "deleted":
                await saver.adelete_thread("target")
            else:
                lane.buffer.appender.forget("target")
            return receipt

        lane.append = interrupted  # type: ignore[method-assign]
        if meanwhile == "deleted":
            with pytest.raises(ConcurrentWriter):
                await saver.acopy_thread("source", "target")
            assert await listed(saver, "target") == []
        await saver.acopy_thread("source", "target")
        assert len(await listed(saver, "target")) == 4
        await saver.aclose()

    run(main())


def test_an_erasure_leaves_what_is_saved_meanwhile() -> None:
    """Regression: entries in quarantine were discarded; and a deletion behind the log's last group took all else."""

    async def refused(*_: Any) -> None:
        raise FlushFailed("a trigger refuses it", Verdict.POISON)

    async def main() -> None:
        saver = await opened()
        await put(saver, config("t"), 0)
        buffer = saver.engine.buffer
        remains = buffer.log.remains

        async def meanwhile(below: Any) -> Any:
            found = await remains(below)
            await put(saver, config("t"), 1)
            return found._replace(ends_log=True)

        buffer.log.remains = meanwhile  # type: ignore[method-assign]
        await saver.aerase_thread("t")
        buffer.log.remains = remains  # type: ignore[method-assign]
        assert len(await listed(saver)) == 1
        await saver.adelete_thread("t")
        with pytest.MonkeyPatch.context() as patch:
            erasing = asyncio.create_task(saver.aerase_thread("t"))
            await asyncio.sleep(5)
            patch.setattr(MemoryCheckpointStore, "apply", refused)
            await put(saver, config("t"), 2)
            await saver.force_flush()
        await erasing
        assert [o.outcome for o in await buffer.quarantine.replay_thread("t")] == [Outcome.APPLIED]
        assert len(await listed(saver)) == 1
        await saver.aclose()

    run(main())


def test_an_erasure_whose_deletion_is_refused_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: Any) -> None:
        raise FlushFailed("a foreign key refuses it", Verdict.POISON)

    async def main() -> None:
        saver = await opened()
        await put(saver, config("t"), 0)
        await saver.force_flush()
        with monkeypatch.context() as patch:
            patch.setattr(MemoryCheckpointStore, "apply", refused)
            with pytest.raises(ThreadQuarantined):
                await saver.aerase_thread("t")
        await saver.engine.buffer.quarantine.replay_thread("t")
        await saver.aerase_thread("t")
        assert await listed(saver) == []
        await saver.aclose()

    run(main())


def test_idle_threads_are_pruned_or_deleted() -> None:
    async def main() -> None:
        saver = await opened()
        for thread_id in ("old", "busy", "new"):
            at: Any = config(thread_id)
            for n in range(3):
                at = await put(saver, at, n, days_ago=0 if thread_id == "new" else 2)
        made, cut = ("old", "busy", "new"), timedelta(days=1)
        assert await saver.aprune_idle(timedelta(days=3)) == []
        assert await saver.aprune_idle(cut) == ["busy", "old"]
        assert {t: len(await listed(saver, t)) for t in made} == {"old": 1, "busy": 1, "new": 3}
        engine = saver.engine
        idle = engine._store.idle

        async def meanwhile(before: str) -> list[str]:
            found = await idle(before)
            await put(saver, config("busy"), 7)
            return found

        engine._store.idle = meanwhile  # type: ignore[method-assign]
        assert await saver.aprune_idle(cut, strategy="delete") == ["old"]
        assert {t: len(await listed(saver, t)) for t in made} == {"old": 0, "busy": 2, "new": 3}
        with pytest.raises(ValueError, match="strategy"):
            await saver.aprune_idle(cut, strategy="none")
        await saver.aclose()

    run(main())


def test_an_erased_thread_leaves_nothing_in_the_log() -> None:
    async def main() -> None:
        nats = MemoryNats()
        saver = await opened(nats=nats)
        secret = b"a secret of somebody"
        at = config("t")
        made = checkpoint({"a": "1"}, {"a": [secret]})
        await saver.aput(at, made, {"source": "loop", "step": 1, "parents": {}}, {"a": "1"})
        (stream,) = nats.streams.values()
        assert any(secret in message.body for message in stream.messages)
        began = asyncio.get_running_loop().time()
        await saver.aerase_thread("t")
        assert asyncio.get_running_loop().time() - began >= CONFIG.log.failover_window_s
        assert not any(secret in message.body for message in stream.messages)
        assert await saver.aget_tuple(at) is None
        await saver.aerase_thread("t")
        await saver.aclose()

    run(main())


def _outline(ns: str, id_: str, root: str | None = None) -> Outline:
    return Outline(ns, id_, parent=None, blobs=frozenset(), root=root, delta=False, needs_parent=False, ts="")


@pytest.mark.parametrize("written", [True, False])
def test_a_prune_takes_the_calls_of_subgraphs_that_are_over(written: bool) -> None:
    """Regression: where history is left out, the checkpoint that a call started from is mostly not written."""
    outlines = [
        _outline("", "5"),
        *([_outline("", "2")] if written else []),
        _outline("child:over", "3", root="2"),
        _outline("child:goes on", "6", root="5"),
        _outline("child:of a newer one", "8", root="7"),
        _outline("child:alone", "3"),
        _outline("keeps state", "3", root="2"),
    ]
    drop = all_but_latest(outlines)
    assert drop is not None and drop.namespaces == ["child:over"]
    assert drop.checkpoints == ([("", "2")] if written else [])
    assert all_but_latest([o for o in outlines if o.ns]) is None, "without a root nothing says that it is over"


def test_a_drop_of_many_calls_is_made_in_parts_too() -> None:
    outlines = [_outline("", "2"), *(_outline(f"child:{n:02}", "1", root="1") for n in range(40))]
    gone: list[str] = []
    while drop := all_but_latest([o for o in outlines if o.ns not in gone]):
        part = within(drop, outlines, 200)
        assert len(encode_payload(part)) <= 200
        gone += part.namespaces
    assert gone == [f"child:{n:02}" for n in range(40)]


def test_what_an_old_checkpoint_takes_from_its_parent_is_kept_with_it() -> None:
    outlines = [
        msgspec.structs.replace(_outline("", id_), parent=parent)
        for id_, parent in (("1", None), ("2", "1"), ("3", "2"))
    ]
    drop = all_but_latest(outlines)
    assert drop is not None and drop.checkpoints == [("", "1"), ("", "2")]
    outlines[2] = msgspec.structs.replace(outlines[2], needs_parent=True)
    drop = all_but_latest(outlines)
    assert drop is not None and drop.checkpoints == [("", "1")]


@pytest.mark.parametrize(
    ("value", "metadata", "there", "delta"),
    [
        (b"true", b"{}", True, True),
        (b"true", b"{}", False, False),
        (b"[true]", b"{}", True, False),
        (b"null", b'{"counters_since_delta_snapshot":{}}', False, True),
        (b"null", b'{"delta_writes_versioned":true}', False, True),
        (b"null", b"{}", True, False),
    ],
)
def test_a_delta_channel_is_known_by_its_snapshot_or_by_what_is_counted(
    value: bytes, metadata: bytes, there: bool, delta: bool
) -> None:
    row = CheckpointRow(
        "", "1", None, b'{"v":4,"channel_values":{"a":%s},"channel_versions":{"a":1}}' % value, metadata
    )
    assert outline_of(row, [("", "a", "1")] if there else [], parent_sends=False).delta is delta


def test_an_outline_says_what_stands_in_the_row_and_leaves_out_what_cannot_be_meant() -> None:
    stored = b'{"v":%d,"ts":%s,"channel_versions":{"a":1}}'
    row = CheckpointRow("n:1", "2", "1", stored % (1, b'"2026"'), b'{"parents":{"":"r"}}')
    blobs = frozenset({("n:1", "a", "1")})
    expected = Outline("n:1", "2", "1", blobs, root="r", delta=False, needs_parent=True, ts="2026")
    assert outline_of(row, (), parent_sends=True) == expected
    assert not outline_of(row, (), parent_sends=False).needs_parent
    for parents in (b'{"":7}', b'["r"]'):
        odd = CheckpointRow("n:1", "2", "1", stored % (4, b"7"), b'{"parents":%s}' % parents)
        expected = Outline("n:1", "2", "1", blobs, root=None, delta=False, needs_parent=False, ts="")
        assert outline_of(odd, (), parent_sends=True) == expected
