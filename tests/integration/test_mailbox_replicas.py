"""The mailbox on three replicas: the suite, and what is promised while leaders die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest

from bufstore import BufstoreError
from bufstore.embedded import Servers
from bufstore.mailbox.store import MailboxStore
from bufstore.testing import Check
from cluster import Cluster
from conformance import LIVE_MAILBOX_CHECKS, MAILBOX_CHECKS
from helpers import eventually
from mailbox_chaos.faults import Place
from mailbox_chaos.run import Run
from mailboxes import Mailboxes


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One for all tests, which leave it whole."""
    async with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


#: Each in a bucket of its own, some at a time: most of what they do here is waiting for others.
TOGETHER = [[*MAILBOX_CHECKS, *LIVE_MAILBOX_CHECKS][n::8] for n in range(8)]


@pytest.mark.long  # the contract holds on one server, and leaders are killed on three, in the short ones, too
@pytest.mark.parametrize("checks", TOGETHER, ids=lambda checks: f"{checks[0]}-and-{len(checks) - 1}-more")
async def test_it_keeps_the_mailbox_contract(checks: list[Check], servers: Servers, cluster: Cluster) -> None:
    async def keeps(check: Check) -> None:
        try:
            async with AsyncExitStack() as stack:
                stores = await eventually(lambda: _opened(Mailboxes("nats", servers, cluster), stack), 60)
                await check(stores)
                await stores[0].backend.destroy()  # every bucket has elections of its own
        except Exception as e:
            e.add_note(f"in {check}")
            raise

    async with asyncio.TaskGroup() as group:
        for check in checks:
            group.create_task(keeps(check))


async def _opened(boxes: Mailboxes, stack: AsyncExitStack) -> list[MailboxStore]:
    """Two instances; none while the cluster elects who makes streams."""
    with suppress(BufstoreError):
        return await stack.enter_async_context(boxes.open())
    return []


async def test_dying_leaders_leave_nothing_and_double_nothing(servers: Servers, cluster: Cluster) -> None:
    boxes = Mailboxes("nats", servers, cluster)
    place = Place("replicas", boxes, servers, cluster)
    run = Run(boxes, place, seed=3, dispatches=150, workers=2)
    report = await run(["leader killed", "node cut off"], hold_s=(0.5, 1.0))
    assert report.wrong == [], report.text()
    assert report.accepted == report.acked == 150
    assert report.faults["leader killed"] + report.faults["node cut off"] >= 1
