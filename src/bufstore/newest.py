"""A memory with a bound."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(OrderedDict[K, V], Generic[K, V]):
    """The items that were set last, at most `most` of them; setting a key again makes its item the newest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __reduce__(self) -> tuple[type[Newest[K, V]], tuple[int]]:
        return type(self), (self._most,)  # what a process remembers is of no use to another one

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            self.popitem(last=False)
