"""What a thread looks like with its unflushed tail: the same decision and the same change as a flush of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bufstore.buffer.chain import Plan, Watermark, plan
from bufstore.buffer.entry import Base, Malformed, StoredEntry
from bufstore.buffer.ports.domain import Inapplicable
from bufstore.threads.coalesce import coalesce
from bufstore.threads.model import Thread


class ThreadState(msgspec.Struct, frozen=True, kw_only=True):
    """A thread of one moment, encoded, with the row that tells which moment."""

    watermark: Watermark
    thread: Thread | None
    messages: list[bytes]
    latest_run: bytes | None
    #: Records of runs saved in the overlaid tail, newest of each.
    tail_runs: dict[str, bytes] = {}
    #: What `save_thread_state` saved, encoded.
    state: bytes | None = None
    #: True when the tail deletes the thread: of its runs, the store may still show some that are no more.
    deleted: bool = False
    #: True when the log alone told it, from a snapshot on: other runs of the thread may stand before that.
    partial: bool = False
    #: True when the log alone told it, from an entry on of which only Postgres knows whether it counts.
    unjudged: bool = False

    @property
    def whole(self) -> bool:
        """Whether the row is all that Postgres knows."""
        return not self.partial and not self.unjudged


def overlay(state: ThreadState, thread_id: str, items: Sequence[StoredEntry | Malformed]) -> ThreadState:
    """`state` with `items` of the log applied: all there are between its watermark and the last of them."""
    poison: set[int] = set()
    while True:
        todo = plan(state.watermark, items, complete=True, poison=frozenset(poison))
        try:
            return _applied(state, thread_id, todo)
        except Inapplicable as e:
            poison.add(e.entry_id)


def _applied(state: ThreadState, thread_id: str, todo: Plan) -> ThreadState:
    if not todo.apply:
        return msgspec.structs.replace(state, watermark=todo.watermark)
    change = coalesce(thread_id, state.watermark.version, todo.apply)
    if change.deleted:
        state = ThreadState(watermark=todo.watermark, thread=None, messages=[], latest_run=None, deleted=True)
        if change.gone:
            return state
    thread = change.project(state.thread or Thread(thread_id=thread_id))
    latest = thread.latest_run_id
    return ThreadState(
        watermark=todo.watermark,
        thread=thread,
        messages=[*state.messages[: change.keep], *change.messages],
        latest_run=change.runs.get(latest, state.latest_run) if latest is not None else None,
        tail_runs={**state.tail_runs, **change.runs},
        state=change.state if change.state is not None else state.state,
        deleted=state.deleted,
    )


def from_log_alone(thread_id: str, items: Sequence[StoredEntry | Malformed]) -> ThreadState | None:
    """The thread as far as the log knows it, without Postgres; None if the log does not know all its messages.

    Flushed entries stay in the log for a while, so it often holds a thread's whole story: from any self-contained
    entry on, when everything behind it is chained.
    """
    for i, item in enumerate(items):
        if isinstance(item, StoredEntry) and item.entry.self_contained:
            start = ThreadState(
                watermark=Watermark(applied_id=item.entry.prev_id), thread=None, messages=[], latest_run=None
            )
            state = overlay(start, thread_id, items[i:])
            if state.watermark.broken_since is not None:
                continue
            if item.entry.base is not Base.CHAINED:
                # If it does not count, no key and no number in it was used; who wrote behind it has seen to that.
                last = items[-1].entry if items[-1] is not item and isinstance(items[-1], StoredEntry) else None
                keys, producers = (last.keys, last.producers) if last is not None else (b"", None)
                watermark = msgspec.structs.replace(state.watermark, keys=keys, producers=producers or b"")
                state = msgspec.structs.replace(state, watermark=watermark, unjudged=True)
            return msgspec.structs.replace(state, partial=item.entry.base is not Base.NONE)
    return None
