"""The conformance suite of what instances share beside a log: `bufstore.buffer.ports.shared_state.SharedState`.

Each check takes a `Logs` of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

from bufstore.buffer.ports.shared_state import SharedState
from bufstore.jetstream.messages import Conflict
from bufstore.testing.basics import Check, raises, registrar
from bufstore.testing.log import PATIENCE_S, Logs, eventually

CHECKS: list[Check] = []
_check = registrar(CHECKS)


async def _two(logs: Logs) -> tuple[SharedState, SharedState]:
    here, there = (await logs.open()).shared, (await logs.open()).shared
    await here.setup()
    await there.setup()
    return here, there


async def _listening(*instances: SharedState) -> None:
    """Return once the server knows what these instances listen to: it has answered a later question of each."""
    for shared in instances:
        await shared.thread_of_run("nothing", PATIENCE_S)


async def _heard(heard: list[Any], expected: list[Any]) -> None:
    async def all_of_it() -> bool:
        return sorted(heard) == expected

    await eventually(all_of_it)


@_check()
async def nothing_is_known_at_first(logs: Logs) -> None:
    here, _ = await _two(logs)
    assert await here.thread_of_run("run", PATIENCE_S) is None
    assert await here.lineage(PATIENCE_S) == (0, b"")
    assert await here.members() == {}
    assert await here.troubles() == {}
    assert await here.progress() == {}


@_check()
async def a_run_belongs_to_the_thread_that_claimed_it_first(logs: Logs) -> None:
    here, there = await _two(logs)
    assert await here.claim_run("run *.> ü", "thread .1 ", PATIENCE_S) == "thread .1 "
    assert await there.claim_run("run *.> ü", "another", PATIENCE_S) == "thread .1 "
    assert await there.claim_run("run *.> ü", "thread .1 ", PATIENCE_S) == "thread .1 "
    assert await there.thread_of_run("run *.> ü", PATIENCE_S) == "thread .1 "


@_check()
async def of_claims_at_once_all_see_the_same_thread(logs: Logs) -> None:
    here, there = await _two(logs)
    claims = (s.claim_run("run", t, PATIENCE_S) for s, t in ((here, "a"), (there, "b"), (here, "c")))
    assert len(set(await asyncio.gather(*claims))) == 1


@_check()
async def of_many_claims_at_once_each_learns_whose_its_run_is(logs: Logs) -> None:
    here, there = await _two(logs)
    await asyncio.gather(*(here.claim_run(f"run {n}", f"thread {n}", PATIENCE_S) for n in range(0, 100, 2)))
    owners = await asyncio.gather(*(there.claim_run(f"run {n}", "another", PATIENCE_S) for n in range(100)))
    assert owners == ["another" if n % 2 else f"thread {n}" for n in range(100)]


@_check()
async def the_record_of_lineage_is_replaced_by_who_has_read_it(logs: Logs) -> None:
    here, there = await _two(logs)
    first = await here.put_lineage(b"\0one", 0, PATIENCE_S)
    assert await there.lineage(PATIENCE_S) == (first, b"\0one")
    for wrong in (0, first + 1):
        with raises(Conflict):
            await there.put_lineage(b"lost", wrong, PATIENCE_S)
    second = await there.put_lineage(b"two", first, PATIENCE_S)
    assert second > first
    assert await here.lineage(PATIENCE_S) == (second, b"two")


@_check()
async def members_are_listed_with_a_number_that_changes(logs: Logs) -> None:
    here, there = await _two(logs)
    await here.renew_member("a", 60)
    await there.renew_member("b", 60, "no Postgres")
    before = await here.members()
    assert before.keys() == {"a", "b"}
    assert await here.troubles() == {"b": "no Postgres"}
    await here.renew_member("a", 60)
    await there.renew_member("b", 60)
    after = await there.members()
    assert all(after[member] != before[member] for member in "ab")
    assert await here.troubles() == {}


@_check()
async def a_member_that_is_not_renewed_goes(logs: Logs) -> None:
    here, there = await _two(logs)
    await here.renew_member("short", 1)
    await here.renew_member("long", 60)

    async def gone() -> bool:
        return set(await there.members()) == {"long"}

    await eventually(gone)


@_check()
async def who_leaves_is_off_the_list_at_once_and_the_others_hear(logs: Logs) -> None:
    here, there = await _two(logs)
    called: list[int] = []
    await there.on_call(called.append)
    await _listening(there)
    await here.renew_member("a", 60, "trouble")
    await here.leave("a")
    assert await there.members() == {}
    assert await there.troubles() == {}
    await _heard(called, [-1])


@_check()
async def progress_is_kept_and_told(logs: Logs) -> None:
    here, there = await _two(logs)
    heard: list[tuple[int, int]] = []
    await there.on_progress(lambda partition, seq: heard.append((partition, seq)))
    await _listening(there)
    await here.report({0: 1 << 41, 3: 7})
    await here.report({0: (1 << 41) + 1})
    await _heard(heard, [(0, 1 << 41), (0, (1 << 41) + 1), (3, 7)])

    async def kept() -> bool:
        return await there.progress() == {0: (1 << 41) + 1, 3: 7}

    await eventually(kept)


@_check()
async def calls_reach_every_instance_the_callers_own_too(logs: Logs) -> None:
    here, there = await _two(logs)
    called: list[tuple[str, int]] = []
    await here.on_call(lambda partition: called.append(("here", partition)))
    await there.on_call(lambda partition: called.append(("there", partition)))
    await _listening(here, there)
    await here.call_owner(3)
    await _heard(called, [("here", 3), ("there", 3)])
    await there.announce()
    await _heard(called, [("here", -1), ("here", 3), ("there", -1), ("there", 3)])


@_check()
async def writers_hear_that_a_thread_is_broken(logs: Logs) -> None:
    here, there = await _two(logs)
    heard: list[str] = []
    await there.on_parked(heard.append)
    await _listening(there)
    await here.tell_parked("thread .1 ü")
    await _heard(heard, ["thread .1 ü"])
