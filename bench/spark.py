"""Jobs on Spark in their own process: ours, and what a data engineer would write instead."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from bench.contestant import TEXTS, Contestant, Place
from bench.ours import Ours
from bufstore.spark import Deployment, SinkConfig, bulk_drain, checkpoint_sink, session

_QUICK = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "2g",
    "spark.sql.session.timeZone": "UTC",
}
_UPSERT = (
    "INSERT INTO {table} (thread_id, state) VALUES (%s, %s) "
    "ON CONFLICT (thread_id) DO UPDATE SET state = excluded.state, saved_at = now()"
)


class SparkJobs(Contestant):
    """A local session with `cores` cores."""

    def __init__(self, place: Place, *, cores: int, stream: str = "", bucket: str = "", schema: str = "") -> None:
        super().__init__(place)
        self._cores = cores
        self._where: dict[str, Any] = {
            "nats": place.nats,
            "postgres": place.dsn,
            "schema": schema or place.name,
            "stream": stream or f"LOG-{place.name}",
            "bucket": bucket or f"hot-{place.name}",
        }
        self._made = not stream
        self._table = f"{place.name}_upserts"
        self.started = 0.0

    async def open(self) -> None:
        if self._made:
            ours = Ours(self.place)
            await ours.open()
            await ours.close()
        began = time.perf_counter()
        await asyncio.to_thread(self._start)
        self.started = time.perf_counter() - began

    def _start(self) -> None:
        settings = _QUICK | {"spark.sql.shuffle.partitions": str(self._cores)}
        self.spark = session("bench", f"local[{self._cores},4]", **settings)
        self.spark.sparkContext.setLogLevel("OFF")
        # Starts workers, with Arrow in them.
        self.spark.range(0, 100, 1, self._cores).mapInArrow(lambda batches: batches, "id bigint").count()

    async def close(self) -> None:
        await asyncio.to_thread(self.spark.stop)
        with psycopg.connect(self.place.dsn, autocommit=True) as connection:
            connection.execute(f"DROP TABLE IF EXISTS {self._table}")

    async def start(self) -> float:
        """Return how long the session and its first job took, in seconds."""
        return self.started

    async def sink(self, rows: int, threads: int, label: str, mode: str) -> float:
        """Return the rows per second through our sink."""
        return await self._timed(rows, threads, label, self._sink(label, mode))

    def _sink(self, label: str, mode: Any) -> Callable[[Any], None]:
        config = SinkConfig(app_id=label, mode=mode, **self._where)
        return lambda df: checkpoint_sink(config)(df, 0)

    async def upserts(self, rows: int, threads: int, label: str, together: bool) -> float:
        """Return the rows per second with one upsert each, committed one by one or (`together`) per partition."""
        return await self._timed(rows, threads, label, self._upserts(together))

    async def prepare(self, rows: int, threads: int, label: str) -> None:
        """Prepare the rows for `write`."""
        self._df = await asyncio.to_thread(self._rows, rows, threads, label)

    async def write(self, label: str, how: str) -> None:
        """Write the prepared rows: "log", "postgres" (past the log) or "upsert", committed one by one."""
        await asyncio.to_thread(self._upserts(False) if how == "upsert" else self._sink(label, how), self._df)
        self._df.unpersist()

    def _upserts(self, together: bool) -> Callable[[Any], None]:
        with psycopg.connect(self.place.dsn, autocommit=True) as connection:
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {self._table} "
                "(thread_id text PRIMARY KEY, state text NOT NULL, saved_at timestamptz NOT NULL DEFAULT now())"
            )
        dsn, statement = self.place.dsn, _UPSERT.format(table=self._table)

        def write(partition: Iterator[Any]) -> None:
            found = [(row.thread_id, row.delta[0]) for row in partition]
            with psycopg.connect(dsn, autocommit=not together) as connection, connection.cursor() as cursor:
                if together:
                    cursor.executemany(statement, found)
                else:
                    for one in found:
                        cursor.execute(statement, one, prepare=True)

        def job(df: Any) -> None:
            # A thread's rows must be in one task and in order, as in the sink, so that its last state wins.
            owned = df.repartition(self._cores, "thread_id").sortWithinPartitions("thread_id", "position")
            owned.foreachPartition(write)

        return job

    async def _timed(self, rows: int, threads: int, label: str, job: Callable[[Any], None]) -> float:
        return await asyncio.to_thread(self._time, rows, threads, label, job)

    def _time(self, rows: int, threads: int, label: str, job: Callable[[Any], None]) -> float:
        df = self._rows(rows, threads, label)
        began = time.perf_counter()
        job(df)
        rate = rows / (time.perf_counter() - began)
        df.unpersist()
        return rate

    def _rows(self, rows: int, threads: int, label: str) -> Any:
        from pyspark.sql import functions as F

        texts = self.spark.createDataFrame(
            [(n, json.dumps(t)) for n, t in enumerate(TEXTS)], "text bigint, said string"
        )
        numbers = self.spark.range(0, rows).withColumn("text", F.col("id") % len(TEXTS))
        thread = F.concat(F.lit(f"{label}-"), F.col("id") % threads)
        df = numbers.join(F.broadcast(texts), "text").select(
            thread.alias("thread_id"),
            F.concat(F.lit("run-"), thread).alias("run_id"),
            F.array("said").alias("delta"),
            F.col("id").alias("position"),
        )
        df = df.coalesce(self._cores).cache()  # computed before the clock starts
        assert df.count() == rows
        return df

    async def read(self, entries: int, form: str) -> float:
        """Return the entries per second when the whole log of `entries` is read."""
        return await asyncio.to_thread(self._read, entries, form)

    def _read(self, entries: int, form: str) -> float:
        began = time.perf_counter()
        self._log(form).write.format("noop").mode("overwrite").save()
        return entries / (time.perf_counter() - began)

    async def count(self) -> int:
        """Return the number of entries of the log."""
        return await asyncio.to_thread(self._log("entries").count)

    def _log(self, form: str) -> Any:
        options = {"natsUrl": self.place.nats, "stream": self._where["stream"], "form": form}
        options |= {"numPartitions": str(self._cores)}
        return self.spark.read.format("threadlog").options(**options).load()

    async def drain(self) -> int:
        """Flush everything, and return the number of entries."""
        report = await asyncio.to_thread(bulk_drain, self.spark, Deployment(**self._where), tasks=self._cores)
        return report.entries
