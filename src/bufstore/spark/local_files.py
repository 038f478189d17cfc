"""Files of a task, for what does not fit into memory."""

from __future__ import annotations

import os
import tempfile
from typing import IO


def local_file() -> IO[bytes]:
    """A file that is gone when it is closed, or with its process."""
    # Spark tells its workers where there is room for such.
    folders = [folder for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if folder]
    return tempfile.TemporaryFile(dir=folders[0] if folders else None)
