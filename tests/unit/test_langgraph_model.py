"""Any sequence of calls on two savers, with flushes, crashes and outages between them, reads as on InMemorySaver.

In memory and in virtual time. A call may fail only while the store is away, and then it has done nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver

from bufstore import BufferConfig, LogConfig, ReadNotFresh, StoreUnavailable
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore
from bufstore.memory import MemoryNats
from langgraph_savers import META, checkpoint, config
from thorough import examples
from unit.fake_log import run

THREADS, NAMESPACES = ("t", "u"), ("", "child:1")

_thread, _ns, _saver, _which = (
    st.sampled_from(THREADS),
    st.sampled_from(NAMESPACES),
    st.integers(0, 1),
    st.none() | st.integers(0, 5),
)
_changed = st.sets(st.sampled_from("abc"), max_size=2)
_put = st.tuples(st.just("put"), _saver, _thread, _ns, _which, _changed, st.booleans())
_writes = st.tuples(st.just("writes"), _saver, _thread, _ns, _which, st.sampled_from("xyz"), st.booleans())
_get = st.tuples(st.just("get"), _saver, _thread, _ns, _which)
_step = st.one_of(
    _put,
    _put,
    _put,
    _writes,
    _get,
    st.tuples(st.just("delete"), _saver, _thread),
    st.tuples(st.just("list"), _saver, st.none() | _thread),
    st.tuples(st.just("flush"), _saver),
    st.tuples(st.just("flush"), _saver),
    st.tuples(st.just("crash"), _saver),
    st.sampled_from([("down",), ("up",), ("down",)]),
)


class _Away:
    """Passes calls on to a part of the store, unless the store is away."""

    def __init__(self, inner: Any, weather: Weather) -> None:
        self._inner, self._weather = inner, weather

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in ("open", "aclose") or not inspect.iscoroutinefunction(found):
            return _Away(found, self._weather) if name in ("parked", "waiting") else found

        async def call(*arguments: Any, **options: Any) -> Any:
            if self._weather.down:
                raise StoreUnavailable("it is away")
            return await found(*arguments, **options)

        return call


class Weather:
    """Whether the store is away."""

    down = False


class World:
    """Two savers on one log and one store, and the oracle that they are compared with."""

    def __init__(self, lanes: int = 1) -> None:
        log = LogConfig(partitions=2, lanes=lanes)
        self.config = BufferConfig(log=log, flush_interval_s=0.5, lease_s=4)
        self.weather, self.nats, self.tables = Weather(), MemoryNats(), MemoryCheckpointStore()
        self.oracle = InMemorySaver()
        self.savers: list[AsyncBufferedSaver] = []
        #: The checkpoints of each thread and namespace, with versions and values.
        self.saved: dict[tuple[str, str], list[tuple[str, dict[str, Any], dict[str, Any]]]] = {}
        self.count = 0

    def store(self) -> Any:
        away = _Away(self.tables, self.weather)
        away.__dict__["of_lane"] = self._of_lane
        return away

    def _of_lane(self, log: LogConfig) -> Any:
        tables = self.tables.of_lane(log)
        ledger, backing = tables.behind(self.config)
        away = _Away(tables, self.weather)
        behind = (_Away(ledger, self.weather), type(backing)(backing.kind, away))
        away.__dict__["behind"] = lambda _: behind
        return away

    async def opened(self) -> AsyncBufferedSaver:
        return await AsyncBufferedSaver.open(self.store(), nats=self.nats, config=self.config)

    async def run(self, steps: list[Any]) -> None:
        self.savers = [await self.opened() for _ in range(2)]
        try:
            for name, *arguments in steps:
                await getattr(self, f"_{name}")(*arguments)
            await self._up()
            for saver in self.savers:
                await saver.force_flush()
                for thread_id in THREADS:
                    await self._compare_all(saver, thread_id)
            for buffer in self.savers[0].engine.lanes.all:
                assert (await buffer.verify()).ok
        finally:
            self.weather.down = False
            for saver in self.savers:
                await saver.aclose()

    async def _attempt(self, call: Callable[[BaseCheckpointSaver[str]], Any], saver: int) -> bool:
        """Make the call on the saver and, if it succeeds, on the oracle."""
        try:
            await call(self.savers[saver])
        except StoreUnavailable:
            assert self.weather.down
            return False
        await call(self.oracle)
        return True

    def _base(self, thread_id: str, ns: str, which: int | None) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
        saved = self.saved.get((thread_id, ns))
        return saved[-1 if which is None else which % len(saved)] if saved else (None, {}, {})

    async def _put(
        self, saver: int, thread_id: str, ns: str, which: int | None, changed: set[str], early: bool
    ) -> None:
        parent, versions, values = self._base(thread_id, ns, which)
        self.count += 1
        new = dict.fromkeys(changed, f"{self.count:032}.0")
        versions = {**versions, **new}
        # One channel with a blob, one with its value in the row, and one that is emptied every other time.
        made = {"a": [self.count], "b": self.count, "c": {"n": self.count}}
        values = {**values, **{c: made[c] for c in changed if c != "c" or self.count % 2}}
        values = {c: v for c, v in values.items() if c != "c" or c not in changed or self.count % 2}
        put = checkpoint(versions, values)
        metadata: Any = {"source": "loop", "step": self.count, "parents": {}}
        at = config(thread_id, put["id"], ns)
        if early and not await self._attempt(lambda s: s.aput_writes(at, [("a", self.count)], "early", "p"), saver):
            return
        if await self._attempt(lambda s: s.aput(config(thread_id, parent, ns), put, metadata, new), saver):
            self.saved.setdefault((thread_id, ns), []).append((put["id"], versions, values))
            await self._get(1 - saver, thread_id, ns, None)

    async def _writes(self, saver: int, thread_id: str, ns: str, which: int | None, task: str, special: bool) -> None:
        id_, _, _ = self._base(thread_id, ns, which)
        if id_ is None:
            return
        self.count += 1
        written: list[tuple[str, Any]] = [("a", self.count), ("b", None)]
        if special:
            written = [("__interrupt__", self.count), ("__error__", "e")]
        path = {"x": "3", "y": "2", "z": "1"}[task]
        if await self._attempt(lambda s: s.aput_writes(config(thread_id, id_, ns), written, task, path), saver):
            await self._get(1 - saver, thread_id, ns, which)

    async def _delete(self, saver: int, thread_id: str) -> None:
        if await self._attempt(lambda s: s.adelete_thread(thread_id), saver):
            for ns in NAMESPACES:
                self.saved.pop((thread_id, ns), None)

    async def _get(self, saver: int, thread_id: str, ns: str, which: int | None) -> None:
        id_ = self._base(thread_id, ns, which)[0] if which is not None else None
        wanted = await self.oracle.aget_tuple(config(thread_id, id_, ns))
        try:
            found = await self.savers[saver].aget_tuple(config(thread_id, id_, ns))
        except (StoreUnavailable, ReadNotFresh):
            assert self.weather.down
            return
        assert _shown(found) == _shown(wanted)

    async def _list(self, saver: int, thread_id: str | None) -> None:
        if not self.weather.down:
            for each in THREADS if thread_id is None else (thread_id,):
                await self._compare_all(self.savers[saver], each)

    async def _compare_all(self, saver: AsyncBufferedSaver, thread_id: str) -> None:
        named: Any = {"configurable": {"thread_id": thread_id}}
        wanted = [_shown(item) async for item in self.oracle.alist(named)]
        found = [_shown(item) async for item in saver.alist(named)]
        assert sorted(found, key=repr) == sorted(wanted, key=repr)
        ids = [item[0] for item in found if item is not None]
        assert ids == sorted(ids, reverse=True)

    async def _flush(self, saver: int) -> None:
        if not self.weather.down:
            await self.savers[saver].force_flush()

    async def _crash(self, saver: int) -> None:
        # A crash does not drain as a close does: acknowledged entries are in the log, and nowhere else.
        for buffer in self.savers[saver].engine.lanes.all:
            await buffer.release()
        with contextlib.suppress(StoreUnavailable):
            self.savers[saver] = await self.opened()

    async def _down(self) -> None:
        self.weather.down = True

    async def _up(self) -> None:
        self.weather.down = False


def _shown(found: CheckpointTuple | None) -> Any:
    if found is None:
        return None
    named = found.config["configurable"]
    return (
        named["checkpoint_id"],
        named["checkpoint_ns"],
        dict(found.checkpoint),
        found.metadata,
        found.parent_config and found.parent_config["configurable"],
        found.pending_writes,
    )


@examples(60)
@given(st.sampled_from([1, 2]), st.lists(_step, min_size=6, max_size=30))
def test_it_reads_as_in_memory(lanes: int, steps: list[Any]) -> None:
    run(World(lanes).run(steps))


@pytest.mark.parametrize("store_away", [False, True])
def test_the_model_reaches_what_it_is_about(store_away: bool) -> None:
    """The model has puts, reads by the other instance, a fork and a crash; and some reads in an outage succeed."""
    world = World()

    async def main() -> None:
        put = ("put", 0, "t", "", None, {"a", "c"}, True)
        steps: list[Any] = [put, put, ("flush", 0), ("get", 1, "t", "", None), ("crash", 0), put]
        if store_away:
            steps += [("down",), ("put", 1, "t", "child:1", None, {"b"}, False), ("get", 1, "t", "", None)]
        await world.run(steps)
        assert len(world.saved["t", ""]) == 3
        assert ("t", "child:1") in world.saved or not store_away

    run(main())


@pytest.mark.parametrize("how", ["copied", "clock behind", "goes on"])
def test_in_an_outage_the_log_tells_the_newest_checkpoint_or_nothing(how: str) -> None:
    """Regression: a copied checkpoint, older than what the log no longer has, was the newest, and runs began there."""

    async def main() -> None:
        world = World()
        log = LogConfig(partitions=1, failover_window_s=20.0)
        world.config = replace(world.config, log=log, retain_after_flush_s=20.0)
        saver = await world.opened()
        source = checkpoint({"a": "1"}, {"a": ["of the source"]})
        await saver.aput(config("source"), source, META, {"a": "1"})
        newest = checkpoint({"a": "2"}, {"a": ["newest"]}, "f" * 36 if how == "clock behind" else None)
        at = await saver.aput(config("t"), newest, META, {"a": "2"})
        await saver.force_flush()
        for n in range(4):
            await saver.aput(config("other"), checkpoint({"a": str(n)}, {"a": [n]}), META, {"a": str(n)})
            await saver.force_flush()
            await asyncio.sleep(60)
        if how == "copied":
            await saver.acopy_thread("source", "t")
        else:
            await saver.aput(at, checkpoint({"a": "3"}, {"a": ["behind it"]}), META, {"a": "3"})
        await saver.force_flush()
        other = await world.opened()
        world.weather.down = True
        await asyncio.sleep(3)
        if how == "goes on":
            found = await other.aget_tuple(config("t"))
            assert found is not None
            assert found.checkpoint["channel_values"] == {"a": ["behind it"]}
        else:
            with pytest.raises(StoreUnavailable):
                await other.aget_tuple(config("t"))
        world.weather.down = False
        await asyncio.sleep(10)
        found = await other.aget_tuple(config("t"))
        assert found is not None
        assert found.checkpoint["channel_values"] == {"a": ["behind it" if how == "goes on" else "newest"]}
        for each in (saver, other):
            await each.aclose()

    run(main())
