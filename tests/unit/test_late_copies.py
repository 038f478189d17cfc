"""A publish whose copy arrives late, after others' entries were flushed and purged.

No copy can land behind others' groups. So no caller may be told that it is stored, and a repeat is written once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import elapsed
from bufstore.buffer import producers, recent_keys
from bufstore.buffer.chain import plan
from bufstore.buffer.entry import Base, Entry, encode
from bufstore.errors import IdempotencyConflict, LogUnavailable, OutcomeUnknown, StoreUnavailable
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.threads.model import Run, decode_message, encode_messages, encode_run
from bufstore.threads.payload import Payload, decode_payload, encode_payload
from bufstore.threads.write import save_of
from bufstore.types import Consistency, Receipt
from thorough import examples, seldom
from unit.fake_log import run
from unit.group_server import SUBJECTS
from unit.write_world import Instance, World, test

#: How the write that is held up is made and repeated: by its token, by a key, with a source's number, in a series.
HOW = ("token", "key", "source", "series")
MARK = producers.item("feed", 7)


async def write(one: Instance, how: str, token: str | None = None, *, whole: bool = False) -> Receipt:
    """The write of these tests: it adds "mine" to the thread, or makes it the thread's only message."""
    if how == "series" and not whole:
        receipts, error = await one.series([(["mine"], "mine", MARK)])
        if error is not None:
            raise error
        return receipts[0]
    mark = MARK if how in ("source", "series") else None
    key = {"key": "k", "token": token}.get(how)
    if whole:
        return await one.checkpoint(["mine"], key=key, run_id="mine", mark=mark)
    return await one.append(["mine"], key=key, run_id="mine", mark=mark)


@contextlib.contextmanager
def nothing_arrives(world: World) -> Iterator[list[Sequence[Outgoing]]]:
    """Let no write arrive or be answered. Yields the writes that were sent."""
    sent: list[Sequence[Outgoing]] = []

    async def send(kind: str, messages: Sequence[Outgoing]) -> int:
        sent.append(messages)
        raise AppendUnknown("no answer")

    world.log._send = send  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        del world.log._send  # type: ignore[method-assign]


async def held_up(world: World, work: Awaitable[Receipt]) -> tuple[str, Callable[[], int]]:
    """Let the call end without an answer. Returns its token, and a function that lets its first copy arrive."""
    with nothing_arrives(world) as sent, pytest.raises(OutcomeUnknown) as unknown:
        await work

    return unknown.value.token, lambda: world.log.store(sent[0])


async def overtaken(world: World, one: Instance, how: str, *, whole: bool, existed: bool = True) -> str:
    """Let a write of `one` come, and be refused, after another's entry was flushed and purged. Returns its token."""
    two = Instance(world)
    if existed:
        await two.checkpoint(["m0"])
        await world.flush_and_purge()
    token, land = await held_up(world, write(one, how, whole=whole))
    await two.append(["theirs"])
    await world.flush_and_purge()
    with pytest.raises(Conflict):
        land()
    return token


async def check_it_is_there_once(world: World) -> None:
    await world.flush()
    assert (await world.messages()).count("mine") == 1
    watermark = await world.ledger.watermark("t")
    assert watermark.broken_since is None
    assert world.ledger.parked.entries == {}
    run = await world.store.load_run("mine")
    assert run is not None


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("other", [False, True], ids=["same process", "other process"])
@pytest.mark.parametrize("whole", [False, True], ids=["append", "checkpoint"])
def test_a_repeat_of_a_write_that_others_overtook_is_written_once(how: str, other: bool, whole: bool) -> None:
    async def main(world: World, one: Instance) -> None:
        token = await overtaken(world, one, how, whole=whole)
        writer = Instance(world) if other else one
        receipt = await write(writer, how, token, whole=whole)
        assert not receipt.repeated, "the first sending was refused"
        again = await write(writer, how, token, whole=whole)
        third = await write(Instance(world), how, token, whole=whole)
        for repeat in (again, third):
            assert (repeat.repeated, repeat.thread_seq) == (True, receipt.thread_seq)
        await check_it_is_there_once(world)
        assert await world.messages() == (["mine"] if whole else ["m0", "theirs", "mine"])

    test(main)


