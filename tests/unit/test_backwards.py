"""Threads are read backwards, and each group is read once for all its entries."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.groups.backwards import Backwards
from bufstore.buffer.groups.entries import Entries
from bufstore.buffer.groups.group import Draft, Group, NewEntry, in_group
from bufstore.buffer.places import group_of, place
from bufstore.buffer.subjects import Subjects
from bufstore.errors import LogUnavailable
from bufstore.jetstream.messages import StoredMessage
from unit.fake_log import run

SUBJECTS = Subjects("thread", 4)


class Groups:
    """Groups in a process's memory, and their entries."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        """`groups`: the threads of each group's entries."""
        self.heads: dict[str, int] = {}
        self.there: dict[int, tuple[Group, bytes]] = {}
        self.messages: list[StoredMessage] = []
        self.read: Counter[int] = Counter()
        self.forgot = 0
        for seq, threads in enumerate(groups, start=1):
            here: dict[str, int] = {}
            entries = []
            for number, thread_id in enumerate(threads):
                prev = in_group(here[thread_id]) if thread_id in here else self.heads.get(thread_id, 0)
                here[thread_id] = number
                payload = f"{seq}.{number}".encode()
                entries.append(NewEntry(thread_id, SUBJECTS.partition(thread_id), prev, "header", payload))
                self.messages.append(StoredMessage(SUBJECTS.of(thread_id), place(seq, number), "header", payload))
            draft = Draft(seq, entries)
            self.there[seq] = draft.stored(seq, 0, 0, 0), draft.body
            self.heads |= {t: place(seq, n) for t, n in here.items()}

    async def group(self, seq: int, ahead: int = 0) -> tuple[Group, bytes] | None:
        self.read[seq] += 1
        await asyncio.sleep(0)
        return self.there.get(seq)

    def backwards(self) -> Backwards:
        async def nothing(seq: int) -> StoredMessage | None:
            return None

        async def forget() -> None:
            self.forgot += 1

        entries = Entries(SUBJECTS, nothing)
        head = lambda subject: self.heads.get(SUBJECTS.thread_id(subject), 0)  # noqa: E731
        return Backwards(cast(Any, self), entries, head, forget)


THREADS = ["a", "b", "c", "d"]
GROUPS = st.lists(st.lists(st.sampled_from(THREADS), min_size=1, max_size=6), max_size=12)


@given(GROUPS, st.lists(st.integers(0, 13), min_size=4, max_size=4), st.integers(0, 3), st.integers(0, 12))
def test_each_thread_has_what_stands_above_its_place(
    groups: list[list[str]], above: list[int], first: int, purged: int
) -> None:
    """`purged`: groups up to this one are gone."""
    log = Groups(groups)
    for seq in range(1, purged + 1):
        log.there.pop(seq, None)
    wanted = {SUBJECTS.of(t): place(seq, 0) for t, seq in zip(THREADS, above, strict=True)}
    found = run(log.backwards().after(wanted, first))
    of_all = {s: [m for m in log.messages if m.subject == s and m.seq > at] for s, at in wanted.items()}
    there = {s: [m for m in messages if group_of(m.seq) > purged] for s, messages in of_all.items()}
    assert found == {s: messages[:first] if first else messages for s, messages in there.items()}
    assert bool(log.forgot) == any(messages and not there[s] for s, messages in of_all.items())
    lasts = run(log.backwards().last(list(wanted)))
    last = {s: next((m for m in reversed(log.messages) if m.subject == s), None) for s in wanted}
    assert lasts == {s: m for s, m in last.items() if m is not None and group_of(m.seq) > purged}


def test_a_group_is_read_once_for_all_threads_that_stand_in_it() -> None:
    log = Groups([THREADS] * 5)
    found = run(log.backwards().after({SUBJECTS.of(t): 0 for t in THREADS}))
    assert {len(messages) for messages in found.values()} == {5}
    assert log.read == dict.fromkeys(range(1, 6), 1)


def test_who_cannot_read_a_group_reads_no_others() -> None:
    log = Groups([[str(n)] for n in range(100)])

    async def group(seq: int, ahead: int = 0) -> None:
        log.read[seq] += 1
        await asyncio.sleep(0)
        raise LogUnavailable("away")

    log.group = group  # type: ignore[method-assign,assignment]
    with pytest.raises(LogUnavailable):
        run(log.backwards().last([SUBJECTS.of(str(n)) for n in range(100)]))
    assert log.read.total() <= 8
