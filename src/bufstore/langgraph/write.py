"""An operation as the entry behind a thread's tip."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bufstore.buffer.append.tip import Draft, NeedBase, Tip
from bufstore.errors import ConcurrentWriter, StoreUnavailable, ThreadQuarantined
from bufstore.langgraph.domain import Known


class Overtaken(Exception):
    """Somebody else may have written to the thread since this process saved the checkpoint that this one builds on."""


class Appending(msgspec.Struct, gc=False):
    """Makes the entry that may stand behind any other, as a checkpoint may be saved by anybody.

    Whether the thread's chain is whole is looked up before a process writes to it; with the store away it is enough
    that the log shows the thread.

    It is self-contained only where there is nothing that it could be missed in: checkpoints name values that only
    earlier entries carry, so what follows a parked one has to be parked, too.

    Many of these wait for the log at a time. One that the collector need not look at is cheaper than a closure.
    """

    thread_id: str
    #: An operation.
    payload: bytes
    store_is_down: Callable[[], bool]
    #: Whether nobody has written to a thread that the log does not show since it was read at a position. If somebody
    #: may have, what was read there is forgotten by the call.
    goes_on: Callable[[str, int], bool]
    #: Whether it deletes the thread.
    deletes: bool = False
    #: A thread that the log does not show is taken for new when the store is away.
    assume_new: bool = False
    #: The id of the thread's last entry when it was read; if that is another by now, and not one of this process,
    #: ConcurrentWriter is raised.
    seen: Callable[[], int] | None = None
    #: The id of the only entry that it may stand behind: if anybody has written since, ConcurrentWriter is raised.
    only_behind: int | None = None
    #: See `Known.life`: if it is another by now, Overtaken is raised.
    life: int | None = None
    #: The id of the entry that the last draft stands behind, if it was drafted on that.
    behind: int | None = None
    #: The thread's life behind it, if that is known.
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
        if tip.broken and not alone:
            if memory is not None and memory.cached:
                raise StoreUnavailable(f"only Postgres can tell whether thread {self.thread_id!r} is whole")
            raise ThreadQuarantined(self.thread_id, tip.seq)
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
