"""How a buffered store is doing."""

from __future__ import annotations

from dataclasses import dataclass

from bufstore.buffer.flusher_state import FlusherState


@dataclass(frozen=True)
class Statistics:
    """Counters of this process since the start, and where the buffer stands."""

    appended: int
    conflicts: int
    flusher: FlusherState
    log_bytes: int
    log_bytes_max: int
    #: Messages sent to and received from NATS.
    nats_sent: int
    nats_received: int


@dataclass(frozen=True)
class Health:
    """Whether this process can write, read and flush; empty strings mean yes."""

    log: str
    store: str
    flusher: str

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return not (self.log or self.store or self.flusher)
