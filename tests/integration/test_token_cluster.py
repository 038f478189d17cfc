"""Exclusive work and locks on three replicas: the checks of one server, and leaders that are killed or isolated."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import token_instances
from bufstore.errors import LogUnavailable, SubmitUnknown, TokenBusy, TokenLost, TokenQueueFull
from bufstore.tokens import ExclusiveWork, Locks, Storage, Task, TokensConfig
from cluster import Cluster
from helpers import eventually
from integration import test_token_promises as promises
from integration import test_tokens as tokens
from leaders import Leaders
from sweep import tokens as chaos
from token_instances import Open, nothing_left, working

name = token_instances.name


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One cluster for all tests, which leave it whole."""
    async with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
async def opened(cluster: Cluster, name: str) -> AsyncIterator[Open]:
    """Opens instances of this test's work, on three replicas."""
    async with _opener(cluster, name) as open_:
        yield open_


@contextlib.asynccontextmanager
async def _opener(cluster: Cluster, name: str, **defaults: Any) -> AsyncIterator[Open]:
    async with contextlib.AsyncExitStack() as stack:

        async def attempt(config: TokensConfig) -> ExclusiveWork | None:
            with contextlib.suppress(LogUnavailable):
                return await stack.enter_async_context(await ExclusiveWork.open(cluster.nats(), config))
            return None

        async def open_(**config: Any) -> ExclusiveWork:
            wanted = TokensConfig(**{"name": name, "replicas": 3} | defaults | config)
            work: ExclusiveWork = await eventually(partial(attempt, wanted), 60)
            return work

        yield open_


_CHECKS = [
    tokens.test_items_of_a_key_are_worked_on_in_order_and_one_at_a_time,
    tokens.test_refused_while_the_key_is_busy,
    tokens.test_a_queue_has_a_bound,
    tokens.test_the_newest_replaces_what_waits,
    tokens.test_a_holder_that_stalled_finds_its_token_lost,
    tokens.test_a_renewal_finds_that_another_has_the_key,
    tokens.test_a_retry_waits_and_keeps_the_key_busy,
    tokens.test_a_cancelled_take_leaves_nothing_taken,
    promises.test_an_item_that_nobody_was_told_of_is_found,
    promises.test_a_key_whose_holder_and_delivery_are_gone_is_found,
    promises.test_attempts_are_the_items_own,
    promises.test_keys_take_turns,
    partial(promises.test_a_requester_that_dies_leaves_no_key_busy, config={"policy": promises.Policy.REFUSE}),
    partial(promises.test_what_a_full_stream_holds_is_worked_off, policy=promises.Policy.QUEUE),
]


@pytest.mark.long  # the short tests have the same promises on one server
@pytest.mark.parametrize("check", _CHECKS, ids=lambda check: getattr(check, "func", check).__name__)
async def test_on_three_replicas(check: Any, opened: Open) -> None:
    await check(opened)


#: Errors that a call may raise while leaders go (docs/TOKENS.md); the check is then repeated. A key is also busy while
#: its finished item could not be removed.
_ENDS = (LogUnavailable, SubmitUnknown, TokenLost, TokenBusy, TokenQueueFull)
#: These assume normal operation: deliveries and renewals arrive, and no item is found by looking or begun twice.
_NORMAL_LIFE = {
    "test_items_of_a_key_are_worked_on_in_order_and_one_at_a_time",
    "test_an_item_that_nobody_was_told_of_is_found",
    "test_a_renewal_finds_that_another_has_the_key",
    "test_keys_take_turns",
    "test_a_requester_that_dies_leaves_no_key_busy",
    "test_what_a_full_stream_holds_is_worked_off",
}


@pytest.mark.leaders
@pytest.mark.parametrize("seed", range(4))
async def test_the_contract_of_tokens_is_kept_while_leaders_go(seed: int, cluster: Cluster) -> None:
    """Each check is repeated until the given number of leaders have stepped down or been killed."""
    leaders, faults = Leaders(cluster, [], seed), 12 if seed else 5

    async def keeps(check: Any) -> bool:
        name = f"t{secrets.token_hex(5)}"
        kept = False
        async with leaders.of(f"{name}-items", f"{name}-fence"):
            try:
                async with _opener(cluster, name, ttl_s=3, timeout_s=10) as opened:
                    await check(opened)
                kept = True
            except* _ENDS:
                pass
            except* Exception as e:
                e.add_note(f"in {check}, {dict(leaders.gone)}")
                raise
        return kept

    async with leaders.leave(), asyncio.TaskGroup() as group:
        for check in _CHECKS:
            if getattr(check, "func", check).__name__ not in _NORMAL_LIFE:
                group.create_task(leaders.beside(partial(keeps, check), faults))
    assert leaders.gone["killed"]


