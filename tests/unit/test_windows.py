"""The windows that flushers and writers of a log agree on stay safe in any change, whoever has not read it yet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import (
    BufferConfig,
    BufferedThreadStore,
    ConfigDrift,
    ConfigError,
    LogConfig,
    MemoryThreadStore,
    NoLog,
    Windows,
    change_log,
)
from bufstore.buffer.places import group_of
from bufstore.buffer.target import Target
from bufstore.memory import MemoryNats
from bufstore.nats.finding import log_config
from bufstore.nats.setup import metadata_of, windows_of, with_windows
from helpers import fresh, run_of
from unit.fake_log import run

TARGET = Target("threads", "app", "x")
AT_REST = Windows(failover_window_s=60.0, archive=False)
CHANGES = st.tuples(
    st.none() | st.floats(0.1, 1e6), st.none() | st.booleans(), st.sampled_from(("change", "settle", "back"))
)


@given(st.lists(st.tuples(CHANGES, st.lists(st.booleans(), min_size=4, max_size=4)), max_size=12))
def test_no_flusher_keeps_less_than_any_writer_relies_on(steps: list[tuple[Any, list[bool]]]) -> None:
    """Processes read the log's settings at any time; a change is settled only when all have read it."""
    says = AT_REST
    flushers, writers = [says, says], [says, says]
    for (window_s, archive, step), who_reads in steps:
        if step == "settle" and says.changing:
            flushers, writers = [says, says], [says, says]
            says = says.settled()
        elif step == "back":
            says = says.changed(says.failover_window_s, says.archive)
            assert not says.changing
        else:
            says = says.changed(window_s, archive)
        flushers = [says if read else before for read, before in zip(who_reads[:2], flushers, strict=True)]
        writers = [says if read else before for read, before in zip(who_reads[2:], writers, strict=True)]
        assert min(f.keep_s for f in flushers) >= max(w.rely_s for w in writers)
        # Once archiving is on and is no longer being changed, writers rely on it.
        if says.archive:
            assert all(f.archives for f in flushers)


def test_a_change_is_open_for_both_configurations_until_it_is_settled() -> None:
    def may_open(windows: Windows, **config: Any) -> bool:
        try:
            windows.check(LogConfig(**config))
        except ConfigDrift:
            return False
        return True

    changing = AT_REST.changed(failover_window_s=30.0)
    assert changing.changed(archive=True).settled() == Windows(failover_window_s=30.0, archive=True)
    settled = changing.settled()
    opens = [[may_open(w, failover_window_s=s) for s in (60.0, 30.0, 45.0)] for w in (AT_REST, changing, settled)]
    assert opens == [[True, False, False], [True, True, False], [False, True, False]]
    assert (changing.keep_s, changing.rely_s) == (60.0, 30.0)
    with pytest.raises(ConfigError, match="no change"):
        settled.settled()
    for impossible in (0.0, -1.0, float("inf"), float("nan"), 1e300, 30 * 86_400 + 1):
        with pytest.raises(ConfigError, match="positive"):
            AT_REST.changed(failover_window_s=impossible)
        with pytest.raises(ConfigError, match=r"LogConfig\.failover_window_s must be positive"):
            LogConfig(failover_window_s=impossible)
    assert AT_REST.changed(failover_window_s=LogConfig(failover_window_s=30 * 86_400).failover_window_s).changing


@pytest.mark.parametrize("after_s", [60.0, 30 * 86_400.0])
def test_a_log_of_before_with_a_longer_window_than_there_may_be_is_kept_so_and_opens_with_the_longest(
    after_s: float,
) -> None:
    longest, config = 30 * 86_400.0, LogConfig(failover_window_s=30 * 86_400.0)
    before = Windows(failover_window_s=1.5 * longest, archive=False)
    assert (before.keep_s, before.rely_s) == (1.5 * longest, longest)
    raised = Windows(failover_window_s=60.0, archive=False, next_failover_window_s=1.5 * longest, next_archive=False)
    changing = before.changed(failover_window_s=after_s)
    assert (changing.keep_s, changing.rely_s) == (1.5 * longest, after_s)
    for windows in (before, raised, raised.settled(), before.changed(archive=True), changing):
        windows.check(config)
    with pytest.raises(ConfigDrift, match=rf"Set LogConfig\.failover_window_s to {longest}"):
        before.check(LogConfig())
    assert changing.changed(failover_window_s=before.failover_window_s) == before  # the change is undone
    assert changing.settled().keep_s == after_s
    found = {"name": "L", "subjects": ["l.groups.0"], "max_bytes": 1 << 30, "num_replicas": 1}
    said = with_windows(metadata_of(LogConfig(), 0, TARGET), before)
    assert log_config(found | {"metadata": said}).failover_window_s == longest


