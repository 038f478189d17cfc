"""What jobs tell Spark about themselves, and what they ask it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DESCRIPTION = "spark.job.description"


def context_of(df: DataFrame) -> Any:
    """Return the Spark context behind a DataFrame; None on Connect, whose session has none."""
    from pyspark.errors import PySparkException

    try:
        return df.sparkSession.sparkContext
    except PySparkException:
        return None


def cores_of(spark: SparkSession) -> int | None:
    """Return the number of cores of all executors; None on Connect, which does not tell."""
    context = context_of(spark.range(0))
    return int(context.defaultParallelism) if context is not None else None


@contextmanager
def described(df: DataFrame, what: str) -> Iterator[None]:
    """Describe this thread's jobs inside the block as `what` in Spark's UI; without a context, do nothing."""
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
