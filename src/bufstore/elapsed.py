"""Measures time as it passes outside this process, where others may act.

The clock of an event loop stands still while the machine is suspended, but others go on flushing and purging. So a
guard that says "no more time can have passed than this" adds the suspended time that the kernel reports. Where the
kernel reports nothing (systems other than Linux; a virtual machine that was stopped without its kernel's knowledge), a
suspension goes unnoticed: docs/adr/0020.
"""

from __future__ import annotations

import asyncio
import sys
import time

#: Clocks that are read within so many seconds are read at one moment.
_SAME_MOMENT_S = 0.01

if sys.platform == "linux":

    def suspended_s() -> float:
        """Return how many seconds the machine has been suspended since it was started."""
        while True:
            before = time.clock_gettime(time.CLOCK_MONOTONIC)
            since_start = time.clock_gettime(time.CLOCK_BOOTTIME)
            after = time.clock_gettime(time.CLOCK_MONOTONIC)
            # This process may stand still between two of these: then it would seem as if less time had passed.
            if after - before < _SAME_MOMENT_S:
                return since_start - after

    def since_start_s() -> float:
        """Return the seconds since the machine was started, those included for which it was suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def suspended_s() -> float:
        """Return 0: the time is unknown on this system."""
        return 0.0

    def since_start_s() -> float:
        """Return the seconds since some moment; whether suspended ones are included depends on the system."""
        return time.monotonic()


def now_s() -> float:
    """Return the seconds since some moment; only differences mean something. Needs a running event loop."""
    return asyncio.get_running_loop().time() + suspended_s()