@pytest.mark.parametrize("how", HOW)
def test_a_repeat_on_a_thread_that_another_writer_made_meanwhile_is_written(how: str) -> None:
    async def main(world: World, one: Instance) -> None:
        token = await overtaken(world, one, how, whole=False, existed=False)
        assert not (await write(one, how, token)).repeated
        await check_it_is_there_once(world)
        assert await world.messages() == ["theirs", "mine"]

    test(main)


@pytest.mark.parametrize("how", ["token", "key", "source"])
@pytest.mark.parametrize(("flushed", "existed"), [("", False), ("", True), ("flushed", False), ("purged", True)])
@pytest.mark.parametrize("other", [False, True], ids=["same process", "other process"])
@pytest.mark.parametrize("whole", [False, True], ids=["append", "checkpoint"])
@pytest.mark.parametrize("behind", ["both", *seldom("", "checkpoint")])
def test_a_repeat_of_a_first_entry_that_counts_is_known(
    how: str, flushed: str, other: bool, existed: bool, behind: str, whole: bool
) -> None:
    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        if existed:
            await two.checkpoint(["m0"])
            await world.flush_and_purge()
            two.appender.forget("t")
        token, land = await held_up(world, write(one, how, whole=whole))
        land()
        if behind in ("checkpoint", "both"):
            await two.checkpoint(["mine", "behind it"])
        if behind in ("append", "both"):
            await two.append(["behind it"])
        if flushed == "purged":
            await world.flush_and_purge()
        elif flushed:
            await world.flush()
        if flushed == "purged" and not other:
            one.appender.forget("t")
        receipt = await write(Instance(world) if other else one, how, token, whole=whole)
        assert receipt.repeated
        await check_it_is_there_once(world)

    test(main)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("other", [False, True], ids=["same process", "other process"])
@pytest.mark.parametrize("superseded", [False, True])
def test_without_postgres_nobody_is_told_that_a_first_entry_counts(how: str, other: bool, superseded: bool) -> None:
    async def main(world: World, one: Instance) -> None:
        if superseded:
            token = await overtaken(world, one, how, whole=False)
        else:
            token, land = await held_up(world, write(one, how))
            land()
        world.store_is_up = False
        writer = Instance(world) if other else one
        own = not superseded and not other and how in ("source", "series")
        with contextlib.nullcontext() if own else pytest.raises((OutcomeUnknown, StoreUnavailable)):
            # By now the writer has seen that its entry is at its place.
            assert (await write(writer, how, token)).repeated
        world.store_is_up = True
        assert (await write(writer, how, token)).repeated is not superseded
        await check_it_is_there_once(world)

    test(main)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("flushed", [False, True], ids=["", "flushed"])
@pytest.mark.parametrize("many", [1, 20])
def test_what_others_write_behind_it_does_not_make_it_count(how: str, flushed: bool, many: int) -> None:
    """Others' entries carry the thread's keys and numbers, but must not carry those of a refused entry."""

    async def main(world: World, one: Instance) -> None:
        token = await overtaken(world, one, how, whole=False)
        two = Instance(world)
        for n in range(many):
            await two.checkpoint([f"theirs {n}"])
            two.appender.forget("t")
        if flushed:
            await world.flush()
        if many == 1 or not flushed:
            assert not (await write(Instance(world), how, token)).repeated
            assert (await write(one, how, token)).repeated
            await check_it_is_there_once(world)
        elif how in ("token", "key"):
            # Nobody can tell any more whether it was applied, so no repeat may be told that it was.
            with contextlib.suppress(OutcomeUnknown):
                assert not (await write(one, how, token)).repeated
        else:
            assert not (await write(one, how, token)).repeated

    test(main)


