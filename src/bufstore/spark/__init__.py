"""Jobs that outgrow one process, on Spark through PySpark. Needs the `spark` extra.

Importing this does not import Spark.
"""

from bufstore.errors import ArchiveOvertaken, DataLoss
from bufstore.spark.config import Deployment, SinkConfig
from bufstore.spark.drain import DrainReport, bulk_drain
from bufstore.spark.java import ensure_java
from bufstore.spark.log_archive.archive_job import ArchiveReport, archive
from bufstore.spark.log_archive.manifests import Manifest
from bufstore.spark.log_archive.restore_job import RestoreReport, restore
from bufstore.spark.sink.foreach_batch import CheckpointSink, checkpoint_sink
from bufstore.spark.spark_session import session

__all__ = [
    "ArchiveOvertaken",
    "ArchiveReport",
    "CheckpointSink",
    "DataLoss",
    "Deployment",
    "DrainReport",
    "Manifest",
    "RestoreReport",
    "SinkConfig",
    "archive",
    "bulk_drain",
    "checkpoint_sink",
    "ensure_java",
    "restore",
    "session",
]
