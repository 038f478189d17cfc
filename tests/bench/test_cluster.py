"""The cluster of the benchmarks gets its leader, and a row that fails says why where the end of a log shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_ROOT))


class Electing:
    """In place of a connection to a cluster where n1 leads: the first question of each kind has no answer."""

    def __init__(self) -> None:
        self.leader = "n1"
        self.asked: list[str] = []
        self.closed = False

    async def request(self, subject: str, body: Any = b"") -> dict[str, Any]:
        first = subject not in self.asked
        self.asked.append(subject)
        if subject == "$JS.API.STREAM.NAMES":
            return {"streams": ["LOG"]}
        if first:
            await asyncio.Event().wait()
        if subject == "$JS.API.STREAM.LEADER.STEPDOWN.LOG":
            self.leader = body["placement"]["preferred"]
            raise RuntimeError("an election is under way")
        assert subject == "$JS.API.STREAM.INFO.LOG"
        return {"cluster": {"leader": self.leader}}

    def close(self) -> None:
        self.closed = True


async def test_a_question_that_an_election_swallows_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import cluster

    nats = Electing()

    async def connect(url: str) -> Electing:
        return nats

    monkeypatch.setattr(cluster.RawNats, "connect", connect)
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.01)
    await asyncio.wait_for(cluster._lead("nats://127.0.0.1"), 10)
    assert (nats.leader, nats.closed) == ("n0", True)


def test_a_row_that_fails_says_why_in_the_last_line() -> None:
    from bench.__main__ import _reason
    from bench.worker import WorkerError

    assert _reason(TimeoutError()) == "TimeoutError"
    assert _reason(WorkerError('Traceback (most recent call last):\n  File "a.py"\nLogUnavailable: no answer\n')) == (
        "LogUnavailable: no answer"
    )
