"""Parents and children: what a change of lineage may do, and the edits that carry it out.

A change is checked on the lineage as it is, and carried out edit by edit. The caller makes sure that no other change
of lineage comes between: the memory store runs nothing else meanwhile, Postgres holds a lock, a buffered store
keeps a record (`bufstore.threads.buffered_lineage`).
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from bufstore.errors import InvalidQuery, LineageError, NotFound, Rejected
from bufstore.newest import Newest
from bufstore.threads import edits
from bufstore.threads.model import Run, Thread
from bufstore.types import Receipt, check_choice, check_id

#: How many threads are remembered whose parent was found good.
_REMEMBERED = 10_000

FindThread = Callable[[str], Awaitable[Thread | None]]


class Children(enum.StrEnum):
    """What happens to a deleted thread's children."""

    #: A thread with children is not deleted: LineageError.
    REJECT = "reject"
    #: The children lose their parent and stay.
    DETACH = "detach"
    #: All descendants are deleted, before the thread itself.
    CASCADE = "cascade"


class LineageChange(msgspec.Struct, frozen=True, array_like=True):
    """A new parent for a thread (or none), or, with `children`, its deletion."""

    thread_id: str
    parent_thread_id: str | None = None
    children: Children | None = None


Going = Callable[[Sequence[str]], Awaitable[None]]


class Family(NamedTuple):
    """Threads and their edits, as one change of lineage sees them."""

    thread: FindThread
    #: The ids of all children of a thread.
    children: Callable[[str], Awaitable[list[str]]]
    edit: Callable[[edits.WantedEdit], Awaitable[Receipt]]
    #: Called with the descendants that a deletion takes along, before it deletes the first of them.
    going: Going | None = None


def new_parent(thread_id: str, parent_thread_id: str | None) -> LineageChange:
    """See `ThreadRunStore.set_parent`. Raises InvalidId, and LineageError for a thread that would be its own parent."""
    check_id(thread_id, "thread_id")
    if parent_thread_id is not None:
        check_id(parent_thread_id, "parent_thread_id")
    if thread_id == parent_thread_id:
        raise LineageError(f"thread {thread_id!r} cannot be its own parent")
    return LineageChange(thread_id, parent_thread_id)


def deletion(thread_id: str, children: Children) -> LineageChange:
    """See `ThreadRunStore.delete_thread`. Raises InvalidId, InvalidQuery."""
    check_choice(children, Children, "children", InvalidQuery)
    return LineageChange(check_id(thread_id, "thread_id"), children=children)


