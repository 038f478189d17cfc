"""Writes a large batch through the sink: `python sink_memory_job.py <settings as JSON>`; prints JSON.

All rows are in one Arrow batch, which Spark gives to one worker; afterwards that worker reports its peak memory.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from bufstore.spark import SinkConfig, checkpoint_sink, session

warnings.simplefilter("ignore")
settings = json.loads(sys.argv[1])
rows, text_bytes = settings["rows"], settings["text_bytes"]
spark = session("memory of a sink", "local[1]", **settings["spark"])
spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(rows))
spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", str(1 << 30))


def looked(batches: Iterator[Any]) -> Iterator[Any]:
    import os
    import resource

    import pyarrow

    for _ in batches:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        yield pyarrow.RecordBatch.from_pylist([{"pid": os.getpid(), "mib": peak}])


def workers() -> dict[int, int]:
    """Return the peak memory of each existing worker process, in MiB."""
    found = spark.range(0, 4, 1, 4).mapInArrow(looked, "pid long, mib long").collect()
    return {row.pid: row.mib for row in found}


def batch(count: int, name: str) -> Any:
    # Different texts of this length.
    text = f"repeat(sha2(cast(id as string), 256), {text_bytes >> 6})"
    return spark.range(count).selectExpr(
        f"concat('{name}-', id % 100) thread_id",
        f"concat('{name}-', id % 100) run_id",
        f"array(to_json(named_struct('n', id, 'text', {text}))) delta",
        "id position",
    )


write = checkpoint_sink(SinkConfig(app_id="memory", tasks=1, mode=settings["mode"], **settings["where"]))
write(batch(100, "small"), 0)
before = workers()
write(batch(rows, "large"), 1)
after = workers()
print(
    json.dumps({"before": max(before.values()), "after": max(after.values()), "same": sorted(after) == sorted(before)})
)
spark.stop()
