"""Common questions to a log and its archive, as functions of DataFrames.

Each takes ``spark.read.format("threadlog")``, or `entries`: what an archive holds, alone or with the log behind it. It
returns a small table. `messages`, `runs` and `threads` are views of `entries`.

They need these columns of the log: position, stored_at, thread_id, kind, messages, run_id, run, bytes. Name them in
the option ``columns``: the source decodes only the columns that are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from bufstore.config import check_timeout
from bufstore.errors import ConfigError
from bufstore.spark.log_archive.entry_table import APPLIED
from bufstore.spark.log_archive.tables_job import entries
from bufstore.types import check_choice

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "CHARACTERS_PER_TOKEN",
    "COLUMNS",
    "activity",
    "by_thread",
    "coalescing",
    "entries",
    "hot_threads",
    "lag",
    "messages",
    "runs",
    "threads",
]

#: The columns that all these functions need together, for the option ``columns``.
COLUMNS = "position,stored_at,thread_id,kind,messages,run_id,run,bytes"

#: The number of characters of a token, roughly: good for comparing threads and hours, not for a bill.
CHARACTERS_PER_TOKEN = 4


def messages(entries: DataFrame) -> DataFrame:
    """Return a row for each message that `entries` of an archive wrote, with its run, its agent, and its effect.

    `effect`: "applied" (the message is in its thread, as far as these entries go), "replaced" (a later entry took it
    out), "superseded" or "parked" (as its entry).
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    # How many messages an applied entry keeps; a removal keeps none.
    kept = F.when(F.col("effect") == APPLIED, F.col("keep"))
    later = Window.partitionBy("thread_id").orderBy("position").rowsBetween(1, Window.unboundedFollowing)
    found = entries.withColumn("kept_later", F.min(kept).over(later))
    said = found.select(
        "position",
        "stored_at",
        "thread_id",
        "entry_id",
        F.col("run.run_id").alias("run_id"),
        F.col("run.agent_id").alias("agent_id"),
        "effect",
        "kept_later",
        F.explode("messages").alias("message"),
    )
    replaced = (F.col("effect") == APPLIED) & (F.col("message.number") >= F.col("kept_later"))
    effect = F.when(replaced, "replaced").otherwise(F.col("effect"))
    return said.withColumn("effect", effect).select(*said.columns[:-2], "message.*")


def runs(entries: DataFrame) -> DataFrame:
    """Return the runs that `entries` of an archive wrote, each as the last applied entry with it wrote it."""
    from pyspark.sql import functions as F

    written = entries.where((F.col("effect") == APPLIED) & F.col("run").isNotNull())
    last = written.groupBy("thread_id", F.col("run.run_id").alias("run")).agg(
        F.max_by("run", "position").alias("last"),
        F.max("position").alias("position"),
        F.max("stored_at").alias("stored_at"),
        F.count("*").alias("writes"),
    )
    return last.select("thread_id", "position", "stored_at", "writes", "last.*")


def threads(entries: DataFrame) -> DataFrame:
    """Return the threads that `entries` of an archive wrote: messages, latest run, first and last time, and whether the
    last applied entry removed the thread. `parked`: the number of entries that a flush parks."""
    from pyspark.sql import functions as F

    applied = F.col("effect") == APPLIED
    at = F.when(applied, F.col("position"))
    run_at = F.when(applied & (F.col("kind") == "checkpoint"), F.col("position"))
    found = entries.groupBy("thread_id").agg(
        F.max_by("version", at).alias("messages"),
        F.max_by("run", run_at).alias("run"),
        F.count_if(applied).alias("entries"),
        F.min("stored_at").alias("first_at"),
        F.max("stored_at").alias("last_at"),
        F.max_by(F.col("kind") == "removal", at).alias("removed"),
        F.count_if(F.col("effect") == "parked").alias("parked"),
    )
    latest = [F.col(f"run.{name}").alias(name) for name in ("run_id", "agent_id", "status")]
    return found.select(*[name for name in found.columns if name != "run"], *latest)


def activity(entries: DataFrame) -> DataFrame:
    """Return, per agent and hour: checkpoints, threads, messages, bytes in the log, new messages' estimated tokens."""
    from pyspark.sql import functions as F

    return (
        _checkpoints(entries)
        .groupBy("agent_id", F.date_trunc("hour", "stored_at").alias("hour"))
        .agg(*_totals(), F.countDistinct("thread_id").alias("threads"))
        .orderBy("hour", "agent_id")
    )


