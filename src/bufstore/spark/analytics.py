"""Common questions to a log, as functions of DataFrames.

In goes ``spark.read.format("threadlog")``, out comes a small table.

They need these columns. Name them in the option ``columns``: the source decodes only what is asked for.
position, stored_at, thread_id, kind, messages, run_id, run, bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["CHARACTERS_PER_TOKEN", "COLUMNS", "activity", "by_thread", "coalescing", "hot_threads", "lag"]

#: The columns that all of them need together.
COLUMNS = "position,stored_at,thread_id,kind,messages,run_id,run,bytes"

#: Characters of a token, roughly: for a comparison of threads and hours, not for a bill.
CHARACTERS_PER_TOKEN = 4


def activity(entries: DataFrame) -> DataFrame:
    """Per agent and hour: checkpoints, threads, messages, bytes in the log, estimated tokens of the new messages."""
    from pyspark.sql import functions as F

    return (
        _checkpoints(entries)
        .groupBy("agent_id", F.date_trunc("hour", "stored_at").alias("hour"))
        .agg(*_totals(), F.countDistinct("thread_id").alias("threads"))
        .orderBy("hour", "agent_id")
    )


def by_thread(entries: DataFrame) -> DataFrame:
    """Per thread: checkpoints, messages, bytes, estimated tokens, first and last time, checkpoints per minute."""
    from pyspark.sql import functions as F

    found = (
        _checkpoints(entries)
        .groupBy("thread_id")
        .agg(*_totals(), F.min("stored_at").alias("first_at"), F.max("stored_at").alias("last_at"))
    )
    minutes = F.greatest((F.unix_micros("last_at") - F.unix_micros("first_at")) / F.lit(60e6), F.lit(1 / 60))
    return found.withColumn("per_minute", F.round(F.col("checkpoints") / minutes, 3))


def hot_threads(entries: DataFrame, limit: int = 20) -> DataFrame:
    """The threads with the most checkpoints."""
    from pyspark.sql import functions as F

    return by_thread(entries).orderBy(F.desc("checkpoints"), "thread_id").limit(limit)


def coalescing(entries: DataFrame, window_s: float = 0.5) -> DataFrame:
    """Per hour: how many entries a flush with this window folds into one change, which is what Postgres saves."""
    from pyspark.sql import functions as F

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
    """What Postgres does not have yet, per partition, agent, thread or hour: entries, and the age of the oldest in s.

    `flushed`: partition, position (``SELECT partition, cursor_seq AS position FROM bufstore.buffer_partitions``).
    What waits in `buffer_waiting` is not counted. Needs the column partition of the entries, too. `agent_id` is null
    for what is no checkpoint.
    """
    from pyspark.sql import functions as F

    behind = entries.join(flushed.withColumnRenamed("position", "cursor"), "partition", "left").where(
        F.col("position") > F.coalesce("cursor", F.lit(0))
    )
    if by == "agent_id":
        behind = behind.withColumn("agent_id", F.get_json_object("run", "$.agent_id"))
    elif by == "hour":
        behind = behind.withColumn("hour", F.date_trunc("hour", "stored_at"))
    age = (F.unix_micros(F.current_timestamp()) - F.unix_micros(F.min("stored_at"))) / F.lit(1e6)
    return behind.groupBy(by).agg(F.count("*").alias("entries"), F.round(age, 3).alias("oldest_s")).orderBy(by)


def _checkpoints(entries: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    return entries.where(F.col("kind") == "checkpoint").withColumn("agent_id", F.get_json_object("run", "$.agent_id"))


def _totals() -> list[Column]:
    from pyspark.sql import functions as F

    characters = F.aggregate("messages", F.lit(0).cast("long"), lambda total, m: total + F.length(m))
    return [
        F.count("*").alias("checkpoints"),
        F.sum(F.size("messages")).alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.sum(F.ceil(characters / F.lit(CHARACTERS_PER_TOKEN))).alias("tokens"),
    ]
