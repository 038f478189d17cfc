"""Targets for the figures. Nothing asserts them: the table says for each whether it was met.

A target is a ratio that must be reached (more is better, so ``1 / 1.4`` allows 1.4 times the baseline's time).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_APPEND = {callers: {"upsert": 1.2, "unbuffered": 5.0} for callers in (32, 256, 1000)}
#: For many processes with a few callers each.
_PROCESSES = {"4x16": 0.6, "8x8": 0.45}
_SHAPES = ("4x16", "8x8", "16x4", "16x16")
_WAL = {"upsert": 3.0}
_ONCE = {"once": 1 / 1.5}

#: Benchmark → baseline → the least ratio.
TARGETS: Mapping[str, Mapping[str, float]] = {
    "append_1.p50": {"limit": 1 / 1.4, "unbuffered": 1.0},
    **{f"append_{callers}.rate": ratios for callers, ratios in _APPEND.items()},
    **{f"append_{callers}.p99": {"upsert": 1.0} for callers in (32, 256, 1000)},
    "append_256.p50": {"upsert": 1.0},
    "append_256_lazy.rate": {"plain": 0.5},
    **{f"append_{shape}.rate": {"upsert": least} for shape, least in _PROCESSES.items()},
    **{f"append_{shape}{how}.fairness": {"half": 1.0} for shape in _SHAPES for how in ("", "_shared", "_far")},
    "append_idle.rate": {"hot threads": 0.9},
    "append_idle_evicted.rate": {"hot threads": 0.5},
    "end_to_end.rate": {"upsert": 1.0, "upsert, two processes": 1.0},
    "end_to_end_hot.rate": {"upsert": 1.3, "upsert, two processes": 1.3},
    "drain.rate": {"60 000/s": 1.0},
    "drain.memory": {"200 MiB": 1.0},
    "read_clean.p50": {"limit": 0.6},
    "read_tail.p50": {"limit": 0.5},
    "database_load_500ms.transactions": {"unbuffered": 20.0},
    "database_load_500ms.wal": _WAL,
    "database_load_5s.transactions": {"unbuffered": 100.0} | _ONCE,
    "database_load_5s.rows": _ONCE,
    "database_load_5s.wal": _WAL | _ONCE,
    "growth_length.bytes": {"length 5": 1 / 1.3},
    "growth_length.p50": {"length 5": 1 / 1.2},
    **{
        f"growth_history_{what}.p50": {"1000 checkpoints": 1 / 1.2}
        for what in ("append", "read", "load_run", "force_flush")
    },
    **{f"mailbox_{ours}_32.rate": {"procrastinate": 1.0} for ours in ("memory", "nats", "postgres")},
    **{f"mailbox_claim_{ours}.p99": {"100 queued": 1 / 2} for ours in ("nats", "postgres")},
    "langgraph_steps_1.p50": {"AsyncPostgresSaver": 1.0},
    "langgraph_steps_256.rate": {"AsyncPostgresSaver": 15.0, "without its lock": 5.0},
    "langgraph_react.seconds": {"AsyncPostgresSaver": 3.0},
    "spark_sink.rate": {"upsert": 3.0},
    "spark_backfill.rate": {"executemany": 1.2},
    **{f"spark_source_{form}_2.rate": {"nats-py": 1.5} for form in ("entries", "messages")},
    "recovery.seconds": {"3 s": 1.0},
    "recovery_start.seconds": {"3 s": 1.0},
    "notify.wakeups_per_item": {"1.1": 1.0},
    "tokens.hot_key": {"2 s": 1.0},
}


def verdicts(entry: Mapping[str, Any]) -> list[tuple[str, float, bool]]:
    """Return, for an entry of `latest.json`: baseline, the least ratio, and True if it is reached."""
    wanted = TARGETS.get(entry["name"], {})
    return [(n, least, entry["ratios"][n] >= least) for n, least in wanted.items() if n in entry["ratios"]]
