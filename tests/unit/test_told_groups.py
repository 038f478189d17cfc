"""Writers of the same threads tell each other what they wrote, and need not read it."""

from __future__ import annotations

import asyncio
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.groups.group import hash_of
from bufstore.buffer.groups.others import _HAS_STORED, _HAS_STORED_WHOLE, _STORED, _WISHES
from bufstore.buffer.groups.sequencer import _SHARED_S
from bufstore.jetstream.messages import Conflict
from unit.fake_log import run
from unit.test_group_sequencer import SUBJECTS, Process, World, started
from unit.test_last_seen import tell_words, two_writers, wrote

#: Virtual time after which all writers have heard.
_HEARD_S = 0.1


async def _overtaken(one: Process, two: Process) -> None:
    """Let both find that the other one writes to thread "s", too."""
    for process in (one, two):
        assert isinstance(await wrote(process, "s", 0 if process is one else 1), int | Conflict)
        assert isinstance(await wrote(process, "s", 1), Conflict)
    await asyncio.sleep(_HEARD_S)


def _told(process: Process, world: World) -> list[bytes]:
    """The bodies of others' groups in the process's memory."""
    mine = {w.group.seq for w in process.written}
    kept = process.tail._kept
    assert all(world_body(world, seq) == body for seq, (_, body) in kept.items())
    return [body for seq, (_, body) in kept.items() if seq not in mine]


def world_body(world: World, seq: int) -> bytes:
    """The body of a group in the log."""
    return next(m.body for m in world.stream.messages if m.seq == seq)


def test_who_was_overtaken_is_told_what_was_written() -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        two.tail._kept.clear()
        await _overtaken(one, two)
        before = len(_told(two, world))

        async def read(*_: object, **__: object) -> object:
            raise AssertionError("nothing need be read")

        two.log.part = read  # type: ignore[method-assign,assignment]
        at = one.heads.head(hash_of("s"))
        for _ in range(3):
            written = await wrote(one, "s", at)
            assert isinstance(written, int)
            at = written
        await asyncio.sleep(_HEARD_S)
        assert len(_told(two, world)) == before + 3

    two_writers(main)


def test_who_writes_to_threads_of_its_own_is_told_no_more_than_where_they_stand() -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        two.tail._kept.clear()
        for _ in range(3):
            assert isinstance(await wrote(one), int)
        await asyncio.sleep(_HEARD_S)
        assert not _told(two, world)
        assert two.heads.seen == one.heads.seen

    two_writers(main)


def test_who_was_not_overtaken_for_a_while_tells_no_content_any_more() -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        await _overtaken(one, two)
        assert one.sequencer._are_shared()
        for _ in range(4):  # both go on writing, and listening
            assert isinstance(await wrote(one), int)
            assert isinstance(await wrote(two), int)
            await asyncio.sleep(_SHARED_S / 3)
        two.tail._kept.clear()
        assert isinstance(await wrote(one, "s", one.heads.head(hash_of("s"))), int)
        await asyncio.sleep(_HEARD_S)
        assert not _told(two, world)
        assert two.heads.seen == one.heads.seen

    two_writers(main)


HEADS = st.builds(
    _STORED.pack,
    st.sampled_from((_WISHES, _HAS_STORED, _HAS_STORED_WHOLE, 3)),
    *(st.integers(0, 2**32 - 1) for _ in range(3)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 40) | st.integers(0, 2**32 - 1),
)


@given(st.builds(bytes.__add__, HEADS, st.binary(max_size=60)) | st.binary(max_size=60))
def test_whatever_is_told_raises_nothing_and_is_not_taken_for_a_group(words: bytes) -> None:
    async def main() -> None:
        world = World(random.Random(1))
        (one,) = await started(world)
        one.sequencer._others._heard(words)
        assert not one.heads.seen
        assert not one.tail._kept
        await one.sequencer.aclose()

    run(main())


@pytest.mark.parametrize("size", [0, 1, 2**32 - 1])
def test_a_body_of_another_length_than_was_told_is_not_one(size: int) -> None:
    async def main(world: World, one: Process, two: Process) -> None:
        await _overtaken(one, two)
        two.tail._kept.clear()
        words: list[bytes] = []
        tell = one.log.tell

        async def told(subject: str, what: bytes) -> None:
            if subject == SUBJECTS.writers and what[0] == _HAS_STORED_WHOLE:
                words.append(what)
                return
            await tell(subject, what)

        one.log.tell = told  # type: ignore[method-assign]
        assert isinstance(await wrote(one, "s", one.heads.head(hash_of("s"))), int)
        await asyncio.sleep(_HEARD_S)
        at = _STORED.size - struct.calcsize(">I")
        wrong = words[-1][:at] + struct.pack(">I", size) + words[-1][at + 4 :]
        await tell_words(two, wrong)
        assert not _told(two, world)

    two_writers(main)
