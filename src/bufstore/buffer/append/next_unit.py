"""Which of a lane's writes go out together next, and as what entries; no I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bufstore.buffer import producers as producers
from bufstore.buffer import recent_keys
from bufstore.buffer.append.lane import Lane, Unit, Write
from bufstore.buffer.append.tip import M, NeedBase, Tip
from bufstore.buffer.entry import Base, Entry, encode
from bufstore.errors import BufstoreError, IdempotencyConflict, Rejected, TooLarge
from bufstore.jetstream.group_commit import BATCH_MESSAGES_MAX
from bufstore.jetstream.messages import Outgoing
from bufstore.types import Receipt

_UNIT_BYTES_MAX = 8 << 20


class NeedRow(Exception):
    """A key or a source's number can only be judged by what Postgres remembers of the thread."""


class _NotTried(Exception):
    """The write before it in its series failed."""


class Doubtful(Exception):
    """A write is to be refused because of a tip that another writer may have left behind by now."""


class Limits(NamedTuple):
    """Of a thread's messages."""

    subject: str
    #: The server's max_payload.
    message_bytes_max: int
    entry_bytes_max: int


def next_unit(
    lane: Lane[M],
    tip: Tip[M],
    limits: Limits,
    on_end: Callable[[Unit[M], int | Exception], None],
    *,
    looked_up: bool,
) -> Unit[M] | None:
    """Take writes off the lane's queue into a unit behind `tip`; None if all of them ended without one.

    `looked_up`: the tip was read just now. Raises Doubtful, NeedRow or NeedBase when the first of them needs more than
    `tip` to be judged; then nothing was taken.
    """
    unit: Unit[M] = Unit(lane, tip, on_end)
    size = 0
    while lane.queue:
        write = lane.queue[0]
        if write.done.done():
            lane.queue.popleft()
            continue
        if write.after is not None and write.after.failed:
            lane.queue.popleft()
            write.done.set_exception(_NotTried())
            continue
        # What expects nothing in the log goes alone: it may land late, after a purge, and is told by what it says
        # of its base (`chain.superseded`), which nothing behind it says.
        if unit.writes and not unit.before.seq:
            break
        # What is refused because of the tip must be refused because of a durable one: what stands in this
        # very unit may still fail. So such writes wait for the next round.
        first = not unit.writes
        known = recent_keys.find(tip.keys, write.item) if write.keyed else None
        unsure = write.keyed and known is None and not tip.keys_complete
        if write.mark is not None:
            known = known or (producers.holds(tip.producers or b"", write.mark) or None)
            unsure = unsure or (known is None and tip.producers is None)
        if unsure:
            if first:
                raise NeedRow
            break
        if known is not None:
            if not first:
                break
            lane.queue.popleft()
            _settle_repeat(lane.thread_id, write, tip, known)
            continue
        try:
            draft = write.prepare(tip)
        except NeedBase:
            if first:
                raise
            break
        except Exception as e:
            if not first:
                break
            if isinstance(e, Rejected) and not looked_up:
                raise Doubtful from e
            lane.queue.popleft()
            if not write.done.done():
                write.done.set_exception(e)
            continue
        keys = recent_keys.add(tip.keys, write.item)
        marks = tip.producers if write.mark is None else producers.add(tip.producers or b"", write.mark)
        entry = Entry(
            id=write.id,
            prev_id=tip.id,
            base=tip.base,
            seen=tip.seen,
            version=draft.version,
            self_contained=draft.self_contained,
            keys=keys,
            keys_complete=tip.keys_complete or recent_keys.full(keys),
            producers=marks,
            payload=draft.payload,
        )
        try:
            messages = _messages(entry, tip.seq if first else None, limits)
        except BufstoreError as e:
            draft.undo()
            if not first:
                break
            lane.queue.popleft()
            write.done.set_exception(e)
            continue
        size += len(draft.payload)
        if not first and (size > _UNIT_BYTES_MAX or len(unit.messages) + len(messages) > BATCH_MESSAGES_MAX):
            draft.undo()
            break
        lane.queue.popleft()
        complete = entry.keys_complete
        tip = Tip(-1, write.id, Base.CHAINED, 0, draft.version, keys, draft.memory, False, complete, marks)
        unit.add(write, draft, messages, tip)
    return unit if unit.writes else None


def _messages(entry: Entry, expected: int | None, limits: Limits) -> list[Outgoing]:
    if len(entry.payload) > limits.entry_bytes_max:
        raise TooLarge(len(entry.payload), limits.entry_bytes_max)
    parts = encode(entry, limits.message_bytes_max)
    if len(parts) > BATCH_MESSAGES_MAX:
        raise TooLarge(len(entry.payload), BATCH_MESSAGES_MAX * limits.message_bytes_max)
    subject = limits.subject
    return [Outgoing(subject, body, header, expected if i == 0 else None) for i, (header, body) in enumerate(parts)]


def _settle_repeat(thread_id: str, write: Write[M], tip: Tip[M], same: bool) -> None:
    if same:
        write.done.set_result(Receipt(thread_id, tip.seq or tip.flushed_seq, tip.id, tip.version, repeated=True))
    else:
        write.done.set_exception(other_content(thread_id))


def other_content(thread_id: str) -> IdempotencyConflict:
    """For a key that comes again with something else."""
    return IdempotencyConflict(f"thread {thread_id!r}: the idempotency key was already used with different content")
