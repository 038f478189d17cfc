"""How many examples a test of a property tries: so many each time, and more in `make thorough`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

#: How many times more.
FACTOR = int(os.environ.get("BUFSTORE_THOROUGH", "1"))
#: Hypothesis's own number, for tests that name none.
_USUAL = 100


def examples(count: int = _USUAL, **more: Any) -> settings:
    """Try `count` examples. How long one takes says more of what else runs than of the code."""
    return settings(max_examples=count * FACTOR, deadline=None, **more)
