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


@pytest.fixture
def electing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In place of a connection to a cluster where n1 leads: the first question of each kind has no answer."""
    from bench import cluster
    from bench.baselines import raw_nats

    class Electing(raw_nats.RawNats):
        def __init__(self) -> None:
            self.leader = "n1"
            self.asked: list[str] = []
            self.closed = False

        async def request(self, subject: str, body: Any = b"") -> dict[str, Any]:
            self.asked.append(subject)
            times = self.asked.count(subject)
            if times == 1:
                await asyncio.Event().wait()
            match subject.removeprefix("$JS.API.").split("."):
                case ["STREAM", "NAMES"]:
                    return {"streams": ["LOG"]}
                case ["STREAM", "LIST"]:
                    if times == 2:
                        return {"streams": [], "total": 0, "missing": ["LOG"]}
                    return {"streams": [{"state": {"bytes": 7}}], "total": 1}
                case ["STREAM", "CREATE", "LOG"]:
                    if times == 2:
                        return raw_nats.checked(b"")
                    return {"config": body}
                case ["STREAM", "DELETE", "LOG"]:
                    return raw_nats.checked(b'{"error": {"code": 404, "description": "stream not found"}}')
                case ["STREAM", "LEADER", "STEPDOWN", "LOG"]:
                    self.leader = body["placement"]["preferred"]
                    raise RuntimeError("an election is under way")
                case ["STREAM", "INFO", "LOG"]:
                    return {"cluster": {"leader": self.leader}}
            return raw_nats.checked(b'{"error": {"code": 400, "description": "bad request"}}')

        def close(self) -> None:
            self.closed = True

    nats = Electing()

    async def connect(url: str) -> Electing:
        return nats

    monkeypatch.setattr(raw_nats.RawNats, "connect", connect)
    for module, name in ((cluster, "_ANSWER_S"), (raw_nats, "ANSWER_S")):
        monkeypatch.setattr(module, name, 0.01)
    return nats


async def test_a_question_that_an_election_swallows_is_asked_again(electing: Any) -> None:
    from bench import cluster

    await asyncio.wait_for(cluster._lead("nats://127.0.0.1"), 10)
    assert (electing.leader, electing.closed) == ("n0", True)


async def test_what_is_stored_is_asked_again_until_no_stream_is_missing(electing: Any) -> None:
    from bench import stored

    assert await asyncio.wait_for(stored._in_streams("nats://127.0.0.1"), 10) == 7
    assert len(electing.asked) == 3


async def test_a_stream_is_made_and_removed_although_answers_are_lost(electing: Any) -> None:
    made = {"name": "LOG"}
    async with asyncio.timeout(10):
        assert await electing.ask("$JS.API.STREAM.CREATE.LOG", made) == {"config": made}
        await electing.remove("STREAM.DELETE.LOG")  # it was, before its answer was lost
        with pytest.raises(RuntimeError, match="bad request"):
            await electing.ask("$JS.API.STREAM.OTHER")


def test_a_row_that_fails_says_why_in_the_last_line() -> None:
    from bench.__main__ import _reason
    from bench.worker import WorkerError

    assert _reason(TimeoutError()) == "TimeoutError"
    assert _reason(WorkerError('Traceback (most recent call last):\n  File "a.py"\nLogUnavailable: no answer\n')) == (
        "LogUnavailable: no answer"
    )
