"""What jobs tell Spark of themselves, and ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DESCRIPTION = "spark.job.description"


def context_of(df: DataFrame) -> Any:
    """The Spark context behind a DataFrame; None on Connect, whose session has none."""
    from pyspark.errors import PySparkException

    try:
        return df.sparkSession.sparkContext
    except PySparkException:
        return None


def cores_of(spark: SparkSession) -> int | None:
    """Of all executors; None on Connect, which does not tell."""
    context = context_of(spark.range(0))
    return int(context.defaultParallelism) if context is not None else None


@contextmanager
def described(df: DataFrame, what: str) -> Iterator[None]:
    """Name the jobs of this thread inside the block in Spark's UI, where there is one to tell."""
    context = context_of(df)
    if context is None:
        yield
        return
    before = context.getLocalProperty(_DESCRIPTION)
    context.setJobDescription(what)
    try:
        yield
    finally:
        context.setLocalProperty(_DESCRIPTION, before)
