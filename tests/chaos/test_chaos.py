"""Short chaos runs: real processes and servers, a few kinds of fault, every rule checked."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import islice

import pytest

from chaos.faults import KINDS
from chaos.report import Report
from chaos.run import new_folder, run, schedule

_SHORT = (
    "consumers deleted",
    "cut nats",
    "hot bucket deleted",
    "kill nats",
    "kill writer",
    "poison published",
    "publish acks lost",
    "replies to COMMIT lost",
    "stop all",
    "stop postgres",
)
#: A seed whose first two phases are short and combine many of these kinds.
_SEED = 769


async def short_run(seed: int, kinds: Sequence[str], least: int, on: str = "threads") -> Report:
    """Run two phases of a seed with at least `least` faults; no rule may be broken. The folder stays when one is."""
    folder = new_folder(seed)
    # Recovery times are not judged here, because the machine may be busy with other tests.
    report = await run(seed, 120, folder, kinds, phases=2, recovery_s=30.0, on=on)
    assert report.ok, f"{report.text()}\nhistory: {folder}"
    assert len(report.injected) >= least
    shutil.rmtree(folder)
    return report


@pytest.mark.alone
async def test_a_short_run_loses_nothing() -> None:
    report = await short_run(_SEED, _SHORT, 6)
    assert report.history.acknowledged > 1000
    assert report.history.samples
    assert {r.level for t in report.history.threads.values() for r in t.reads} == {
        "eventual",
        "read-your-writes",
        "strong",
    }


@pytest.mark.alone
@pytest.mark.long
async def test_a_short_run_on_two_lanes_loses_nothing() -> None:
    report = await short_run(_SEED, _SHORT, 6, on="lanes")
    assert report.history.acknowledged > 1000
    assert {sample.lane for sample in report.history.samples} == {0, 1}
    assert {p for sample in report.history.samples for p in sample.cursors} == set(range(16))


#: The same for LangGraph's checkpoints, with workers that write to the same threads.
_SEED_OF_GRAPHS = 1137
_SHORT_OF_GRAPHS = (
    "cut postgres",
    "kill all",
    "kill nats",
    "kill writer",
    "poison published",
    "publish acks lost",
    "replies to COMMIT lost",
    "stop postgres",
    "stop writer",
)


@pytest.mark.long
@pytest.mark.alone
async def test_a_short_run_of_graphs_loses_no_checkpoint() -> None:
    report = await short_run(_SEED_OF_GRAPHS, _SHORT_OF_GRAPHS, 5, on="checkpoints")
    threads = report.history.threads
    assert {t.partition("-")[0] for t in threads} == {"own", "edited", "forked", "copied"}
    assert report.history.acknowledged > 500
    assert {s.level for h in threads.values() for s in h.shown} == {"eventual", "read-your-writes", "strong"}
    assert any(s.asked for h in threads.values() for s in h.shown)
    assert any(h.listed for h in threads.values())
    assert any(op.kind == "runs" and op.ok for h in threads.values() for op in h.ops)


@pytest.mark.long
@pytest.mark.alone
async def test_a_short_run_of_graphs_on_two_lanes_loses_no_checkpoint() -> None:
    report = await short_run(_SEED_OF_GRAPHS, _SHORT_OF_GRAPHS, 5, on="checkpoint_lanes")
    assert report.history.acknowledged > 500
    assert {sample.lane for sample in report.history.samples} == {0, 1}


def test_the_seed_decides_the_schedule() -> None:
    kinds = list(KINDS.values())
    assert len(kinds) >= 15
    once, again, other = (list(islice(schedule(seed, kinds), 50)) for seed in (1, 1, 2))
    assert once == again
    assert once != other


def test_every_kind_comes_and_what_excludes_each_other_does_not_come_together() -> None:
    kinds = list(KINDS.values())
    for seed in range(20):
        phases = list(islice(schedule(seed, kinds), len(kinds)))
        assert {k.name for phase in phases for k in phase.kinds} == KINDS.keys()
        for phase in phases:
            words = [word for kind in phase.kinds for word in kind.touches]
            assert len(set(words)) == len(words)
            assert len(phase.kinds) == 1 or not any(kind.alone for kind in phase.kinds)
