"""The rows of the table: each function measures one thing on a stage and yields its benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from bench.results import Benchmark
from bench.rows.append import append, append_lanes, append_lazy
from bench.rows.coalescing import coalescing
from bench.rows.database_load import database_load
from bench.rows.drain import drain
from bench.rows.end_to_end import end_to_end
from bench.rows.growth import growth_history, growth_length
from bench.rows.idle import append_idle
from bench.rows.langgraph import langgraph_burst, langgraph_react, langgraph_steps
from bench.rows.mailbox import mailbox, mailbox_claim
from bench.rows.notify import notify
from bench.rows.processes import SHAPES, append_processes
from bench.rows.reads import reads
from bench.rows.recovery import recovery
from bench.rows.replicas import append_r3
from bench.rows.spark import spark_drain, spark_sink, spark_source
from bench.rows.tokens import tokens
from bench.stage import Stage

ROWS: Mapping[str, Callable[[Stage], Iterator[Benchmark]]] = {
    "append": append,
    "append_lazy": append_lazy,
    "append_lanes": append_lanes,
    **{f"append_{p}x{c}": partial(append_processes, processes=p, callers=c) for p, c in SHAPES},
    "append_idle": append_idle,
    "append_r3": partial(append_r3, always=True),
    "append_r3_lazy": partial(append_r3, always=False),
    "reads": reads,
    "database_load": database_load,
    "end_to_end": end_to_end,
    "drain": drain,
    "spark_drain": spark_drain,
    "spark_source": spark_source,
    "spark_sink": spark_sink,
    "recovery": recovery,
    "growth_length": growth_length,
    "growth_history": growth_history,
    "coalescing": coalescing,
    "langgraph_steps": langgraph_steps,
    "langgraph_react": langgraph_react,
    "langgraph_burst": langgraph_burst,
    "mailbox": mailbox,
    "mailbox_claim": mailbox_claim,
    "notify": notify,
    "tokens": tokens,
}

#: The rows that `make bench-quick` runs.
QUICK = ("append", "append_lazy", "append_idle")
