"""How much a test tries: less in `make unit` and `make test`, more in `make thorough`."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

#: How many times as many as in `make test-long`.
FACTOR = float(os.environ.get("BUFSTORE_THOROUGH", "1"))
#: Hypothesis's own number, for tests that name none.
_USUAL = 100


def examples(count: int = _USUAL, **more: Any) -> settings:
    """Try `count` examples. How long one takes says more of what else runs than of the code."""
    return settings(max_examples=max(1, round(count * FACTOR)), deadline=None, **more)


def seldom(*values: Any) -> list[Any]:
    """Values of a parameter that only `make test-long` tries: others are enough to see most mistakes."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]
