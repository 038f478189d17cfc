"""What a process knows of a thread without a read is right, or nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import BufferConfig, LogConfig
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore
from bufstore.langgraph.model import CheckpointRow, Delete, Operation, Put, Rows, Tables, WriteRow, Writes, versions_of
from bufstore.langgraph.payload import encode_payload
from bufstore.langgraph.protocol import Part
from bufstore.langgraph.recent import End, Newest, Recent
from bufstore.memory import MemoryNats
from langgraph_savers import META, checkpoint, config
from unit.fake_log import run
from unit.test_langgraph_rows import OPERATIONS

NAMESPACES = ("", "child:1")
CONFIG = BufferConfig(log=LogConfig(partitions=2), flush_interval_s=3600.0, lease_s=4)
PUT = Put(CheckpointRow("", "a", None, b'{"v":4}', b"{}"))


def _shown(tables: Tables, row: CheckpointRow | None) -> Any:
    if row is None:
        return None
    blobs = {key: tables.blobs[key] for key in versions_of(row) if key in tables.blobs}
    return row, blobs, tables.writes_of(row.ns, row.id)


def _read(tables: Tables, ns: str) -> Tables:
    """What a read of a namespace's newest checkpoint asks for."""
    newest, found = tables.latest(ns), Tables()
    if newest is not None:
        found.add([newest], [tables.blobs[key] for key in versions_of(newest) if key in tables.blobs])
    least = newest.id if newest is not None else ""
    found.add(writes=[w for w in tables.writes.values() if w.ns == ns and w.checkpoint_id >= least])
    return found


def _as_graphs_do(operation: Operation) -> Operation:
    """Give each version of a channel one value, as graphs do."""
    match operation:
        case Put(_, blobs, _) | Rows(_, blobs, _):
            same = [msgspec.structs.replace(blob, blob="/".join(blob.key).encode()) for blob in blobs]
            return msgspec.structs.replace(operation, blobs=same)
    return operation


_operations = OPERATIONS.map(_as_graphs_do)
_step = st.one_of(
    _operations.map(lambda operation: ("write", operation)),
    st.sampled_from(NAMESPACES).map(lambda ns: ("read", ns)),
    st.just(("another writes", "")),
)


@given(st.lists(_operations, max_size=4), st.lists(_step, max_size=12))
def test_what_is_known_is_what_a_read_would_show(before: list[Operation], steps: list[tuple[str, Any]]) -> None:
    """`before`: what the thread has at its first read; if nothing, all of it is known."""
    recent, tables, last = Recent(1 << 20), Tables(), 0
    for operation in before:
        tables.apply(operation)
    hits = 0
    for what, of in [("read", ""), *steps]:
        if what == "read":
            found = Newest(End(last, last), _read(tables, of), tables.latest(of))
            recent.read("t", of, found, 0.0, whole=not before and not last)
        elif what == "write":
            tables.apply(of)
            last += 1
            recent.wrote("t", last - 1, End(last, last), of, len(encode_payload(of)))
        else:
            tables.apply(Delete())
            last += 1
        for ns in NAMESPACES:
            known = recent.newest("t", ns, None, 0.0)
            if known is not None and known.end.seq == last:  # otherwise the log's end shows that something is missing
                hits += 1
                assert _shown(known.tables, known.row) == _shown(tables, tables.latest(ns))
                assert recent.newest("t", ns, "nothing like that", 0.0) is None
        assert recent.bytes == sum(thread.size for thread in recent._threads.values())
    assert hits or before


def test_of_a_thread_that_was_read_whole_all_namespaces_are_known() -> None:
    """As of one that only the log has: a read of the graph finds its subgraphs' rows there, too, and asks no more."""
    called = Put(CheckpointRow("child:1", "b", None, b'{"v":4}', b"{}"))
    later = Put(CheckpointRow("child:2", "c", None, b'{"v":4}', b"{}"))
    before = WriteRow("child:2", "c", "task", 0, "a", "msgpack", b"1", "")
    tables = Tables()
    for operation in (PUT, called, Writes([before])):
        tables.apply(operation)
    recent = Recent(1 << 20)
    recent.read("t", "", Newest(End(1, 1), tables, PUT.checkpoint), 0.0, whole=True)
    for ns, row in (("", PUT.checkpoint), ("child:1", called.checkpoint), ("child:2", None), ("child:3", None)):
        known = recent.newest("t", ns, None, 0.0)
        assert known is not None
        assert known.row == row
    recent.wrote("t", 1, End(2, 2), later, 100)
    known = recent.newest("t", "child:2", None, 0.0)
    assert known is not None
    assert known.row == later.checkpoint
    assert known.tables.writes_of("child:2", "c") == [before], "its task may write before the checkpoint is saved"


