"""How much a pull asks a consumer for. Pure.

The server ends a pull before a message that is larger than what is left of the pull's `max_bytes`. A message that is
larger than all of `max_bytes` (it was stored when the server took larger ones) would end every pull: it is asked for
alone, and without that limit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PullSizes:
    """The sizes of one consumer's pulls."""

    bytes_max: int
    #: How many messages the server lets a pull ask for; 0: any number.
    batch_max: int = 0
    #: How many messages had come, in all pulls, when a pull last ended for its bytes.
    _ended_at: int = 0
    _alone: bool = False

    def next(self, batch: int) -> dict[str, int]:
        """Return what the next pull asks for, at most `batch` messages."""
        if self._alone:
            self._alone = False
            return {"batch": 1}
        return {"batch": min(batch, self.batch_max or batch), "max_bytes": self.bytes_max}

    def ended(self, came: int) -> None:
        """Note that a pull ended for its bytes, when `came` messages had come in all pulls."""
        self._alone = came == self._ended_at
        self._ended_at = came
