"""Files in which a task puts what does not fit into memory."""

from __future__ import annotations

import os
import tempfile
from typing import IO


def local_file() -> IO[bytes]:
    """Return a file that is gone when it is closed or its process ends."""
    # Spark tells its workers which folders have room for such files.
    folders = [folder for folder in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if folder]
    return tempfile.TemporaryFile(dir=folders[0] if folders else None)
