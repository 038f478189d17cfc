"""A Spark session for jobs on one machine, quiet and on the loopback; on a cluster, use the one you have."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bufstore.spark.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Off by default in Spark: filters of a query reach ``format("bufstore")``, which then reads less.
_PUSHING = {"spark.sql.python.filterPushdown.enabled": "true"}
#: For a master on this machine: nothing listens beyond it, nothing is drawn on the terminal.
_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Spark's 200 are meant for a cluster.
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
}


def session(app: str = "bufstore", master: str = "local[*,4]", **conf: str) -> SparkSession:
    """A session, or the one there is, in which filters of queries are pushed down to ``format("bufstore")``.

    ``local[*,4]``: all cores, and four attempts of a task, as on a cluster.

    ``sc://host``: Spark Connect, which needs no Java here. `conf`: settings of Spark: ``**{"spark.ui.port": "4041"}``,
    or with ``_`` for each ``.`` in a name that has none (``spark_ui_port="4041"``). Raises ConfigError without a Java,
    ImportError without PySpark.
    """
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as e:
        raise ImportError("bufstore.spark.session needs pyspark: pip install 'bufstore[spark]'", name=e.name) from e

    if master.startswith("sc://"):
        return _configured(SparkSession.builder.remote(master), _PUSHING | _named(conf))
    ensure_java()
    # Workers with the interpreter and the packages of this process.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = _PUSHING | _named(conf)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings = _LOCAL | settings
    return _configured(SparkSession.builder.appName(app).master(master), settings)


def _configured(builder: SparkSession.Builder, settings: Mapping[str, str]) -> SparkSession:
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _named(conf: Mapping[str, str]) -> dict[str, str]:
    # A name with dots is as it is: spark.executorEnv.JAVA_HOME.
    return {name if "." in name else name.replace("_", "."): value for name, value in conf.items()}
