"""What the buffer needs of its domain: what entries mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bufstore.buffer.entry import StoredEntry


class Inapplicable(Exception):
    """An entry cannot be applied, on whatever base: it is poison."""

    def __init__(self, entry_id: int, cause: str) -> None:
        super().__init__(cause)
        self.entry_id = entry_id


#: What the entries of this log mean: one change that equals the entries in order, on a thread of a version.
#: Raises Inapplicable.
Coalesce = Callable[[str, int, Sequence[StoredEntry]], Any]