@pytest.mark.long  # twenty seconds; the short tests have the chaos
async def test_nothing_is_lost_or_done_twice_when_a_leader_is_killed(opened: Open, cluster: Cluster) -> None:
    instances = [await opened(ttl_s=2, timeout_s=3) for _ in range(2)]
    accepted, begun = set[tuple[str, int]](), defaultdict[tuple[str, int], list[int]](list)
    completed = defaultdict[str, list[int]](list)

    async def handler(task: Task) -> None:
        begun[task.key, int(task.payload)].append(task.token)

    for instance in instances:
        finish = instance._finish

        async def noted(task: Task, finish: Any = finish) -> None:
            completed[task.key].append(int(task.payload))
            await finish(task)

        instance._afterwards = instance._afterwards._replace(finish=noted)

    async def submit(n: int) -> None:
        for i in range(25):
            with contextlib.suppress(SubmitUnknown):
                while True:
                    try:
                        await instances[n % 2].submit(f"key {n}", str(i).encode())
                        accepted.add((f"key {n}", i))
                        break
                    except LogUnavailable:
                        await asyncio.sleep(0.05)

    async def finished() -> bool:
        with contextlib.suppress(LogUnavailable):
            return await nothing_left(instances[0])
        return False

    async with working(handler, *instances, concurrency=3):
        async with asyncio.TaskGroup() as submitting:
            for n in range(6):
                submitting.create_task(submit(n))
            node = await leading(instances[0], "items")
            await asyncio.to_thread(cluster.servers[node].kill)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(cluster.servers[node].start)
        await eventually(finished, 120)
    assert accepted <= set(begun)
    for items in completed.values():
        assert items == sorted(set(items))  # in order and without repeats
    for key in completed:
        # A later item of a key has larger tokens, whoever held the key.
        ordered = [token for i in range(25) for token in sorted(begun[key, i])]
        assert ordered == sorted(ordered)


async def leading(work: ExclusiveWork, stream: str) -> int:
    """Return the node that leads this stream of the work."""

    async def asked() -> str:
        with contextlib.suppress(LogUnavailable):
            info = await work._items.api(f"STREAM.INFO.{work._config.name}-{stream}")
            return str(info["cluster"].get("leader") or "")
        return ""

    return int((await eventually(asked, 30))[1:])


@pytest.mark.long  # three servers and an election
async def test_locks_on_three_replicas_exclude_each_other_while_a_leader_dies(cluster: Cluster) -> None:
    config, name = Storage(replicas=3), f"t{secrets.token_hex(5)}"

    async def opened() -> Locks | None:
        with contextlib.suppress(LogUnavailable):  # an earlier test may have killed the cluster's leader
            return await Locks.open(cluster.nats(), name=name, storage=config, timeout_s=5)
        return None

    locks = await eventually(opened, 60)
    holding, tokens_given, turns = 0, list[int](), 0

    async def one() -> None:
        nonlocal holding, turns
        for _ in range(5):
            while True:
                try:
                    lock = await locks.acquire("a", ttl_s=5, wait_s=30)
                    break
                except (LogUnavailable, TokenBusy):
                    await asyncio.sleep(0.05)
            with contextlib.suppress(TokenLost, LogUnavailable):
                async with lock:
                    holding += 1
                    assert holding == 1
                    tokens_given.append(lock.token)
                    await asyncio.sleep(0.01)
                    holding -= 1
                    turns += 1

    async with locks:
        working_on = [asyncio.create_task(one()) for _ in range(4)]
        info = await locks._stream.api(f"STREAM.INFO.{locks._config['name']}")
        leader = cluster.servers[int(info["cluster"]["leader"][1:])]
        await asyncio.to_thread(leader.kill)
        await asyncio.to_thread(leader.start)
        async with asyncio.timeout(120):
            await asyncio.gather(*working_on)
    assert turns == 20
    assert tokens_given == sorted(set(tokens_given))


@pytest.mark.parametrize("tokens", [[5, 5, 6, 6], [5, 6, 5, 6], [6, 6, 5, 5]])
def test_two_holders_of_a_lock_and_a_token_that_goes_down_are_told(tokens: list[int]) -> None:
    verdict = chaos.Verdict()
    chaos.judge({"worker": [[at, "locked", "a", 0, token] for at, token in enumerate(tokens)]}, 0.0, verdict)
    assert verdict.locked == 2
    assert bool(verdict.wrong) is (tokens != sorted(tokens))


@pytest.mark.parametrize("item", range(3))
def test_an_item_stands_where_it_was_stored_if_nobody_was_told_when(item: int) -> None:
    """Without an answer it may arrive behind what was submitted after it; items that were accepted stay in order."""
    submitted = [[n, what, "a", n, 0] for n in range(3) for what in ("submitting", "accepted")]
    late = [[10 + n, "began", "a", n, n if n != item else 9] for n in range(3)]
    told, unknown = chaos.Verdict(), chaos.Verdict()
    chaos.judge({"all": [*submitted, *late]}, 30.0, told)
    chaos.judge({"all": [*(e for e in submitted if e[1:4] != ["accepted", "a", item]), *late]}, 30.0, unknown)
    assert bool(told.wrong) is (item < 2)
    assert not unknown.wrong


#: One fault of each kind, in the order that the seed gives.
_SHORT = ("clock stepped", "node killed", "worker killed", "worker paused")


async def test_a_short_chaos_of_tokens_loses_nothing_and_passes_no_fence(
    cluster: Cluster, name: str, tmp_path: Path
) -> None:
    verdict = await chaos.run(cluster, tmp_path, 1, 60, name, _SHORT, faults_max=len(_SHORT))
    assert not verdict.wrong
    assert verdict.accepted > 50
    assert verdict.locked > 5
    assert verdict.begun >= verdict.accepted
    assert verdict.completed > 50, "else nothing shows what was done twice"
    assert verdict.faults.keys() == set(_SHORT)
