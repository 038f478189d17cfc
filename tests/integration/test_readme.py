"""The code of README, OWN_STORE and SPARK that starts servers of its own runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import JAVA_OPTIONS

_ROOT = Path(__file__).parent.parent.parent
_TEXT = "\n".join((_ROOT / name).read_text() for name in ("README.md", "docs/OWN_STORE.md", "docs/SPARK.md"))
_BLOCKS = [b for b in re.findall(r"^```python\n(.*?)^```$", _TEXT, re.DOTALL | re.MULTILINE) if "with Servers()" in b]
_SAYS = ["Where is my bag?", "20 messages in my own table", "5 threads, 100 checkpoints"]


#: That of Spark starts a Java of its own.
_MARKS = [(), (), pytest.mark.long]


@pytest.mark.parametrize(
    ("code", "says"),
    [pytest.param(*block, marks=marks) for *block, marks in zip(_BLOCKS, _SAYS, _MARKS, strict=True)],
    ids=["first", "own-store", "spark"],
)
def test_the_code_runs(code: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(code)
    command, env = [sys.executable, "-W", "error", str(file)], os.environ | {"JDK_JAVA_OPTIONS": JAVA_OPTIONS}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