def test_nothing_is_known_behind_what_another_wrote_or_what_nobody_can_tell() -> None:
    def known(*operations: Operation | None, behind: int = 1, life: bool = False) -> bool:
        recent = Recent(1 << 20)
        recent.read("t", "", Newest(End(1, 1), Tables(), None), 10.0, whole=True)
        if life:
            recent.forget("t")
        for n, operation in enumerate(operations):
            recent.wrote("t", behind + n, End(2 + n, 2 + n), operation, 100)
        return recent.newest("t", "", None, 10.0) is not None

    assert known()
    assert known(PUT, PUT)
    assert known(*[PUT] * 200)
    assert not known(PUT, behind=7)
    assert not known(PUT, Rows())
    assert not known(PUT, None), "what it was is not known any more"
    assert not known(life=True)
    recent = Recent(1 << 20)
    recent.read("t", "", Newest(End(1, 1), Tables(), None), 10.0, whole=False)
    assert recent.newest("t", "", None, 10.1) is None, "the store must have told of it later"
    assert recent.newest("t", "child:1", None, 10.0) is None, "nobody has asked for it"


def test_no_more_bytes_are_held_than_may_be() -> None:
    recent = Recent(20_000)
    for n in range(200):
        thread = f"t{n % 15}"
        recent.read(thread, "", Newest(End(n, n), Tables(), None), 0.0, whole=True)
        recent.wrote(thread, n, End(n + 1, n + 1), Writes([WriteRow("", "a", "t", 0, "x", "b", bytes(900), "")]), 930)
        assert recent.bytes == sum(thread.size for thread in recent._threads.values()) <= 20_000
    assert recent.newest("t5", "", None, 0.0) is None
    recent.forget(None)
    assert recent.bytes == 0


class Counting(MemoryCheckpointStore):
    """A store that counts its reads."""

    asked = 0

    async def latest(self, thread_id: str, ns: str, namespaces_max: int) -> Part:
        self.asked += 1
        return await super().latest(thread_id, ns, namespaces_max)


async def _opened(store: Counting) -> AsyncBufferedSaver:
    """A saver that has seen the log; knowledge from before that does not count."""
    saver = await AsyncBufferedSaver.open(store, nats=MemoryNats(), config=CONFIG)
    await _said(saver, "another")
    store.asked = 0
    return saver


async def _said(saver: AsyncBufferedSaver, thread_id: str, ns: str = "") -> Any:
    found = await saver.aget_tuple(config(thread_id, ns=ns))
    return None if found is None else found.checkpoint["channel_values"]["said"]


async def _say(saver: AsyncBufferedSaver, text: str, ns: str = "") -> Any:
    version = {"said": saver.get_next_version(None, None)}
    return await saver.aput(config("t", ns=ns), checkpoint(version, {"said": [text]}), META, version)


@pytest.mark.parametrize("history", ["all", "latest"])
def test_the_store_is_asked_again_after_a_while_and_where_history_is_left_out(history: Any) -> None:
    async def main() -> None:
        store = Counting(history=history)
        saver = await _opened(store)
        assert await _said(saver, "t") is None
        for n in range(5):
            await _say(saver, f"{n}", "child:1" if n == 3 else "")
            assert await _said(saver, "t") == [f"{n if n != 3 else 2}"]
        assert await _said(saver, "t", "child:1") == ["3"]
        assert store.asked == (1 if history == "all" else 7)
        await asyncio.sleep(61)
        assert await _said(saver, "t") == ["4"]
        assert store.asked == (2 if history == "all" else 8)
        await saver.aclose()

    run(main())


def test_what_was_parked_is_not_known_any_more() -> None:
    """An entry that is parked while it is being read is not known either."""

    async def main() -> None:
        store = Counting()
        saver = await _opened(store)
        assert await _said(saver, "t") is None
        await _say(saver, "hello")
        assert await _said(saver, "t") == ["hello"]
        reads: Any = saver.engine.of("t")._reads
        read = reads._read

        async def parked(*arguments: Any) -> Any:
            found = await read(*arguments)
            await saver.engine.buffer.shared.tell_parked("t")
            return found

        await saver.engine.buffer.shared.tell_parked("t")
        reads._read = parked
        assert await _said(saver, "t") == ["hello"]
        reads._read = read
        for asked in (3, 3):
            assert await _said(saver, "t") == ["hello"]
            assert store.asked == asked
        await saver.aclose()

    run(main())
