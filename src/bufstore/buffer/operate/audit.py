"""The rules of a self-check, which log and Postgres together must obey, without I/O.

Each rule holds at every moment, even in the middle of a flush, if everything is read in the order that
`bufstore.buffer.operate.verify` keeps. A violation is either damage or a bug of ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from bufstore.buffer.chain import Watermark, plan
from bufstore.buffer.entry import Base, Item, Malformed, decode, id_of
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One violated rule."""

    #: The name of the rule, a few words.
    rule: str
    #: What was found instead.
    detail: str
    #: None when the finding is about the whole log.
    partition: int | None
    #: None when the finding is about the whole partition.
    thread_id: str | None = None


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What a self-check looked at, and what it found."""

    partitions: int
    #: How many threads were checked: those that the log shows, and those that wait in the ledger.
    threads: int
    #: How many threads have unflushed entries, and how many such entries there are, those that wait included.
    unflushed_threads: int
    unflushed_entries: int
    #: How many entries wait in the ledger.
    waiting: int
    #: How many entries are in quarantine.
    quarantined: int
    #: The names of the live flushers.
    members: Sequence[str]
    #: How many violations there are, and the first of them.
    wrong: int
    findings: Sequence[Finding]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.wrong


def verification_of_all(lanes: Sequence[Verification]) -> Verification:
    """Combine the results of several lanes: sums, and the findings of all."""
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
    #: The position of the last entry that was discarded from quarantine; 0: none was.
    given_up: int
    #: The thread's last entry in the log. If the thread has nothing above the log's floor, any of its entries, or None.
    last: StoredMessage | None
    #: Whether the thread has an entry above the log's floor.
    above_floor: bool
    #: The thread's entries in the log above the watermark, or a later part of them.
    tail: Sequence[Item]
    #: The thread's entries that wait in the ledger, read before the watermark.
    waiting: Sequence[Item] = ()
    #: Those of the last entries' positions that are in quarantine.
    parked: Collection[int]
    #: The position of the partition's cursor, read before everything else.
    cursor: int
    #: The watermark's version, the store's version, and how many messages the store has; None: the store was not asked.
    versions: tuple[int, int | None, int] | None = None


def thread_findings(facts: ThreadFacts) -> list[tuple[str, str]]:
    """Return the rules that the thread violates, each with what was found instead."""
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
    changed = [item.seq for item in facts.tail if id_of(waiting.get(item.seq, item)) != id_of(item)]
    if changed:
        found.append(
            (
                "waiting entry",
                f"entry {changed[0]} waits in the ledger, but the log has a different entry at that position",
            )
        )
    unflushed = [*facts.waiting, *facts.tail]
    # Entries behind a discarded entry build on it, until the thread has gone on without it.
    explained = watermark.broken_since is not None or 0 < watermark.flushed_seq <= facts.given_up
    torn = None if explained else _torn(watermark, unflushed)
    if torn is not None:
        found.append(("chain", f"entry {torn} does not build on what is before it"))
    if facts.versions is not None:
        known, stored, messages = facts.versions
        # Of a deleted thread only the buffer's row stays, without messages; the store has none either.
        if not known == (stored or 0) == messages:
            found.append(("version", f"the buffer has version {known}, the store {stored} and {messages} messages"))
    return found


def _explained(facts: ThreadFacts, last: StoredMessage) -> bool:
    """Return whether the entry at the watermark took effect, or there is a known reason why it did not."""
    watermark = facts.watermark
    if watermark.broken_since is not None or last.seq in facts.parked or last.seq <= facts.given_up:
        return True
    try:
        entry = decode(last)
    except MalformedEntry:
        return False
    return entry.id == watermark.applied_id or entry.base is not Base.CHAINED  # the latter: it came too late


def _torn(watermark: Watermark, tail: Sequence[Item]) -> int | None:
    """Return the position of the first entry without its predecessor; None also if unreadable messages explain it."""
    for parked in plan(watermark, tail, complete=True).park:
        return None if isinstance(parked.item, Malformed) else parked.item.seq
    return None
