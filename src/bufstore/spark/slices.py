"""Cuts a batch of Arrow, which may hold ten thousand large rows, into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow


def slices_of(batch: pyarrow.RecordBatch, bytes_max: int) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batch in pieces of at most `bytes_max`, as Arrow counts bytes; a larger row is a piece of its own."""
    left = [batch]
    while left:
        piece = left.pop()
        if piece.num_rows > 1 and piece.nbytes > bytes_max:
            half = piece.num_rows // 2
            left += [piece.slice(half), piece.slice(0, half)]
        else:
            yield piece
