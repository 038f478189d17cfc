"""The servers' processor time, as the benchmarks count it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parent.parent.parent
_BURNT_S = 0.1
#: Uses this much processor time, prints a line, and waits for input to end.
_CHILD = f"import time\nwhile time.process_time() < {_BURNT_S}: pass\nprint(flush=True)\ninput()"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(_ROOT))
    from bench import processor

    return processor


def test_children_count_while_they_run_and_when_they_have_ended(processor: Any) -> None:
    before = processor.taken([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        assert processor.taken([child.pid]) >= _BURNT_S
        assert processor.taken([os.getpid()]) - before >= _BURNT_S
        child.stdin.write(b"\n")
    # The time of ended processes is counted in hundredths of a second, for user and system each.
    assert processor.taken([os.getpid()]) - before >= _BURNT_S - 0.02


def test_seconds_are_shared_out_among_appends(processor: Any) -> None:
    assert processor.shares(client=0.5, server=1.5, done=1_000_000) == {
        "client_cpu": 0.5,
        "server_cpu": 1.5,
        "cpu": 2.0,
    }
