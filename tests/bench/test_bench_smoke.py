"""Every row of the benchmarks runs, scaled down, and its results have the right form; speed is not asserted."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helpers import JAVA_OPTIONS
from thorough import seldom

_ROOT = Path(__file__).parent.parent.parent
#: For each row: names in its results, and the baselines they are compared with.
_ROWS: dict[str, tuple[list[str], set[str]]] = {
    "append": (
        [f"append_{n}.{what}" for n in (1, 32, 256, 1000) for what in ("rate", "p50", "p99")],
        {"unbuffered", "upsert", "protocol4", "plain", "batched", "limit", "limit_groups"},
    ),
    "append_lazy": ([f"append_{n}_lazy.rate" for n in (32, 256)], {"plain", "limit", "limit_groups"}),
    "append_lanes": (["append_256_lanes.rate"], {"one lane"}),
    "processor time": (
        [f"append_{n}{what}" for n in (1, 32, 256, 1000) for what in (".client_cpu", ".server_cpu", ".cpu")],
        {"unbuffered", "upsert", "limit_groups"},
    ),
    "append_8x8": (
        [
            f"append_8x8{how}.{what}"
            for how in ("", "_shared", "_far")
            for what in ("rate", "p50", "p99", "client_cpu", "server_cpu", "fairness")
        ],
        {"upsert"},
    ),
    "append_idle": (
        [
            f"append_idle{how}.{what}"
            for how in ("", "_evicted", "_unflushed")
            for what in ("rate", "p50", "p99", "server_cpu")
        ],
        {"hot threads"},
    ),
    "append_r3": (
        [f"append_{n}_r3.{what}" for n in (32, 256) for what in ("rate", "p50", "p99", "server_cpu")],
        {"limit", "limit_groups"},
    ),
    "reads": (["read_clean.p50", "read_tail.p50", "read_first.p50"], {"limit", "unbuffered"}),
    "database_load": (
        [f"database_load_{w}.{what}" for w in ("500ms", "5s") for what in ("transactions", "rows", "wal")],
        {"unbuffered", "upsert", "once"},
    ),
    "end_to_end": (["end_to_end.rate", "end_to_end_hot.rate"], {"upsert", "upsert, two processes"}),
    "drain": (["drain.rate", "drain.memory"], {"raw loop"}),
    "spark_sink": (["spark_sink.rate"], {"upsert"}),
    "spark_backfill": (["spark_backfill.rate"], {"executemany"}),
    "spark_source": ([f"spark_source_{f}_{c}.rate" for f in ("entries", "messages") for c in (1, 2)], {"nats-py"}),
    "spark_drain": (["spark_drain.rate", "spark_start.seconds"], {"one flusher"}),
    "recovery": (["recovery.seconds", "recovery_start.seconds"], set()),
    "growth_length": (
        [f"growth_length{kind}.{what}" for kind in ("", "_whole") for what in ("bytes", "p50")],
        {"length 5", "length 500"},
    ),
    "growth_history": (
        [f"growth_history_{what}.p50" for what in ("append", "read", "load_run", "force_flush")],
        {"1000 checkpoints", "10000 checkpoints", "100000 checkpoints"},
    ),
    "coalescing": (
        [f"coalescing_t250_r5_w{ms}ms.per_{what}" for ms in (100, 500) for what in ("transaction", "row")],
        {"unbuffered"},
    ),
    "langgraph_steps": (
        [f"langgraph_steps_{n}.{what}" for n in (1, 32, 256) for what in ("rate", "p50", "p99")],
        {"AsyncPostgresSaver", "without its lock"},
    ),
    "langgraph_react": (
        [f"langgraph_react.{what}" for what in ("seconds", "transactions", "wal")],
        {"AsyncPostgresSaver", "without its lock", "durability exit"},
    ),
    "langgraph_burst": (["langgraph_burst.seconds"], {"AsyncPostgresSaver", "without its lock"}),
    "notify": (["notify.wakeups_per_item", "notify.first_wake"], {"NATS, KV", "NATS, no hints", "Postgres, no hints"}),
    "tokens": (
        ["tokens.submitted_distinct_keys", "tokens.worked_distinct_keys"],
        {"work queue"},
    ),
}
_MORE_IS_BETTER = {"1/s", "checkpoints/transaction", "checkpoints/row", "slowest/fastest"}


_SPARK = ["spark_drain", "spark_source", "spark_sink"]
_OTHERS = (
    "append append_lazy append_lanes append_8x8 append_idle append_r3 reads database_load end_to_end drain recovery "
    "growth_length growth_history coalescing mailbox langgraph_steps langgraph_react "
    "langgraph_burst"
)
_REST = [*_OTHERS.split(), "mailbox_claim", "notify", "tokens"]
#: The rows that `make test` runs, and the names of their results.
_HEART = ["append", "reads"]
_OF_HEART = re.compile(r"(append(_\d+)?|processor time|reads?(_clean|_tail|_first)?)(\..*)?")
#: Not run: the same functions as "append_8x8" and "append_r3", with other numbers.
_ALIKE = ["append_4x16", "append_16x4", "append_16x16", "append_r3_lazy"]


@dataclass
class SmallRun:
    """A scaled-down run of some rows."""

    kind: str
    folder: Path
    printed: str

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "latest.json").read_text())
        return found

    @property
    def entries(self) -> dict[str, Any]:
        return {entry["name"]: entry for entry in self.results["benchmarks"]}

    def has(self, name: str) -> bool:
        if self.kind == "heart":
            return _OF_HEART.fullmatch(name) is not None
        return name.startswith("spark") == (self.kind == "spark")


def small_run(folder: Path, rows: list[str]) -> str:
    """Run these rows scaled down, with results in `folder`; return the output."""
    command = [sys.executable, "-m", "bench", "--scale", "0.002", "--rounds", "1", "--results", str(folder), *rows]
    environment = {name: value for name, value in os.environ.items() if name != "BUFSTORE_DATA"}
    environment["JDK_JAVA_OPTIONS"] = JAVA_OPTIONS
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


_RUNS = {"heart": _HEART, "spark": _SPARK, "rest": _REST}


@pytest.fixture(scope="module", params=["heart", *seldom("spark", "rest")])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """Three small runs: of the main rows, of the rows of Spark, and of all others."""
    folder = tmp_path_factory.mktemp(f"bench-{request.param}")
    return SmallRun(request.param, folder, small_run(folder, _RUNS[request.param]))


# This test comes first, so that each run has a test's whole timeout: a little more than its process has.
@pytest.mark.timeout(590)
def test_the_rows_run(run: SmallRun) -> None:
    assert "targets met" in run.printed


def test_none_of_the_rows_is_left_out_here() -> None:
    help_ = subprocess.run(
        [sys.executable, "-m", "bench", "--help"], cwd=_ROOT, capture_output=True, text=True, timeout=60
    )
    rows = re.search(r"which to run:(.*?)\(default", " ".join(help_.stdout.split()))
    assert rows is not None
    assert {row.strip() for row in rows[1].split(",")} == {*_REST, *_SPARK, *_ALIKE}


def test_the_results_have_their_form(run: SmallRun) -> None:
    assert set(run.results) == {"machine", "benchmarks"}
    names = [entry["name"] for entry in run.results["benchmarks"]]
    assert len(set(names)) == len(names)
    for entry in run.results["benchmarks"]:
        assert run.has(entry["name"])
        assert list(entry) == ["name", "unit", "ours", "baselines", "ratios"]
        assert entry["ours"] > 0, entry
        assert set(entry["ratios"]) == set(entry["baselines"]) != set()
        for baseline, value in entry["baselines"].items():
            assert value > 0, (entry, baseline)
            expected = entry["ours"] / value if entry["unit"] in _MORE_IS_BETTER else value / entry["ours"]
            assert entry["ratios"][baseline] == pytest.approx(expected)


def test_each_row_has_ours_and_its_baselines(run: SmallRun) -> None:
    rows = {row: expected for row, expected in _ROWS.items() if run.has(row)}
    assert rows
    for row, (names, baselines) in rows.items():
        for name in names:
            assert baselines <= set(run.entries[name]["baselines"]), (row, name)


def test_both_promised_the_same_and_say_so(run: SmallRun) -> None:
    durability = run.results["machine"]["durability"]
    assert durability["nats"] == "sync_interval: always"
    assert (durability["fsync"], durability["synchronous_commit"]) == ("on", "on")
    assert "sync_interval: always" in run.printed
    if run.kind == "rest":
        assert run.results["machine"]["conversations"] == "generated"


def test_the_table_says_of_every_target_whether_it_was_met(run: SmallRun) -> None:
    sys.path.insert(0, str(_ROOT))
    try:
        from bench.targets import TARGETS, verdicts
    finally:
        sys.path.remove(str(_ROOT))
    targets = {n: wanted for n, wanted in TARGETS.items() if run.has(n) and not n.startswith(tuple(_ALIKE))}
    for name, wanted in targets.items():
        assert {baseline for baseline, _, _ in verdicts(run.entries[name])} == set(wanted), name
    assert f" of {sum(map(len, targets.values()))} targets met" in run.printed


def test_the_plots_are_drawn_from_the_results(run: SmallRun) -> None:
    pytest.importorskip("matplotlib")
    drawn = {"spark": "", "heart": "latency throughput", "rest": "coalescing growth latency processes throughput"}
    assert sorted(picture.stem for picture in run.folder.glob("*.png")) == drawn[run.kind].split()
    for picture in run.folder.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_row_that_does_not_exist_is_refused() -> None:
    command = [sys.executable, "-m", "bench", "no-such-row"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no such row: no-such-row" in done.stderr
