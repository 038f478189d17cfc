"""How many examples and values tests try: fewer in `make unit` and `make test`, more in `make thorough`."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

#: Factor on the number of examples of `make test-long`.
FACTOR = float(os.environ.get("BUFSTORE_THOROUGH", "1"))
#: Examples of a test that names no number: Hypothesis's default.
_USUAL = 100


def examples(count: int = _USUAL, **more: Any) -> settings:
    """Try `count` examples. There is no deadline: an example's time depends on what else runs on the machine."""
    return settings(max_examples=max(1, round(count * FACTOR)), deadline=None, **more)


def seldom(*values: Any) -> list[Any]:
    """Mark a parameter's values that only `make test-long` tries, because the others show most mistakes."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]
