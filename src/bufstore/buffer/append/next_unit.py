"""Decides which of a lane's writes go out together next, and as what entries; no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Generic, NamedTuple, Protocol

import msgspec

from bufstore.buffer import producers, recent_keys
from bufstore.buffer.append.tip import Draft, NeedBase, NeedVersion, Prepare, Tip
from bufstore.buffer.domain import M
from bufstore.buffer.entry import Base, header_of
from bufstore.buffer.groups.group import size_of
from bufstore.buffer.places import ENTRIES_MAX
from bufstore.errors import IdempotencyConflict, Rejected, TooLarge
from bufstore.jetstream.messages import Outgoing
from bufstore.types import Receipt

#: How many bytes of one thread go out at a time: larger groups gain nothing (`bufstore.buffer.groups.sequencer`).
UNIT_BYTES_MAX = 256 << 10


class QueuedWrite(Protocol[M]):
    """A write that waits in a queue."""

    @property
    def prepare(self) -> Prepare[M]: ...
    @property
    def id(self) -> int: ...
    @property
    def item(self) -> bytes:
        """The write's idempotency key (`bufstore.buffer.recent_keys`)."""

    @property
    def keyed(self) -> bool:
        """Whether the caller gave the key. Such a write has no mark."""

    @property
    def mark(self) -> bytes | None:
        """The producer that numbers this write, and the number (`bufstore.buffer.producers`)."""

    @property
    def after(self) -> QueuedWrite[M] | None:
        """The write that must be stored before this one, or with it."""

    @property
    def ended(self) -> bool:
        """Whether the caller has an answer, or gave up."""

    @property
    def failed(self) -> bool:
        """Whether the write ended and is not known to be stored."""


class Limits(NamedTuple):
    """How many bytes entries may have."""

    entry_bytes_max: int
    #: The most bytes of all entries that go into one message of the log.
    unit_bytes_max: int


class Need(Enum):
    """What must be looked up before the first remaining write can be judged."""

    #: What the log shows of the thread now: the tip by which the write would be refused may be out of date.
    TIP = "tip"
    #: The thread's content.
    BASE = "base"
    #: The thread's version, as Postgres has judged it (`Tip.judged`), or the content.
    VERSION = "version"
    #: What Postgres remembers of the thread's keys and producers.
    ROW = "row"


class NotTried(Exception):
    """The write before it in its series failed."""


class Drafted(msgspec.Struct, Generic[M], gc=False, eq=False):
    """A write that goes out with the unit."""

    draft: Draft[M]
    message: Outgoing
    #: How many bytes the message takes of a group, at most.
    size: int
    #: The thread's tip once the write is stored.
    after: Tip[M]


class Taken(msgspec.Struct, Generic[M]):
    """What happens to the first writes of a queue."""

    #: One for each of these writes, in order: it goes out with the unit, its caller is told that it repeats another or
    #: why it is refused, or it had ended before (None). The writes behind these stay in the queue.
    outcomes: list[Drafted[M] | Receipt | Exception | None]
    #: What must be known before anything goes out; None: nothing.
    needs: Need | None = None


def next_unit(
    thread_id: str, subject: str, queue: Iterable[QueuedWrite[M]], before: Tip[M], limits: Limits, looked_up: int
) -> Taken[M]:
    """Decide which of the queue's first writes go out behind the tip `before`, and which end without going out.

    `subject`: the thread's. `looked_up`: how many writes at the front of the queue had come when the tip was read. The
    drafts that go out have changed the tip's memory; a caller that does not send them undoes them, the last first.
    """
    outcomes: list[Drafted[M] | Receipt | Exception | None] = []
    refused: list[QueuedWrite[M]] = []
    tip = before
    size = count = 0
    for number, write in enumerate(queue):
        if write.ended:
            outcomes.append(None)
            continue
        if write.after is not None and (write.after.failed or write.after in refused):
            refused.append(write)
            outcomes.append(NotTried())
            continue
        # A write that expects nothing in the log goes alone: it may land late, after a purge, and only its own note
        # of its base (`chain.superseded`) gives it away; entries behind it have no such note.
        if count and not before.seq:
            break
        outcome = _judge(thread_id, subject, write, tip, limits, not count, number < looked_up)
        if isinstance(outcome, Drafted):
            size += outcome.size
            if count and (size > min(limits.unit_bytes_max, UNIT_BYTES_MAX) or count == ENTRIES_MAX):
                outcome.draft.undo()
                break
            count += 1
            tip = outcome.after
        elif count:
            # A refusal must rest on a durable tip, and the writes before it in this unit may still fail. So a write
            # that would be refused is left for the next round.
            break
        elif isinstance(outcome, Need):
            return Taken(outcomes, outcome)
        elif isinstance(outcome, Exception):
            refused.append(write)
        outcomes.append(outcome)
    return Taken(outcomes)


def needs(write: QueuedWrite[M]) -> Need | None:
    """What the write needs whatever the thread's last entry is, so that the entry need not be looked up before.

    None: it needs that entry. So does a write that may repeat another: its answer needs no content, and so no Postgres.
    """
    if write.keyed or write.mark is not None:
        return None
    # An entry of unknown content may be enough to stand behind, also while Postgres is away.
    an_entry: Tip[M] = Tip(1, 1, Base.CHAINED, 0, 0, b"", None)
    try:
        write.prepare(an_entry).undo()
    except NeedBase:
        return Need.BASE
    except NeedVersion:
        return Need.VERSION
    except Exception:  # the write is judged, and its caller is told, once the tip is known
        return None
    return None


def _judge(
    thread_id: str, subject: str, write: QueuedWrite[M], tip: Tip[M], limits: Limits, first: bool, looked_up: bool
) -> Drafted[M] | Receipt | Exception | Need:
    """What happens to a write behind `tip`; a draft is undone unless the write goes out."""
    if write.keyed:
        same = recent_keys.find(tip.keys, write.item)
        if same is not None:
            return _repeat(thread_id, tip) if same else other_content(thread_id)
        if not tip.keys_complete:
            return Need.ROW
    elif write.mark is not None:
        if producers.holds(tip.producers or b"", write.mark):
            return _repeat(thread_id, tip)
        if tip.producers is None:
            return Need.ROW
    try:
        draft = write.prepare(tip)
    except NeedBase:
        return Need.BASE
    except NeedVersion:
        return Need.VERSION
    except Exception as e:
        return Need.TIP if isinstance(e, Rejected) and not looked_up else e
    payload = draft.payload
    if len(payload) > limits.entry_bytes_max:
        draft.undo()
        return TooLarge(len(payload), limits.entry_bytes_max)
    version, memory = draft.version, draft.memory
    keys = recent_keys.add(tip.keys, write.item)
    complete = tip.keys_complete or recent_keys.full(keys)
    known = tip.producers if write.mark is None else producers.add(tip.producers or b"", write.mark)
    header = header_of(
        write.id, tip.id, tip.base, tip.seen, version, draft.self_contained, keys, complete, known, payload
    )
    message = Outgoing(subject, payload, header, tip.seq if first else None)
    after = Tip(-1, write.id, Base.CHAINED, 0, version, keys, memory, 0, complete, known, judged=tip.judged)
    return Drafted(draft, message, size_of(message), after)


def _repeat(thread_id: str, tip: Tip[M]) -> Receipt:
    return Receipt(thread_id, tip.seq or tip.flushed_seq, tip.id, tip.version, repeated=True)


def other_content(thread_id: str) -> IdempotencyConflict:
    """The error for a key that comes again with different content."""
    return IdempotencyConflict(f"thread {thread_id!r}: the idempotency key was already used with different content")
