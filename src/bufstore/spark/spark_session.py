"""A Spark session for jobs on one machine, quiet and on the loopback; on a cluster, use the session that you have."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bufstore.spark.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Settings for a master on this machine: nothing listens beyond it, nothing is drawn on the terminal.
_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Spark's default of 200 is meant for a cluster.
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
}


def session(app: str = "bufstore", master: str = "local[*,4]", **conf: str) -> SparkSession:
    """Return a session (the existing one, if any). ``local[*,4]``: all cores, and four attempts of a task.

    ``sc://host``: Spark Connect, which needs no Java here. `conf`: settings of Spark, as ``**{"spark.ui.port":
    "4041"}`` or as ``spark_ui_port="4041"``: in a name without dots, each ``_`` stands for a dot. Raises ConfigError
    without a Java, ImportError without PySpark.
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as e:
        raise ImportError("bufstore.spark.session needs pyspark: pip install 'bufstore[spark]'", name=e.name) from e

    if master.startswith("sc://"):
        return _configured(SparkSession.builder.remote(master), _named(conf))
    ensure_java()
    # So that the workers have the interpreter and the packages of this process.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = _named(conf)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = _LOCAL | settings
    return _configured(SparkSession.builder.appName(app).master(master), settings)


def _configured(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _named(conf: Mapping[str, str]) -> dict[str, str]:
    # A name with dots stays as it is, as spark.executorEnv.JAVA_HOME.
    return {name if "." in name else name.replace("_", "."): value for name, value in conf.items()}
