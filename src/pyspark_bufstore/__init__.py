"""Spark looks for modules ``pyspark_*`` by itself: so ``format("bufstore")`` needs no registration."""

from contextlib import suppress

# An error here would be one of every Python source: with a PySpark before 4.2 there is just no such format.
with suppress(ImportError):
    from bufstore.spark.sink.bufstore_format import BufstoreFormat as DefaultSource

__all__ = ["DefaultSource"]
