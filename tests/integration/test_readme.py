"""README's code runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_README = (Path(__file__).parent.parent.parent / "README.md").read_text()
_BLOCKS = re.findall(r"^```python\n(.*?)^```$", _README, re.DOTALL | re.MULTILINE)
_SAYS = ["Where is my bag?", "5 threads, 100 checkpoints", "20 messages in my own table"]


@pytest.mark.parametrize(("code", "says"), list(zip(_BLOCKS, _SAYS, strict=True)), ids=["first", "spark", "own-store"])
def test_the_code_runs(code: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(code)
    done = subprocess.run([sys.executable, "-W", "error", str(file)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
