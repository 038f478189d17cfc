"""Threads, runs and messages as tables of Spark: ``spark.read.format("bufstore")``."""
