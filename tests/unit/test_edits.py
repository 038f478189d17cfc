"""Edits and removals in the log: coalesced, overlaid and flushed, they mean the same as one by one."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.chain import Watermark, plan
from bufstore.buffer.domain import Inapplicable
from bufstore.buffer.entry import Base, Entry, StoredEntry
from bufstore.buffer.read.overlay import overlay
from bufstore.threads.coalesce import coalesce
from bufstore.threads.domain import THREADS
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.model import (
    Run,
    RunStatus,
    ThreadMetadata,
    decode_message,
    encode_messages,
    encode_metadata,
    encode_run,
    encode_value,
)
from bufstore.threads.payload import AnyPayload, Edit, Payload, Removal, decode_payload, encode_payload
from bufstore.threads.queries import RunQuery
from bufstore.threads.state import ThreadState
from bufstore.threads.write import save_of
from thorough import examples
from unit.history import apply

T = "t"
PARENTS = st.sampled_from([None, "p", "q"])
RUNS = st.builds(
    Run,
    run_id=st.sampled_from(["r1", "r2", "r3"]),
    thread_id=st.just(T),
    status=st.sampled_from(RunStatus),
    parent_thread_id=PARENTS,
    steps=st.integers(0, 3),
)
#: How much of the list stays, the new messages, and the kind of entry.
STEPS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.lists(st.integers(0, 5), max_size=3),
        st.one_of(
            st.tuples(st.just("checkpoint"), RUNS),
            st.tuples(st.just("run"), RUNS),
            st.tuples(st.just("metadata"), st.builds(ThreadMetadata, title=PARENTS, resource_id=PARENTS)),
            st.tuples(st.just("state"), st.integers(0, 3)),
            st.tuples(st.just("parent"), PARENTS),
            st.tuples(st.just("removal"), st.none()),
        ),
    ),
    max_size=10,
)


def entries_of(steps: list[Any]) -> list[StoredEntry]:
    entries: list[StoredEntry] = []
    length = 0
    for n, (share, new, (kind, value)) in enumerate(steps, 1):
        keep, messages = round(share * length), encode_messages(new)
        payload: AnyPayload
        match kind:
            case "checkpoint":
                payload = Payload(keep, messages, encode_run(value), save_of(value))
            case "run":
                payload = Edit(keep, messages, run=encode_run(value), run_id=value.run_id)
            case "metadata":
                payload = Edit(keep, messages, metadata=encode_metadata(value))
            case "state":
                payload = Edit(keep, messages, state=encode_value(value, "state"))
            case "parent":
                payload = Edit(keep, messages, parent=(value,))
            case _:
                payload = Removal()
        data = encode_payload(payload)
        assert encode_payload(decode_payload(data)) == data
        length = payload.keep + len(payload.messages)
        entry = Entry(
            id=n,
            prev_id=n - 1,
            base=Base.CHAINED if n > 1 else Base.NONE,
            seen=0,
            version=length,
            self_contained=kind == "removal",
            keys=b"",
            payload=data,
        )
        entries.append(StoredEntry(T, 10 * n, entry))
    return entries


async def content(store: MemoryThreadStore) -> Any:
    return await store.load_checkpoint(T), (await store.query_runs(RunQuery(thread_id=T))).runs


@examples(300)
@given(steps=STEPS, cuts=st.sets(st.integers(0, 10)))
def test_folded_in_any_windows_they_mean_the_same(steps: list[Any], cuts: set[int]) -> None:
    entries = entries_of(steps)

    async def flushed(windows: list[list[StoredEntry]]) -> Any:
        store, watermark = MemoryThreadStore(), Watermark()
        for window in windows:
            # Entries at or below the watermark are delivered again, and change nothing; removals among them neither.
            todo = plan(watermark, [*entries[: len(entries) // 2], *window], complete=True)
            if todo.apply:
                await apply(store, coalesce(T, watermark.version, todo.apply))
            watermark = todo.watermark
        return await content(store)

    bounds = sorted({0, len(entries), *(c for c in cuts if c < len(entries))})
    windows = [entries[a:b] for a, b in itertools.pairwise(bounds)]
    assert asyncio.run(flushed(windows)) == asyncio.run(flushed([[e] for e in entries]))


@examples(300)
@given(steps=STEPS, cut=st.integers(0, 10))
def test_a_read_shows_what_a_flush_will_make(steps: list[Any], cut: int) -> None:
    entries = entries_of(steps)

    async def check() -> None:
        store = MemoryThreadStore()

        async def flush(watermark: Watermark, items: list[StoredEntry]) -> Watermark:
            todo = plan(watermark, items, complete=True)
            if not todo.apply:
                return todo.watermark
            change = coalesce(T, watermark.version, todo.apply)
            await apply(store, change)
            return msgspec.structs.replace(todo.watermark, gone=change.gone)

        watermark = await flush(Watermark(), entries[:cut])
        before = await store.load_checkpoint(T)
        state = ThreadState(
            watermark=watermark,
            thread=before.thread if before else None,
            messages=encode_messages(before.messages) if before else [],
            latest_run=encode_run(before.latest_run) if before and before.latest_run else None,
            state=encode_value(before.state, "state") if before and before.state is not None else None,
        )
        shown = overlay(THREADS, state, T, entries[cut:])
        assert shown.watermark == await flush(watermark, entries[cut:])
        after = await store.load_checkpoint(T)
        assert (shown.thread is None) == (after is None)
        if after is not None:
            assert shown.thread == after.thread
            assert [decode_message(m) for m in shown.messages] == after.messages
            assert shown.latest_run == (encode_run(after.latest_run) if after.latest_run else None)
            assert (decode_message(shown.state) if shown.state is not None else None) == after.state

    asyncio.run(check())


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode(["a kind of a later release", 0, []]),
        msgspec.msgpack.encode(["edit", 0, [], None, "a run's id without the run"]),
        msgspec.msgpack.encode(["edit", 0, [], None, None, b"\xc1 no metadata"]),
        msgspec.msgpack.encode(["removal", 1, []]),
        msgspec.msgpack.encode(["removal", 0, [b"\x01"]]),
    ],
)
def test_what_cannot_be_read_is_poison(payload: bytes) -> None:
    entry = Entry(id=1, prev_id=0, base=Base.NONE, seen=0, version=0, self_contained=False, keys=b"", payload=payload)
    with pytest.raises(Inapplicable):
        coalesce(T, 0, [StoredEntry(T, 1, entry)])
