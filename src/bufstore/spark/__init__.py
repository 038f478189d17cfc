"""Jobs that outgrow one process, on Spark through PySpark. Needs the `spark` extra.

Importing this does not import Spark.
"""

from bufstore.spark.config import Deployment, SinkConfig
from bufstore.spark.java import ensure_java
from bufstore.spark.session import session
from bufstore.spark.sink import CheckpointSink, checkpoint_sink

__all__ = ["CheckpointSink", "Deployment", "SinkConfig", "checkpoint_sink", "ensure_java", "session"]
