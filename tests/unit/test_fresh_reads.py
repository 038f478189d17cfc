"""Reads of replicas, one of which may be a leader that the others have left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bufstore.jetstream.fresh_reads import FreshReads
from bufstore.jetstream.messages import Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream

SUBJECT = "a"


class Answers:
    """A replicated stream that gives each of these answers in turn: the sequence of the last message; 0: there is none.

    The last one is given again and again.
    """

    replicated = True

    def __init__(self, *seqs: int) -> None:
        self._left = list(seqs)
        self.proofs = 0

    async def last(self, subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
        seq = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        return {SUBJECT: StoredMessage(SUBJECT, seq, None, b"x")} if seq and subjects else {}

    async def prove(self, unused: str, timeout_s: float) -> None:
        self.proofs += 1

    async def ends(self, filters: Sequence[str], timeout_s: float) -> list[int]:
        return []


async def read(stream: Answers) -> tuple[FreshReads, int]:
    """Write at 10, and read; return the reads, and the sequence that was found."""
    reads: Any = FreshReads(stream, 5, "unused")  # type: ignore[arg-type]
    reads.wrote([Outgoing(SUBJECT, b"x")], 10)
    found = (await reads.last([SUBJECT])).get(SUBJECT)
    return reads, found.seq if found is not None else 0


@pytest.mark.parametrize("answers", [[10], [5, 10], [5, 5, 10]])
async def test_a_write_is_remembered_however_often_it_had_to_be_asked_for(answers: list[int]) -> None:
    """Regression: after two proofs it was forgotten, although it was there, and an older one was believed next."""
    stream = Answers(*answers, 5, 10)
    reads, found = await read(stream)
    assert found == 10
    assert (await reads.last([SUBJECT]))[SUBJECT].seq == 10


@pytest.mark.parametrize("answers", [[0], [5, 0], [5, 5, 0]])
async def test_what_is_gone_is_not_shown_as_a_deposed_leader_had_it(answers: list[int]) -> None:
    """Regression: what the deposed leader had told stayed, because the new one told nothing."""
    stream = Answers(*answers)
    reads, found = await read(stream)
    assert found == 0
    before = stream.proofs
    assert await reads.last([SUBJECT]) == {}
    assert stream.proofs == before, "it is known to be gone"


async def test_no_more_messages_are_read_than_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each continuation of an answer that the server had cut asked for all of them again."""
    stream: Any = NatsStream.__new__(NatsStream)
    asked = []

    async def cut(request: dict[str, Any], timeout_s: float) -> tuple[list[StoredMessage], bool, int]:
        asked.append(request["batch"])
        first = request["seq"]
        return [StoredMessage(SUBJECT, n, None, b"x") for n in range(first, first + min(request["batch"], 50))], True, 0

    monkeypatch.setattr(stream, "_get", cut)
    assert [m.seq for m in await stream.read(SUBJECT, 0, 5, 80)] == list(range(1, 81))
    assert asked == [80, 30]
