"""Makes an operation the next entry behind a thread's tip."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bufstore.buffer.append.tip import Draft, NeedBase, Tip
from bufstore.errors import ConcurrentWriter, StoreUnavailable, ThreadQuarantined
from bufstore.langgraph.domain import Known


class Overtaken(Exception):
    """Somebody else may have written to the thread since this process saved the checkpoint that this one builds on."""


class Appending(msgspec.Struct, gc=False):
    """Makes an entry that may stand behind any other, because anybody may save a checkpoint.

    Before a process writes to a thread, it looks up whether the thread's chain is whole. While the store is away, it is
    enough that the log shows the thread.

    The entry is self-contained only if it begins the thread or deletes it. Checkpoints name values that only earlier
    entries carry, so what follows a parked entry has to be parked, too.

    Many of these wait for the log at a time. One that the garbage collector need not look at is cheaper than a closure.
    """

    thread_id: str
    #: An operation.
    payload: bytes
    store_is_down: Callable[[], bool]
    #: Of a thread that the log does not show: tells whether nobody has written to it since it was read at a position.
    #: If somebody may have, the call forgets what was read there.
    goes_on: Callable[[str, int], bool]
    #: Whether the operation deletes the thread.
    deletes: bool = False
    #: Whether a thread that the log does not show is taken for new while the store is away.
    assume_new: bool = False
    #: Tells the id of the thread's last entry when it was read. If the last entry is another by now, and not one of
    #: this process, ConcurrentWriter is raised. None: anybody may have written since.
    seen: Callable[[], int] | None = None
    #: The id of the only entry that the operation may stand behind; else ConcurrentWriter is raised. None: any.
    only_behind: int | None = None
    #: The life (`Known.life`) that the thread must still have; else Overtaken is raised. None: any.
    life: int | None = None
    #: The id of the entry that the last draft stands behind; None if it was not drafted on one.
    behind: int | None = None
    #: The thread's life behind the last draft; None: not known.
    left: int | None = None

    def prepare(self, tip: Tip[Known]) -> Draft[Known]:
        """See `Prepare`."""
        memory, alone, seen = tip.memory, self.deletes, self.seen
        if memory is None and (not alone or seen is not None or self.only_behind is not None):
            if not self.store_is_down() or not (tip.seq or self.assume_new):
                raise NeedBase
            alone = not tip.seq
        from_memory = memory is not None and memory.cached and not tip.seq and not alone
        if from_memory and not self.goes_on(self.thread_id, tip.flushed_seq):
            raise NeedBase
        # What is parked is part of the thread: an operation that may only stand behind what was seen knows none of it.
        if tip.broken_since and (not alone or self.only_behind is not None):
            if memory is not None and memory.cached:
                raise StoreUnavailable(
                    f"Postgres is needed to check that the chain of thread {self.thread_id!r} is intact: retry once it "
                    "answers"
                )
            raise ThreadQuarantined(self.thread_id, tip.broken_since)
        if seen is not None and not (memory is not None and memory.own) and tip.id != seen():
            raise ConcurrentWriter(self.thread_id)
        if self.only_behind is not None and tip.id != self.only_behind:
            raise ConcurrentWriter(self.thread_id)
        if self.life is not None and (memory is None or memory.life != self.life):
            raise Overtaken
        if memory is not None and memory.new and not tip.seq:
            alone = True
        self.behind = tip.id if tip.seq or (memory is not None and not memory.cached) else None
        after = Known(own=True) if memory is not None or alone else None
        if after is not None and memory is not None:
            after.life = memory.life
        self.left = after.life if after is not None else None
        return Draft(self.payload, alone, tip.version + 1, after, _nothing)


def _nothing() -> None:
    pass
