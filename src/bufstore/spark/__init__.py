"""Jobs that outgrow one process, on Spark through PySpark. Needs the `spark` extra.

Importing this does not import Spark.
"""

from typing import TYPE_CHECKING

from bufstore import _lazy

if TYPE_CHECKING:
    from bufstore.errors import ArchiveOvertaken as ArchiveOvertaken
    from bufstore.errors import DataLoss as DataLoss
    from bufstore.errors import PositionPassed as PositionPassed
    from bufstore.spark.config import Deployment as Deployment
    from bufstore.spark.config import SinkConfig as SinkConfig
    from bufstore.spark.drain import DrainReport as DrainReport
    from bufstore.spark.drain import bulk_drain as bulk_drain
    from bufstore.spark.java import ensure_java as ensure_java
    from bufstore.spark.log_archive.archive_job import ArchiveReport as ArchiveReport
    from bufstore.spark.log_archive.archive_job import archive as archive
    from bufstore.spark.log_archive.manifests import Manifest as Manifest
    from bufstore.spark.log_archive.restore_job import RestoreReport as RestoreReport
    from bufstore.spark.log_archive.restore_job import restore as restore
    from bufstore.spark.log_archive.tables_job import TablesReport as TablesReport
    from bufstore.spark.log_archive.tables_job import compact as compact
    from bufstore.spark.log_archive.tables_job import expire as expire
    from bufstore.spark.log_archive.tables_job import tabulate as tabulate
    from bufstore.spark.sink.foreach_batch import CheckpointSink as CheckpointSink
    from bufstore.spark.sink.foreach_batch import checkpoint_sink as checkpoint_sink
    from bufstore.spark.spark_session import session as session
    from bufstore.spark.tables.held_position import HeldPosition as HeldPosition
    from bufstore.spark.tables.held_position import hold_position as hold_position
else:
    # Spark starts a process for each step of planning a read or write of our formats, and each process imports this.
    __all__, __getattr__, __dir__ = _lazy.names(
        __name__,
        {
            "bufstore.errors": ("ArchiveOvertaken", "DataLoss", "PositionPassed"),
            "bufstore.spark.config": ("Deployment", "SinkConfig"),
            "bufstore.spark.drain": ("DrainReport", "bulk_drain"),
            "bufstore.spark.java": ("ensure_java",),
            "bufstore.spark.log_archive.archive_job": ("ArchiveReport", "archive"),
            "bufstore.spark.log_archive.manifests": ("Manifest",),
            "bufstore.spark.log_archive.restore_job": ("RestoreReport", "restore"),
            "bufstore.spark.log_archive.tables_job": ("TablesReport", "compact", "expire", "tabulate"),
            "bufstore.spark.sink.foreach_batch": ("CheckpointSink", "checkpoint_sink"),
            "bufstore.spark.spark_session": ("session",),
            "bufstore.spark.tables.held_position": ("HeldPosition", "hold_position"),
        },
    )