@pytest.mark.parametrize("how", ["token", "key"])
@pytest.mark.parametrize("flushed", [False, True], ids=["", "flushed"])
def test_a_first_entry_that_counts_is_known_to_its_writer_behind_what_others_wrote(how: str, flushed: bool) -> None:
    async def main(world: World, one: Instance) -> None:
        token, land = await held_up(world, write(one, how))
        land()
        two = Instance(world)
        for n in range(20):
            await two.append([n])
        if flushed:
            await world.flush()
        assert (await write(one, how, token)).repeated
        await check_it_is_there_once(world)

    test(main)


def test_other_content_is_no_conflict_with_a_write_that_others_overtook() -> None:
    async def main(world: World, one: Instance) -> None:
        await overtaken(world, one, "key", whole=False)
        await one.append(["something else"], key="k")
        with pytest.raises(IdempotencyConflict):
            await Instance(world).append(["mine"], key="k")
        await world.flush()
        assert await world.messages() == ["m0", "theirs", "something else"]

    test(main)


@pytest.mark.parametrize("next_", ["append", "checkpoint", "keyed"])
@pytest.mark.parametrize("wakes", ["the answer", "another caller"])
def test_nothing_is_built_on_an_entry_whose_answer_came_too_late(next_: str, wakes: str) -> None:
    """The entry's own writer must not take it for the thread's last: what builds on it would be parked for good."""

    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await two.checkpoint(["m0"])
        await world.flush_and_purge()
        send = world.log._send
        gate = asyncio.Event()

        async def slow(kind: str, messages: Sequence[Outgoing]) -> int:
            await gate.wait()
            return await send(kind, messages)

        world.log._send = slow  # type: ignore[method-assign]
        late = asyncio.ensure_future(one.append(["mine"]))
        await asyncio.sleep(world.log.windows.keep_s)
        with pytest.raises(OutcomeUnknown):
            await late
        del world.log._send  # type: ignore[method-assign]
        await two.append(["theirs"])
        await world.flush_and_purge()
        queued = [asyncio.ensure_future(one.append(["queued"]))] if wakes == "another caller" else []
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*queued)
        await asyncio.sleep(1)
        if next_ == "append":
            await one.append(["next"])
        else:
            shown = await world.messages()
            await one.checkpoint([*shown, "next"], key="k" if next_ == "keyed" else None)
        await world.flush()
        assert world.ledger.parked.entries == {}
        assert await world.messages() == ["m0", "theirs", *("queued" for _ in queued), "next"]

    test(main)


def test_a_writer_that_remembers_what_was_before_is_not_led_on_by_a_late_copy() -> None:
    """The copy's predecessor is the entry that this writer knows; the entries in between are purged."""

    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint(["m0"])
        await world.flush_and_purge()
        _, land = await held_up(world, two.append(["late"]))
        three = Instance(world)
        await three.append(["theirs"])
        await world.flush_and_purge()
        with pytest.raises(Conflict):
            land()
        await one.append(["mine"], run_id="mine")
        await check_it_is_there_once(world)
        assert await world.messages() == ["m0", "theirs", "mine"]

    test(main)


# --- everything at once ---------------------------------------------------------------------------------------------