@given(st.floats(0.001, 2e6), st.none() | st.tuples(st.floats(0.001, 2e6), st.booleans()))
def test_a_log_says_exactly_what_it_was_told(window_s: float, next_: tuple[float, bool] | None) -> None:
    windows = Windows(failover_window_s=window_s, archive=True)
    if next_ is not None:
        windows = windows.changed(*next_)
    said = with_windows(metadata_of(LogConfig(), 3, TARGET) | {"somebody's": "own"}, windows)
    assert windows_of(said) == windows
    assert said["somebody's"] == "own"


@pytest.mark.parametrize("name", ["failover_window_s", "next_failover_window_s"])
@pytest.mark.parametrize("seconds", ["NaN", "0", "-1", "Infinity"])
def test_a_window_that_is_no_time_is_damage(name: str, seconds: str) -> None:
    said = metadata_of(LogConfig(), 0, TARGET) | {f"bufstore.{name}": seconds}
    with pytest.raises(ConfigDrift, match="metadata"):
        log_config({"name": "L", "subjects": ["l.groups.0"], "max_bytes": 1 << 30, "num_replicas": 1, "metadata": said})


def test_who_is_configured_otherwise_than_the_log_is_refused() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()

        async def opened(**log: Any) -> None:
            config = BufferConfig.fitting(LogConfig(**log), lease_s=4)
            await (await BufferedThreadStore.open(inner, nats=nats, config=config)).aclose()

        with pytest.raises(NoLog):
            await change_log(nats=nats, archive=True)
        await opened()
        for field, value in (("failover_window_s", 30.0), ("archive", True), ("bucket", "another")):
            with pytest.raises(ConfigDrift, match=field):
                await opened(**{field: value})
        await change_log(nats=nats, failover_window_s=30.0)
        await opened(failover_window_s=30.0)
        with pytest.raises(ConfigError, match=r"append_timeout_s \(25 s\) must be at most half"):
            config = BufferConfig(append_timeout_s=25.0)  # fits the old window, but not the new one
            await BufferedThreadStore.open(inner, nats=nats, config=config)
        refused: list[dict[str, Any]] = [{"settle": True, "archive": True}, {"archive": 1}]
        for wrong in refused:
            with pytest.raises(ConfigError, match=r"takes no setting|must be a bool"):
                await change_log(nats=nats, **wrong)
        await change_log(nats=nats, settle=True)
        assert await change_log(nats=nats) == Windows(failover_window_s=30.0, archive=False)
        with pytest.raises(ConfigDrift, match="bufstore log set"):
            await opened()

    run(main())


@pytest.mark.parametrize("change", [{"failover_window_s": 300.0}, {"archive": True}])
def test_a_running_flusher_keeps_what_the_log_says_by_then(change: dict[str, Any]) -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        config = BufferConfig(log=LogConfig(failover_window_s=20.0), retain_after_flush_s=20.0, lease_s=4)
        async with await BufferedThreadStore.open(inner, nats=nats, config=config) as store:
            stream = nats.streams["THREADLOG"]

            async def kept_after_a_minute() -> bool:
                thread_id = fresh()
                first, _ = [await store.checkpoint(thread_id, [n], run_of(thread_id)) for n in range(2)]
                await store.force_flush(thread_id)
                await asyncio.sleep(60)
                return any(m.seq == group_of(first.thread_seq) for m in stream.messages)

            assert not await kept_after_a_minute()
            await change_log(nats=nats, **change)
            assert await kept_after_a_minute()
            await change_log(nats=nats, failover_window_s=20.0, archive=False)
            assert not await kept_after_a_minute()

    run(main())
