"""The mailbox on three replicas: the suite, and what is promised while leaders die."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bufstore import BufstoreError
from bufstore.embedded import Servers
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


@pytest.fixture
async def mailboxes(servers: Servers, cluster: Cluster) -> Mailboxes:
    boxes = Mailboxes("nats", servers, cluster)

    async def ready() -> bool:
        """The cluster has elected who makes streams, and the bucket's replicas know each other."""
        try:
            async with boxes.open(1):
                return True
        except BufstoreError:
            return False

    await eventually(ready, 60)
    return boxes


@pytest.mark.parametrize("check", [*MAILBOX_CHECKS, *LIVE_MAILBOX_CHECKS], ids=str)
async def test_it_keeps_the_mailbox_contract(check: Check, mailboxes: Mailboxes) -> None:
    async with mailboxes.open() as stores:
        await check(stores)


async def test_dying_leaders_leave_nothing_and_double_nothing(servers: Servers, cluster: Cluster) -> None:
    boxes = Mailboxes("nats", servers, cluster)
    place = Place("replicas", boxes, servers, cluster)
    run = Run(boxes, place, seed=3, dispatches=300, workers=2)
    report = await run(["leader killed", "node cut off"], hold_s=(0.5, 1.0))
    assert report.wrong == [], report.text()
    assert report.accepted == report.acked == 300
    assert report.faults["leader killed"] + report.faults["node cut off"] >= 1
