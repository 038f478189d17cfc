"""The mailbox on three replicas: the conformance suite, also while leaders die."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest

from bufstore import BufstoreError, LogUnavailable
from bufstore.embedded import Servers
from bufstore.mailbox.ports import Signal
from bufstore.mailbox.store import MailboxStore
from bufstore.testing import Check
from cluster import Cluster
from conformance import LIVE_MAILBOX_CHECKS, MAILBOX_CHECKS
from helpers import eventually, fresh
from leaders import Leaders, unsteady
from mailbox_chaos.faults import Place
from mailbox_chaos.run import Run
from mailboxes import Mailboxes


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One cluster for all tests, which leave it whole."""
    async with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


#: A lagging replica may still deliver a signal that was replaced: a test below replaces this check.
_ONE_SIGNAL = "a_signal_comes_to_one_worker_wherever_it_is"
CHECKS = [check for check in (*MAILBOX_CHECKS, *LIVE_MAILBOX_CHECKS) if str(check) != _ONE_SIGNAL]
#: The checks of a group run side by side, each in its own bucket, because most of their time is waiting.
TOGETHER = [CHECKS[n::8] for n in range(8)]


@pytest.mark.long  # a part of it is below
@pytest.mark.parametrize("checks", TOGETHER, ids=lambda checks: f"{checks[0]}-and-{len(checks) - 1}-more")
async def test_it_keeps_the_mailbox_contract(checks: list[Check], servers: Servers, cluster: Cluster) -> None:
    async def keeps(check: Check) -> None:
        try:
            async with AsyncExitStack() as stack:
                stores = await eventually(lambda: _opened(Mailboxes("nats", servers, cluster), stack), 60)
                await check(stores)
                await _removed(stores[0])  # every bucket has its own elections
        except Exception as e:
            e.add_note(f"in {check}")
            raise

    async with asyncio.TaskGroup() as group:
        for check in checks:
            group.create_task(keeps(check))


#: This check steps the wall clock of the whole process, so it runs alone. It does not depend on leaders.
_ALONE = ("a_wall_clock_that_steps_moves_no_lease_and_no_delay",)
BESIDE = [check for check in MAILBOX_CHECKS if str(check) not in (_ONE_SIGNAL, *_ALONE)]


@pytest.mark.leaders
@pytest.mark.parametrize("seed", range(_PARTS := 6))
async def test_it_keeps_the_mailbox_contract_while_leaders_go(seed: int, cluster: Cluster) -> None:
    """Each check is repeated until a dozen leaders have stepped down or been killed."""
    await _keep_beside_leaders_that_go(BESIDE[seed::_PARTS], cluster, seed, 12)


@pytest.mark.long
async def test_some_of_the_mailbox_contract_is_kept_while_leaders_go(cluster: Cluster) -> None:
    await _keep_beside_leaders_that_go(random.Random(1).sample(BESIDE, 8), cluster, 7, 5)


async def _keep_beside_leaders_that_go(checks: list[Check], cluster: Cluster, seed: int, faults: int) -> None:
    async with AsyncExitStack() as stack:
        every = [Mailboxes("nats", None, cluster) for _ in checks]
        stores = [[await unsteady(b, cluster, stack) for _ in range(2)] for b in every]
        leaders = Leaders(cluster, [f"KV_{b.name}" for b in every], seed)

        async def keeps(check: Check, stores: list[MailboxStore]) -> None:
            async def once() -> bool | None:
                done = await check(stores)
                await _leave_no_work(stores[0])
                return done

            try:
                await leaders.beside(once, faults)
            except Exception as e:
                e.add_note(f"in {check}, {dict(leaders.gone)}")
                raise

        async with leaders.leave(), asyncio.TaskGroup() as group:
            for check, of_check in zip(checks, stores, strict=True):
                group.create_task(keeps(check, list(of_check)))
        assert leaders.gone["killed"]
        for of_check in stores:
            await _removed(of_check[0])


async def _removed(store: MailboxStore) -> None:
    """Delete the store's bucket."""
    stream = store.backend._stream  # type: ignore[attr-defined]

    async def gone() -> bool:
        with suppress(LogUnavailable):  # leaders may be going
            await stream.api(f"STREAM.DELETE.{stream.name}")
            return True
        return False

    await eventually(gone, 60)


async def _leave_no_work(store: MailboxStore) -> None:
    """End all work that a check left. Its signals would come again, before those that the next check waits for."""

    async def all_ended() -> bool:
        with suppress(BufstoreError):
            await store.reclaim_expired(now_ms=store.backend.now_ms() + 10**7)
            threads = await store.queued_thread_ids()
            for thread_id in threads:
                await store.interrupt(thread_id)
            return not threads
        return False

    await eventually(all_ended, 60)


@pytest.mark.long
async def test_each_signal_comes_to_one_worker_and_the_last_one_comes(servers: Servers, cluster: Cluster) -> None:
    """Each signal replaces the one before. A lagging replica may deliver a replaced signal and then its replacement."""
    assert [check for check in MAILBOX_CHECKS if str(check) == _ONE_SIGNAL]
    async with AsyncExitStack() as stack:
        stores = await eventually(lambda: _opened(Mailboxes("nats", servers, cluster), stack), 60)
        thread_id = fresh()
        put = [await stores[0].enqueue(thread_id) for _ in range(5)]
        came: list[Signal] = []
        stood_still = False

        async def last_came() -> bool:
            nonlocal stood_still
            for store in stores[:2]:
                asked = time.monotonic()
                signals = await store.pull_signals(timeout_s=0.2)
                stood_still |= time.monotonic() - asked > 2  # it then hands back what came too late
                for signal in signals:
                    assert signal.thread_id == thread_id
                    assert signal.deliveries == 1 or stood_still
                    came.append(signal)
            # The last dispatch and its signal are one batch, and a dispatch's position is its place in it.
            return bool(came) and came[-1].mark.seq >= put[-1].position - 1

        await eventually(last_came)
        numbers = [signal.mark.seq for signal in came]
        assert numbers == sorted(set(numbers)), "each came once, in order"
        for store in stores[:2]:
            assert not await store.pull_signals(timeout_s=0.3)
        while (claim := await stores[1].claim(thread_id, "worker")) is not None:
            await stores[1].ack(claim)
        for signal in came:
            await signal.ack()
        assert not await stores[0].pull_signals(timeout_s=0.5)
        await stores[1].enqueue(thread_id)
        assert await stores[0].pull_signals(timeout_s=5)
        await _removed(stores[0])


async def _opened(boxes: Mailboxes, stack: AsyncExitStack) -> list[MailboxStore]:
    """Open two instances; returns none while the cluster has no leader that makes streams."""
    with suppress(BufstoreError):
        return await stack.enter_async_context(boxes.open())
    return []


@pytest.mark.long  # fifteen seconds of elections
async def test_dying_leaders_leave_nothing_and_double_nothing(servers: Servers, cluster: Cluster) -> None:
    boxes = Mailboxes("nats", servers, cluster)
    place = Place("replicas", boxes, servers, cluster)
    run = Run(boxes, place, seed=3, dispatches=150, workers=2)
    report = await run(["leader killed", "node cut off"], hold_s=(0.5, 1.0))
    assert report.wrong == [], report.text()
    assert report.accepted == report.acked + report.cancelled + report.superseded == 151
    assert report.faults["leader killed"] + report.faults["node cut off"] >= 1
