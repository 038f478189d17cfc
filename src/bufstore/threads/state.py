"""A thread as a read shows it."""

from __future__ import annotations

import msgspec

from bufstore.buffer.domain import State
from bufstore.threads.model import Checkpoint, Thread, decode_message, decode_run


class ThreadState(State, frozen=True, kw_only=True):
    """A thread at one moment, encoded, with the watermark that tells which moment."""

    thread: Thread | None = None
    messages: list[bytes] = msgspec.field(default_factory=list)
    latest_run: bytes | None = None
    #: The newest record of each run that was saved in the overlaid tail.
    tail_runs: dict[str, bytes] = msgspec.field(default_factory=dict)
    #: What `save_thread_state` saved, encoded.
    state: bytes | None = None
    #: True when the tail deletes the thread: the store may still show runs that no longer exist.
    deleted: bool = False

    def checkpoint(self) -> Checkpoint | None:
        """What an app sees of the thread; None if there is no such thread."""
        if self.thread is None:
            return None
        return Checkpoint(
            thread=self.thread,
            messages=[decode_message(m) for m in self.messages],
            latest_run=decode_run(self.latest_run) if self.latest_run is not None else None,
            state=decode_message(self.state) if self.state is not None else None,
            partial=self.partial,
        )
