"""Short chaos runs of the mailbox; the long ones are `make mailbox-chaos`."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bufstore.mailbox import Dispatch, Status
from mailbox_chaos.faults import Place
from mailbox_chaos.run import Run, deployment
from mailboxes import Mailboxes


async def test_a_short_run_leaves_nothing_and_doubles_nothing() -> None:
    async with deployment("nats") as (boxes, place):
        report = await Run(boxes, place, seed=1, dispatches=200, workers=2)(
            ["server killed", "bucket full"], (0.3, 0.6)
        )
    assert report.wrong == [], report.text()
    assert report.accepted == report.acked + report.cancelled + report.superseded
    assert report.impatient + report.cancelled + report.interrupts > 0
    assert report.faults.total() >= 1


def test_what_has_not_ended_as_was_told_is_told() -> None:
    boxes = Mailboxes("memory", None)
    run = Run(boxes, Place("memory", boxes, None, None), seed=1, dispatches=1, workers=1)
    acked = Dispatch(thread_id="t", dispatch_id="d", status=Status.ACKED, ended_by=7, epoch=2)
    key = ("t", "d")

    def judged(d: Dispatch | None) -> bool:
        return run._not_as_told(key, d) is not None

    assert judged(None)
    assert not judged(acked)
    assert judged(replace(acked, status=Status.CANCELLED))
    assert judged(replace(acked, status=Status.SUPERSEDED))
    run._interrupts["t"].append((5, {"d"}))
    assert judged(acked)
    assert not judged(replace(acked, ended_by=4))
    assert not judged(replace(acked, status=Status.SUPERSEDED))
    assert judged(replace(acked, status=Status.SUPERSEDED, epoch=5))
    run._told[key] = Status.CANCELLED
    assert judged(replace(acked, ended_by=4))
    assert not judged(replace(acked, status=Status.CANCELLED))


@pytest.mark.long
@pytest.mark.parametrize("on", ["nats", "postgres"])
async def test_in_normal_life_every_thread_with_work_has_its_signal(on: str) -> None:
    async with deployment(on) as (boxes, place):
        report = await Run(boxes, place, seed=2, dispatches=150, workers=2, mortal=False)([])
    assert report.wrong == [], report.text()
    assert report.counts["resignalled"] == report.counts["reclaimed"] == report.counts["stale_claims"] == 0