class Applied(World):
    """A world that counts how often each run was applied."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: Counter[str] = Counter()

    async def flush(self, thread_id: str = "t", poison: frozenset[int] = frozenset()) -> None:
        watermark = await self.ledger.watermark(thread_id)
        for item in plan(watermark, self.tail(thread_id), complete=True).apply:
            self.applied[decode_payload(item.entry.payload).save.run_id] += 1
        await super().flush(thread_id, poison)


@examples(25)
@given(seed=st.integers(0, 2**32))
def test_what_is_acknowledged_is_applied_once_whatever_lands_when(seed: int) -> None:
    """Calls are held up, land or never land, and are repeated by any process, between flushes and purges."""
    chance = random.Random(seed)

    async def main() -> None:
        world = Applied()
        writers = [Instance(world) for _ in range(3)]
        Call = Callable[[Instance, str | None], Awaitable[Receipt]]
        calls: dict[str, tuple[Call, str | None]] = {}
        done: set[str] = set()
        marked: set[str] = set()
        on_their_way: list[Sequence[Outgoing]] = []

        def new() -> tuple[str, Call, str | None]:
            name, whole = f"r{len(calls)}", chance.random() < 0.5
            how = chance.choice(("token", "key", "source"))
            # Each write has its own source: a source's lower number is a repeat once a higher one is stored.
            mark = producers.item(name, 1) if how == "source" and len(marked) < producers.SIZE else None
            if mark is not None:
                marked.add(name)

            def do(one: Instance, key: str | None) -> Awaitable[Receipt]:
                write = one.checkpoint if whole else one.append
                return write([name], key=None if mark else key, run_id=name, mark=mark)

            return name, do, name if how == "key" else None

        async def make(name: str, do: Call, key: str | None, *, lost: bool = False) -> None:
            calls[name] = do, key
            one = chance.choice(writers)
            try:
                if lost:
                    with nothing_arrives(world) as sent:
                        try:
                            await do(one, key)
                        finally:
                            on_their_way.extend(sent[:1])
                else:
                    await do(one, key)
                    done.add(name)
            except OutcomeUnknown as e:
                calls[name] = do, e.token
            except LogUnavailable:
                pass  # it was not sent: an earlier write of the thread has no answer yet

        for _ in range(chance.randint(4, 30)):
            match chance.randrange(8):
                case 0 | 1 if len(calls) < 14:
                    await make(*new())
                case 2 if len(calls) < 14:
                    await make(*new(), lost=True)
                case 3 | 4 if calls:
                    name = chance.choice(list(calls))
                    if name in marked or calls[name][1] is not None:
                        await make(name, *calls[name])
                case 5 if on_their_way:
                    with contextlib.suppress(Conflict):
                        world.log.store(on_their_way.pop(chance.randrange(len(on_their_way))))
                case 6:
                    await world.flush()
                case 7:
                    await world.flush()
                    await asyncio.sleep(world.log.windows.keep_s + 1)
                    await world.flush_and_purge()
        await world.flush()
        assert world.ledger.parked.entries == {}
        assert {name for name in done if world.applied[name] != 1} == set()
        assert {name: n for name, n in world.applied.items() if n > 1} == {}
        for one in writers:
            await one.aclose()

    run(main())


# --- a machine that is suspended ------------------------------------------------------------------------------------


@pytest.fixture
def suspend(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that lets two minutes pass without the clock of the event loop."""
    asleep = 0.0

    def sleep() -> None:
        nonlocal asleep
        asleep += 120

    monkeypatch.setattr(elapsed, "suspended_s", lambda: asleep)
    return sleep


def test_a_writer_whose_machine_was_suspended_before_it_sent_goes_behind_others(
    suspend: Callable[[], None],
) -> None:
    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await two.checkpoint(["m0"])
        await world.flush_and_purge()
        send = world.log._send

        async def suspended(kind: str, messages: Sequence[Outgoing]) -> int:
            world.log._send = send  # type: ignore[method-assign]
            suspend()
            await two.append(["theirs"])
            await world.flush_and_purge()
            return await send(kind, messages)

        world.log._send = suspended  # type: ignore[method-assign]
        await one.append(["mine"], run_id="mine")
        await one.append(["next"])
        await check_it_is_there_once(world)
        assert await world.messages() == ["m0", "theirs", "mine", "next"]

    test(main)


def test_a_writer_whose_machine_was_suspended_looks_again_how_far_the_log_is(suspend: Callable[[], None]) -> None:
    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await one.checkpoint(["elsewhere"], "other")
        suspend()
        await two.checkpoint(["theirs"])
        await world.flush_and_purge()
        await one.checkpoint(["mine"], run_id="mine")
        await check_it_is_there_once(world)
        calls = world.log.calls
        await one.checkpoint(["again"], "another")
        assert world.log.calls == calls + 2, "once is enough: a look at the thread, and the write"

    test(main)


