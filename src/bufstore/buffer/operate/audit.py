"""The rules of a self-check, which log and Postgres must keep between them, without I/O.

Each rule holds at every moment, even in the middle of a flush, if Postgres is asked in the order that
`bufstore.buffer.operate.verify` keeps. A violation is either damage or a bug of ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from bufstore.buffer.chain import Watermark, plan
from bufstore.buffer.entry import Base, Item, Malformed, decode
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One violated rule."""

    #: Which one, in a word or two.
    rule: str
    #: What is there instead.
    detail: str
    #: None when it is about the whole log.
    partition: int | None
    #: None when it is about the whole partition.
    thread_id: str | None = None


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What a self-check looked at, and what it found."""

    partitions: int
    #: Threads that the log shows.
    threads: int
    #: Threads with entries that are not flushed yet, and how many entries those are, with those that wait.
    unflushed_threads: int
    unflushed_entries: int
    #: Entries that wait in the ledger for their threads' turn.
    waiting: int
    #: Entries in quarantine.
    quarantined: int
    #: The live flushers.
    members: Sequence[str]
    #: How many violations there are, and the first of them.
    wrong: int
    findings: Sequence[Finding]
    seconds: float

    @property
    def ok(self) -> bool:
        """True when nothing was found."""
        return not self.wrong


def verification_of_all(lanes: Sequence[Verification]) -> Verification:
    """Those of several lanes as one: sums, and the findings of all."""
    if len(lanes) == 1:
        return lanes[0]
    return Verification(
        partitions=sum(v.partitions for v in lanes),
        threads=sum(v.threads for v in lanes),
        unflushed_threads=sum(v.unflushed_threads for v in lanes),
        unflushed_entries=sum(v.unflushed_entries for v in lanes),
        waiting=sum(v.waiting for v in lanes),
        quarantined=sum(v.quarantined for v in lanes),
        members=sorted({member for v in lanes for member in v.members}),
        wrong=sum(v.wrong for v in lanes),
        findings=[finding for v in lanes for finding in v.findings],
        seconds=max(v.seconds for v in lanes),
    )


class ThreadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of one thread."""

    thread_id: str
    watermark: Watermark
    #: Up to where entries were discarded from quarantine.
    given_up: int
    #: Its last entry in the log. If nothing of it stands above the log's floor: one that may not be the last, or None.
    last: StoredMessage | None
    above_floor: bool
    #: Its entries above the watermark that the log has, or a later part of them.
    tail: Sequence[Item]
    #: Those that wait in the ledger, read before the watermark.
    waiting: Sequence[Item] = ()
    #: Which of the positions asked for are in quarantine.
    parked: Collection[int]
    #: The partition's cursor, read before all this.
    cursor: int
    #: The watermark's version, the store's, and how many messages the store has; None if the store is not asked.
    versions: tuple[int, int | None, int] | None = None


def thread_findings(facts: ThreadFacts) -> list[tuple[str, str]]:
    """The rules that the thread violates, each with what is there instead."""
    watermark, last = facts.watermark, facts.last
    found = []
    if last is not None and watermark.flushed_seq > last.seq:
        found.append(("watermark <= log", f"flushed up to {watermark.flushed_seq}, the log's last entry is {last.seq}"))
    if last is not None and watermark.flushed_seq == last.seq and not _explained(facts, last):
        found.append(("watermark applied", f"the entry at the watermark {last.seq} is neither applied nor parked"))
    waiting = {item.seq: item for item in facts.waiting}
    skipped = [item.seq for item in facts.tail if item.seq <= facts.cursor and item.seq not in waiting]
    if skipped:
        found.append(("cursor flushed", f"entry {skipped[0]} is not flushed, the cursor stands at {facts.cursor}"))
    if 0 < watermark.waits_to <= watermark.flushed_seq:
        found.append(
            ("waiting > watermark", f"entry {watermark.waits_to} waits, flushed up to {watermark.flushed_seq}")
        )
    changed = [item.seq for item in facts.tail if _id(waiting.get(item.seq, item)) != _id(item)]
    if changed:
        found.append(("waiting entry", f"the log and the ledger, where it waits, have different entries {changed[0]}"))
    unflushed = [*facts.waiting, *facts.tail]
    # What stands behind a discarded entry builds on that, until the thread has gone on without it.
    explained = watermark.broken_since is not None or 0 < watermark.flushed_seq <= facts.given_up
    torn = None if explained else _torn(watermark, unflushed)
    if torn is not None:
        found.append(("chain", f"entry {torn} does not build on what is before it"))
    if facts.versions is not None:
        known, stored, messages = facts.versions
        # Only the buffer's row of a deleted thread stays, without messages; the store has none either.
        if not known == (stored or 0) == messages:
            found.append(("version", f"the buffer has version {known}, the store {stored} and {messages} messages"))
    return found


def _explained(facts: ThreadFacts, last: StoredMessage) -> bool:
    """Whether the watermark's last entry took effect, or there is a known reason why it did not."""
    watermark = facts.watermark
    if watermark.broken_since is not None or last.seq in facts.parked or last.seq <= facts.given_up:
        return True
    try:
        entry = decode(last)
    except MalformedEntry:
        return False
    return entry.id == watermark.applied_id or entry.base is not Base.CHAINED  # the latter: it came too late


def _id(item: Item) -> int:
    return 0 if isinstance(item, Malformed) else item.entry.id


def _torn(watermark: Watermark, tail: Sequence[Item]) -> int | None:
    """The first entry of the tail whose predecessor is missing, unless unreadable messages explain it."""
    for parked in plan(watermark, tail, complete=True).park:
        return None if isinstance(parked.item, Malformed) else parked.item.seq
    return None
