"""The processor time of an append, in the appending process and in the storing server."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

#: True when each process has a clock (clock_getcpuclockid). psutil reads hundredths of a second.
_EXACT = sys.platform == "linux"
#: The figures of a `Meter`, with their unit.
UNITS = {"client_cpu": "µs", "server_cpu": "µs", "cpu": "µs"}


class Meter:
    """Starts when it is made. `pids` are those of the servers, whose children count too."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._server = taken(pids)
        self._client = time.process_time()

    def each(self, done: int) -> dict[str, float]:
        """Return the processor time of one of `done` appends in this process, in the servers and in both, in µs."""
        client = time.process_time() - self._client
        return shares(client, taken(self._pids) - self._server, done)


def shares(client: float, server: float, done: int) -> dict[str, float]:
    """Convert seconds of processor time to µs per append, for `done` appends."""
    seconds = {"client_cpu": client, "server_cpu": server, "cpu": client + server}
    return {name: 1e6 * spent / max(done, 1) for name, spent in seconds.items()}


def taken(pids: Sequence[int]) -> float:
    """Return the seconds of processor time of these processes and their children, including ended ones."""
    total = 0.0
    for pid in pids:
        parent = psutil.Process(pid)
        ended = parent.cpu_times()
        total += _own(parent) + ended.children_user + ended.children_system
        for child in parent.children():
            with suppress(psutil.Error, OSError):  # it has just ended
                total += _own(child)
    return total


def _own(process: psutil.Process) -> float:
    if _EXACT:
        return time.clock_gettime(~process.pid << 3 | 2)
    times = process.cpu_times()
    return float(times.user + times.system)
