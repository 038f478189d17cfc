"""Percentiles of any number of durations in bounded memory."""

from __future__ import annotations

import math
from collections import Counter

#: Neighbouring classes differ by this factor, so a percentile is right to half a percent.
_GROWTH = 1.01


class Latencies:
    """A histogram with classes of equal relative width."""

    def __init__(self) -> None:
        self._classes: Counter[int] = Counter()
        self.count = 0

    def add(self, seconds: float) -> None:
        self._classes[math.floor(math.log(max(seconds, 1e-9), _GROWTH))] += 1
        self.count += 1

    def percentile_ms(self, percent: float) -> float:
        """Return the duration, in milliseconds, that `percent` of all durations do not exceed; 0 if there are none."""
        rank = math.ceil(self.count * percent / 100)
        for index in sorted(self._classes):
            rank -= self._classes[index]
            if rank <= 0:
                return float(f"{_GROWTH ** (index + 0.5) * 1000:.3g}")
        return 0.0
