"""The checks for apps' stores (`bufstore.testing`) themselves."""

from __future__ import annotations

import subprocess
import sys

_CALL = """
import asyncio
from bufstore.errors import ConfigError
from bufstore.testing import CHECKS
try:
    asyncio.run(CHECKS[0](object()))
except ConfigError as e:
    print(e)
"""


def test_checks_do_not_pass_for_lack_of_assertions() -> None:
    """Regression: with -O, most checks passed for a store that keeps nothing."""
    ran = subprocess.run([sys.executable, "-O", "-c", _CALL], capture_output=True, text=True, timeout=60, check=True)
    assert "without -O" in ran.stdout