def by_thread(entries: DataFrame) -> DataFrame:
    """Return, per thread: checkpoints, messages, bytes, estimated tokens, first and last time, checkpoints a minute."""
    from pyspark.sql import functions as F

    found = (
        _checkpoints(entries)
        .groupBy("thread_id")
        .agg(*_totals(), F.min("stored_at").alias("first_at"), F.max("stored_at").alias("last_at"))
    )
    minutes = F.greatest((F.unix_micros("last_at") - F.unix_micros("first_at")) / F.lit(60e6), F.lit(1 / 60))
    return found.withColumn("per_minute", F.round(F.col("checkpoints") / minutes, 3))


def hot_threads(entries: DataFrame, limit: int = 20) -> DataFrame:
    """Return the `limit` threads with the most checkpoints."""
    from pyspark.sql import functions as F

    return by_thread(entries).orderBy(F.desc("checkpoints"), "thread_id").limit(limit)


def coalescing(entries: DataFrame, window_s: float = 0.5) -> DataFrame:
    """Return, per hour, how many entries a flush with this window folds into one change: the work Postgres is saved.

    Raises ConfigError unless `window_s` is positive.
    """
    from pyspark.sql import functions as F

    check_timeout(window_s, "window_s")
    window = (F.unix_micros("stored_at") / F.lit(window_s * 1e6)).cast("long")
    changes = entries.groupBy(F.date_trunc("hour", "stored_at").alias("hour"), window.alias("window"), "thread_id")
    counted = changes.agg(F.count("*").alias("entries")).groupBy("hour")
    return counted.agg(
        F.sum("entries").alias("entries"),
        F.count("*").alias("changes"),
        F.countDistinct("window").alias("windows"),
        F.round(F.sum("entries") / F.count("*"), 3).alias("entries_per_change"),
    ).orderBy("hour")


LagBy = Literal["partition", "agent_id", "thread_id", "hour"]


def lag(entries: DataFrame, flushed: DataFrame, by: LagBy = "partition") -> DataFrame:
    """Return what Postgres lacks, per partition, agent, thread or hour: how many entries, and the oldest's age in s.

    `flushed`: partition, position (``SELECT partition, cursor_seq AS position FROM bufstore.buffer_partitions``).
    Entries that wait in `buffer_waiting` are not counted, nor is what belongs to no partition. `entries` must have the
    column partition, too. `agent_id` is null for an entry without a run.
    """
    from pyspark.sql import functions as F

    check_choice(by, LagBy, "by", ConfigError)
    behind = entries.join(flushed.withColumnRenamed("position", "cursor"), "partition", "left").where(
        (F.col("partition") >= 0) & (F.col("position") > F.coalesce("cursor", F.lit(0)))
    )
    if by == "agent_id":
        behind = behind.withColumn("agent_id", _agent(behind))
    elif by == "hour":
        behind = behind.withColumn("hour", F.date_trunc("hour", "stored_at"))
    age = (F.unix_micros(F.current_timestamp()) - F.unix_micros(F.min("stored_at"))) / F.lit(1e6)
    return behind.groupBy(by).agg(F.count("*").alias("entries"), F.round(age, 3).alias("oldest_s")).orderBy(by)


def _checkpoints(entries: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return entries.where(F.col("kind") == "checkpoint").select(
        "stored_at", "thread_id", "bytes", _agent(entries).alias("agent_id"), _json(entries).alias("messages")
    )


def _agent(entries: DataFrame) -> Column:
    """Return the column of the run's agent, where the run is JSON or has columns of its own."""
    from pyspark.sql import functions as F

    return F.get_json_object("run", "$.agent_id") if dict(entries.dtypes)["run"] == "string" else F.col("run.agent_id")


def _json(entries: DataFrame) -> Column:
    from pyspark.sql import functions as F

    return F.col("messages") if dict(entries.dtypes)["messages"] == "array<string>" else F.col("messages.json")


def _totals() -> list[Column]:
    from pyspark.sql import functions as F

    characters = F.aggregate("messages", F.lit(0).cast("long"), lambda total, m: total + F.length(m))
    return [
        F.count("*").alias("checkpoints"),
        F.sum(F.size("messages")).alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.sum(F.ceil(characters / F.lit(CHARACTERS_PER_TOKEN))).alias("tokens"),
    ]