class NamedParents:
    """Checks the parent that a run names, before the first checkpoint; later ones pay nothing while it is remembered.

    A parent is sticky: once a thread has one, later runs cannot change it. A checked parent is remembered for this
    process's life, or until this process changes the lineage of any thread. A change that is refused forgets nothing.

    A new thread is nobody's ancestor, so it can get any parent that exists. An existing thread without a parent could
    close a circle with another thread that gets one at the same moment. So `change` sets its parent in turn with other
    changes, before the checkpoint, and after everything else that may stand against the checkpoint: what is refused,
    or repeats another, changes nothing, unless another writer comes between (docs/adr/0007-lineage-by-a-record.md).
    """

    def __init__(
        self,
        thread: FindThread,
        change: Callable[[LineageChange], Awaitable[Receipt]] | None = None,
    ) -> None:
        """`change` carries out a change of lineage in turn with others; None where nothing can come between."""
        self._thread = thread
        self._change = change
        self._good: Newest[str, str] = Newest(_REMEMBERED)

    async def agreed(self, run: Run) -> bool:
        """Return whether a checkpoint with this run may be written as it is. Changes nothing.

        False: the thread cannot get the parent that the run names, or only in turn with other changes of lineage.
        Raises LineageError for a run that names its own thread.
        """
        parent, good = run.parent_thread_id, self._good
        if parent is None or good.get(run.thread_id) == parent:
            return True
        if parent == run.thread_id:  # nobody can have stored that, so it repeats nothing
            raise LineageError(f"thread {parent!r} cannot be its own parent")
        thread = await self._thread(run.thread_id)
        if thread is None:
            try:
                await check_parent(self._thread, run.thread_id, parent)
            except LineageError:
                return False
        elif thread.parent_thread_id is None:
            return False
        good[run.thread_id] = parent
        return True

    async def check(self, run: Run) -> None:
        """Raise LineageError if the run names a parent that its thread cannot get; a thread that has one keeps it."""
        parent = run.parent_thread_id
        if parent is None or await self.agreed(run):
            return
        if self._change is not None and await self._thread(run.thread_id) is not None:
            if await self._thread(parent) is None:  # no change of lineage makes it: nothing to wait for
                raise nowhere(run.thread_id, parent)
            # The thread may be deleted meanwhile; then it will be new.
            with contextlib.suppress(NotFound):
                await self._change(new_parent(run.thread_id, parent))
                return
        await check_parent(self._thread, run.thread_id, parent)

    def forget(self) -> None:
        """The lineage has changed: what was found before is not remembered any more."""
        self._good = Newest(_REMEMBERED)  # a check that has begun remembers in the memory that it began with

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """The lineage changes in this context, unless it ends as Rejected: then all is as it was."""
        try:
            yield
        except Rejected:
            raise
        except BaseException:
            self.forget()
            raise
        self.forget()


async def check(family: Family, wanted: LineageChange) -> None:
    """Raise NotFound or LineageError unless the change may be carried out."""
    thread_id = wanted.thread_id
    if await family.thread(thread_id) is None:
        raise NotFound(f"there is no thread {thread_id!r}")
    if wanted.children is None:
        await check_parent(family.thread, thread_id, wanted.parent_thread_id)
    elif wanted.children is Children.REJECT and await family.children(thread_id):
        raise LineageError(f"thread {thread_id!r} has children")


async def check_parent(thread: FindThread, thread_id: str, parent_thread_id: str | None) -> None:
    """Raise LineageError if the thread would be among its own ancestors, or one of them does not exist."""
    seen = {thread_id}
    above = parent_thread_id
    while above is not None:
        if above in seen:
            raise LineageError(f"thread {thread_id!r} would be among its own ancestors")
        seen.add(above)
        ancestor = await thread(above)
        if ancestor is None:
            raise nowhere(thread_id, above)
        above = ancestor.parent_thread_id


def nowhere(thread_id: str, above: str) -> LineageError:
    """The error for a thread that would descend from one that there is none of."""
    return LineageError(f"thread {thread_id!r} would descend from thread {above!r}, which does not exist")


async def carry_out(family: Family, wanted: LineageChange) -> Receipt:
    """Write the edits, the named thread's last. Safe to repeat. Raises NotFound when that thread is gone already."""
    thread_id = wanted.thread_id
    if wanted.children is None:
        return await family.edit(edits.set_parent(thread_id, wanted.parent_thread_id))
    if wanted.children is Children.DETACH:
        for child in await family.children(thread_id):
            with contextlib.suppress(NotFound):
                await family.edit(edits.detach(child, thread_id))
    elif wanted.children is Children.CASCADE:
        below = await descendants(family, thread_id)
        if family.going is not None:
            await family.going(below)
        for descendant in reversed(below):
            with contextlib.suppress(NotFound):
                await family.edit(edits.delete_thread(descendant))
    return await family.edit(edits.delete_thread(thread_id))


async def descendants(family: Family, thread_id: str) -> list[str]:
    """All descendants, children before their own children. Ends even if the lineage has a cycle."""
    found: dict[str, None] = {}
    todo = [thread_id]
    while todo:
        for child in await family.children(todo.pop()):
            if child != thread_id and child not in found:
                found[child] = None
                todo.append(child)
    return list(found)
