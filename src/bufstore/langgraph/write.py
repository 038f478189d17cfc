"""An operation as the entry behind a thread's tip."""

from __future__ import annotations

from collections.abc import Callable

from bufstore.buffer.append.tip import Draft, NeedBase, Prepare, Tip
from bufstore.errors import ConcurrentWriter, StoreUnavailable, ThreadQuarantined
from bufstore.langgraph.domain import Known


def appending(
    thread_id: str,
    payload: bytes,
    store_is_down: Callable[[], bool],
    *,
    deletes: bool = False,
    assume_new: bool = False,
    seen: Callable[[], int] | None = None,
) -> Prepare[Known]:
    """An entry that may stand behind any other, as a checkpoint may be saved by anybody.

    `payload`: an operation; `deletes`: it deletes the thread.

    Whether the thread's chain is whole is looked up before a process writes to it; with the store away it is enough
    that the log shows the thread. `assume_new`: a thread that the log does not show is taken for new then. `seen`: the
    id of the thread's last entry when it was read; if that is another by now, and not one of this process,
    ConcurrentWriter is raised.

    It is self-contained only where there is nothing that it could be missed in: checkpoints name values that only
    earlier entries carry, so what follows a parked one has to be parked, too.
    """

    def draft(tip: Tip[Known]) -> Draft[Known]:
        memory, alone = tip.memory, deletes
        if memory is None and (not deletes or seen is not None):
            if not store_is_down() or not (tip.seq or assume_new):
                raise NeedBase
            alone = not tip.seq
        if tip.broken and not alone:
            if memory is not None and memory.cached:
                raise StoreUnavailable(f"only Postgres can tell whether thread {thread_id!r} is whole")
            raise ThreadQuarantined(thread_id, tip.seq)
        if seen is not None and not (memory is not None and memory.own) and tip.id != seen():
            raise ConcurrentWriter(thread_id)
        if memory is not None and memory.new and not tip.seq:
            alone = True
        after = Known(own=True) if memory is not None or alone else None
        return Draft(payload, alone, tip.version + 1, after, _nothing)

    return draft


def _nothing() -> None:
    pass
