"""Spark looks for modules ``pyspark_*`` by itself: so ``format("bufstore")`` needs no registration."""

from contextlib import suppress

# An error here would fail every Python source of Spark. With a PySpark before 4.2, only this format is missing.
with suppress(ImportError):
    from bufstore.spark.sink.bufstore_format import BufstoreFormat as DefaultSource

__all__ = ["DefaultSource"]
