"""The crash sweep and the power cut, for some seconds; `make crash-sweep` and `make powercut` run all of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from bufstore.embedded import Servers
from bufstore.failpoints import Failpoint
from chaos.history import History, Op, ThreadHistory
from conftest import Deployment
from helpers import run_of
from sweep import powercut
from sweep.checks import violations
from sweep.crash import Result, sweep_point
from thorough import seldom

#: One point of each path where a crash falls between two steps that must be atomic.
_POINTS = (Failpoint.PUBLISH_ACKED, Failpoint.FLUSH_APPLIED, Failpoint.FLUSH_COMMITTED, Failpoint.QUEUE_COMMITTED)
_MORE = (Failpoint.QUEUE_LEFT, Failpoint.TAKE_RAISED, Failpoint.LINEAGE_EDITED, Failpoint.EPOCH_SET)


@pytest.mark.parametrize("points", [_POINTS, *seldom(_MORE)], ids=["flush", "more"])
async def test_a_process_that_is_killed_at_a_crash_point_leaves_nothing_wrong(
    servers: Servers, points: Sequence[Failpoint]
) -> None:
    places = asyncio.Semaphore(2)

    async def sweep(point: Failpoint) -> Result:
        async with places:
            return await sweep_point(servers, point, 1, random.Random(f"1 {point}"))

    for result in await asyncio.gather(*map(sweep, points)):
        assert result.ok, result


def test_a_point_that_was_never_reached_fails() -> None:
    assert not Result(Failpoint.PURGE_DONE, kills=0, rounds=1).ok
    assert not Result(Failpoint.PURGE_DONE, kills=1, rounds=1, violations=["lost"]).ok
    assert Result(Failpoint.PURGE_DONE, kills=1, rounds=1).ok


async def test_the_checks_bite(deployment: Deployment) -> None:
    """The history claims an append, a parked entry, a deletion and half a deletion that did not happen."""
    family = ("edited-parent", "edited-child")
    async with deployment.store() as store:
        await store.checkpoint("shared-0", ["a"], run_of("shared-0"))
        await store.checkpoint("edited-parent", ["old"], run_of("edited-parent"))
        told = History(
            {
                "shared-0": ThreadHistory([_op("shared-0", "a", 1), _op("shared-0", "b", 2)]),
                "poisoned-0": ThreadHistory([_op("poisoned-0", "p", 3)]),
                "edited-parent": ThreadHistory([Op("p", family[0], "delete", family, 0.0)]),
            }
        )
        found = "\n".join(await violations(store, told))
    assert "lost: shared-0 ['b']" in found
    assert "p (position 3) is in 0 places" in found
    assert "is half done: ['edited-parent']" in found


def _op(thread_id: str, name: str, seq: int) -> Op:
    return Op("p", thread_id, "append", (name,), float(seq), seq, seq + 0.5, "ok", seq)


@pytest.mark.skipif(bool(powercut.why_not()), reason=f"no power cut: {powercut.why_not()}")
@pytest.mark.parametrize("sync_interval", ["always", *seldom("2m")])
async def test_a_power_cut_takes_what_was_not_synced_and_nothing_else(sync_interval: str) -> None:
    done = await asyncio.to_thread(powercut.cut, sync_interval, "1", flush_interval_s=5.0)
    assert done.acknowledged > powercut.LEAST
    assert powercut.verdict(sync_interval, [done]) == ""
