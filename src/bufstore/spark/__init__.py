"""Jobs that outgrow one process, on Spark through PySpark. Needs the `spark` extra.

Importing this does not import Spark.
"""

from bufstore.errors import ArchiveOvertaken, DataLoss
from bufstore.spark.archive import ArchiveReport, Manifest, archive
from bufstore.spark.config import Deployment, SinkConfig
from bufstore.spark.drain import DrainReport, bulk_drain
from bufstore.spark.java import ensure_java
from bufstore.spark.restore import RestoreReport, restore
from bufstore.spark.session import session
from bufstore.spark.sink import CheckpointSink, checkpoint_sink

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
