"""Short chaos runs of the mailbox; the long ones are `make mailbox-chaos`."""

from __future__ import annotations

import pytest

from mailbox_chaos.run import Run, deployment


async def test_a_short_run_leaves_nothing_and_doubles_nothing() -> None:
    async with deployment("nats") as (boxes, place):
        report = await Run(boxes, place, seed=1, dispatches=200, workers=2)(
            ["server killed", "bucket full"], (0.3, 0.6)
        )
    assert report.wrong == [], report.text()
    assert report.accepted == report.acked == 200
    assert report.faults.total() >= 1


@pytest.mark.parametrize("on", ["nats", "postgres"])
async def test_in_normal_life_every_thread_with_work_has_its_signal(on: str) -> None:
    async with deployment(on) as (boxes, place):
        report = await Run(boxes, place, seed=2, dispatches=150, workers=2, mortal=False)([])
    assert report.wrong == [], report.text()
    assert report.counts["resignalled"] == report.counts["reclaimed"] == report.counts["stale_claims"] == 0