def test_what_was_found_to_be_new_before_the_machine_was_suspended_is_looked_up(suspend: Callable[[], None]) -> None:
    async def main(world: World, one: Instance) -> None:
        async def held(_: Sequence[str]) -> Sequence[str]:
            return ()

        two = Instance(world)
        one.appender._finder._held = held
        await one.appender.learn_new(["t"])
        assert "t" in one.appender._finder._new
        suspend()
        assert one.appender._finder.as_new("t") is None
        await two.checkpoint(["theirs"])
        await world.flush_and_purge()
        await one.append(["mine"], run_id="mine")
        await check_it_is_there_once(world)

    test(main)


def test_a_read_during_which_the_machine_was_suspended_looks_again(suspend: Callable[[], None]) -> None:
    """The store answered before the suspension, and the log after it: an entry moved from log to store meanwhile."""

    async def main(world: World, one: Instance) -> None:
        two = Instance(world)
        await two.checkpoint(["m0"])
        await world.flush_and_purge()
        last = world.log.last

        async def suspended(subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
            world.log.last = last  # type: ignore[method-assign]
            await asyncio.sleep(0.1)  # the store has answered
            suspend()
            await two.append(["theirs"])
            await world.flush_and_purge()
            return await last(subjects, timeout_s)

        world.log.last = suspended  # type: ignore[method-assign]
        state = await one.reads.thread("t", Consistency.READ_YOUR_WRITES)
        assert [decode_message(m) for m in state.messages] == ["m0", "theirs"]

    test(main)


def test_a_machine_that_is_not_suspended_has_one_clock() -> None:
    async def main(_: World, one: Instance) -> None:
        before = elapsed.now_s()
        await asyncio.sleep(5)
        assert 4.9 < elapsed.now_s() - before < 6  # the kernel's two clocks are read one after the other

    test(main)


@pytest.mark.parametrize("whole", [False, True], ids=["append", "checkpoint"])
@pytest.mark.parametrize("again", [False, True], ids=["another write", "the same write again"])
def test_an_entry_that_a_flush_passes_over_is_neither_built_on_nor_taken_for_a_repeat(whole: bool, again: bool) -> None:
    """No release writes such an entry; if a log has one, only the watermark tells that it does not count."""

    async def main(world: World, one: Instance) -> None:
        await one.checkpoint(["m0"])
        await world.flush_and_purge()
        content = encode_messages(["mine"])
        run_ = Run(run_id="superseded", thread_id="t")
        header, body = encode(
            Entry(
                id=1,
                prev_id=0,
                base=Base.NONE,
                seen=0,
                version=1,
                self_contained=True,
                keys=recent_keys.item("k", b"|".join(content)),
                keys_complete=True,
                payload=encode_payload(Payload(0, content, encode_run(run_), save_of(run_))),
            )
        )
        world.log.store([Outgoing(SUBJECTS.of("t"), body, header)])
        receipt = await write(Instance(world), "key" if again else "source", whole=whole)
        assert not receipt.repeated
        await check_it_is_there_once(world)
        assert await world.messages() == (["mine"] if whole else ["m0", "mine"])

    test(main)


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["append", "checkpoint"])
def test_a_repeat_of_a_first_entry_is_known_also_when_its_key_is_forgotten(whole: bool, flushed: bool) -> None:
    """Its answer was lost, and others have written more behind it than the thread's keys show."""

    async def main(world: World, one: Instance) -> None:
        first = await write(one, "key", whole=whole)
        one.appender._unresolved.remember("t", recent_keys.item("k", b"|".join(encode_messages(["mine"]))), 0)
        one.appender.forget("t")
        two = Instance(world)
        for n in range(recent_keys.SIZE + 1):
            await two.append([f"m{n}"])
        if flushed:
            await world.flush()
        again = await write(one, "key", whole=whole)
        assert again.repeated
        assert (again.thread_seq, again.id) == (first.thread_seq, first.id)
        await check_it_is_there_once(world)

    test(main)
