"""The first write of a thread needs no look-up for a moment after a read has found the thread nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import pytest

from bufstore import elapsed
from bufstore.buffer.append import tip_finder
from bufstore.buffer.entry import StoredEntry
from unit.group_server import SUBJECTS
from unit.write_world import Instance, World, test


def test_what_was_found_nowhere_is_new_for_once() -> None:
    async def main(_: World, one: Instance) -> None:
        finder = one.appender._finder
        await finder._seen_lately()
        finder.found_nowhere("t", elapsed.now_s())
        assert finder.as_new("t") is not None
        assert finder.as_new("t") is None

    test(main)


def test_nothing_is_new_when_the_end_of_the_log_was_seen_long_ago() -> None:
    """Entries that were written above it since may have been purged."""

    async def main(_: World, one: Instance) -> None:
        finder = one.appender._finder
        finder.found_nowhere("never", elapsed.now_s())
        await finder._seen_lately()
        await asyncio.sleep(finder._seen_for_s + 1)
        finder.found_nowhere("t", elapsed.now_s())
        assert [finder.as_new(t) for t in ("never", "t")] == [None, None]

    test(main)


def test_nothing_is_new_once_the_log_has_begun_anew() -> None:
    async def main(_: World, one: Instance) -> None:
        finder = one.appender._finder
        await finder._seen_lately()
        finder.found_nowhere("t", elapsed.now_s())
        one.appender._let_go(everything=True)
        assert finder.as_new("t") is None

    test(main)


def test_reads_of_ever_more_threads_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tip_finder, "_NEW_MAX", 2)

    async def main(_: World, one: Instance) -> None:
        finder = one.appender._finder
        await finder._seen_lately()
        for t in ("a", "b", "c"):
            finder.found_nowhere(t, elapsed.now_s())
        assert [finder.as_new(t) is not None for t in ("a", "b", "c")] == [False, True, True]

    test(main)


def test_a_thread_of_which_only_quarantine_has_something_is_not_new() -> None:
    """What its first write is would be passed over: the watermark says that there was something before."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["parked"])
        (entry,) = world.tail("t")
        assert isinstance(entry, StoredEntry)
        await world.flush("t", poison=frozenset({entry.entry.id}))
        world.log.intrude(SUBJECTS.of("elsewhere"))
        world.log.expire_below(world.log.last_seq)
        two = Instance(world)

        async def held(_: Sequence[str]) -> Collection[str]:
            return ()

        two.appender._finder._held = held
        await two.appender.learn_new(["t", "new"])
        await asyncio.gather(two.checkpoint(["whole"]), two.checkpoint(["new"], "new"))
        for thread_id, messages in (("t", ["whole"]), ("new", ["new"])):
            await world.flush(thread_id)
            assert await world.messages(thread_id) == messages

    test(main)
