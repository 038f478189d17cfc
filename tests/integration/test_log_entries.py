"""`bufstore log entries` shows entries, not the stream's messages that hold them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from bufstore.buffer.places import group_of
from bufstore.cli.operate import log_entries
from bufstore.cli.operate.log_entries import Wanted, _EntryReader
from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import fresh, run_of, said


async def entries(deployment: Deployment, *arguments: object) -> Any:
    result = await asyncio.to_thread(bufstore_cli, "log", "entries", *arguments, "--json", **where(deployment))
    assert result.code == 0, result
    return result.json["entries"]


async def test_entries_are_shown_one_by_one(deployment: Deployment) -> None:
    threads = sorted(fresh() for _ in range(5))
    async with deployment.store() as store:
        began = datetime.now(UTC)
        await asyncio.gather(*(store.checkpoint(t, [said(0)], run_of(t)) for t in threads))
        await asyncio.gather(*(store.checkpoint_append(t, [said(1)], run_of(t)) for t in threads))
        middle = datetime.now(UTC)
        await store.checkpoint(threads[0], [{"role": "user", "content": "x" * (3 << 20)}], run_of(threads[0], 1))
        await store.delete_thread(threads[1])
        await store.buffer.session.connection.request(f"{deployment.name}.groups.0", b"no group", 5)
        partition = store.buffer.subjects.partition(threads[0])
    whole = await entries(deployment)
    assert [e["seq"] for e in whole] == sorted(e["seq"] for e in whole)
    assert len({group_of(e["seq"]) for e in whole[:10]}) < 10, "several stand in one message"
    kinds = [e["kind"] for e in whole]
    assert sorted(kinds) == sorted(["snapshot"] * 6 + ["append"] * 5 + ["removal", "damaged"])
    assert [e["version"] for e in whole if e["thread_id"] == threads[2]] == [1, 2]
    assert whole[10]["bytes"] > 3 << 20
    assert "group" in whole[-1]["trouble"]
    assert all(began <= datetime.fromisoformat(e["stored_at"]) for e in whole)
    assert not any(e["payload"] for e in whole)

    of_one = await entries(deployment, "--thread", threads[0])
    assert [e["thread_id"] for e in of_one] == [threads[0]] * 3
    of_partition = await entries(deployment, "--partition", partition)
    assert {e["partition"] for e in of_partition} == {partition}
    assert {e["seq"] for e in of_one} <= {e["seq"] for e in of_partition}

    seqs = [e["seq"] for e in whole]
    for arguments, found in (
        (["--limit", 3], seqs[-3:]),
        (["--after", seqs[2], "--limit", 3], seqs[3:6]),
        (["--after", seqs[2], "--before", seqs[5]], seqs[3:5]),
        (["--before", seqs[5], "--limit", 2], seqs[3:5]),
        (["--after", middle.isoformat()], seqs[10:]),
        (["--before", middle.isoformat(), "--limit", 2], seqs[8:10]),
        (["--after", datetime.now(UTC).isoformat()], []),
    ):
        assert [e["seq"] for e in await entries(deployment, *arguments)] == found, arguments

    (shown,) = await entries(deployment, "--thread", threads[2], "--payload", "--limit", 1)
    assert shown["payload"]["messages"] == [said(1)]
    human = await asyncio.to_thread(bufstore_cli, "log", "entries", **where(deployment))
    assert (human.code, len(human.out.splitlines()), threads[3] in human.out) == (0, len(whole), True), human
    assert "0:x" not in human.out
    async with deployment.store() as store:
        clears = fresh("clears\x1b[2J")
        await store.checkpoint(clears, [{"content": "\x9b2J"}], run_of(clears))
    last = await asyncio.to_thread(bufstore_cli, "log", "entries", "--limit", 1, "--payload", **where(deployment))
    assert "clears\\x1b[2J-" in last.out, "a terminal is not cleared"
    assert not {"\x1b", "\x9b"} & set(last.out)
    wrong = await asyncio.to_thread(bufstore_cli, "log", "entries", "--after", "soon", **where(deployment))
    assert (wrong.code, "neither a position nor a time" in wrong.err) == (2, True)


async def test_what_is_written_is_followed(deployment: Deployment) -> None:
    before, after = fresh(), fresh()
    async with deployment.store() as store:
        await store.checkpoint(before, [said(0)], run_of(before))
        environment = {k: str(v) for k, v in where(deployment).items()}
        following = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bufstore", "log", "entries", "--follow", "--json",
            stdout=asyncio.subprocess.PIPE, env=environment,
        )  # fmt: skip
        try:
            assert following.stdout is not None
            async with asyncio.timeout(30):
                assert json.loads(await following.stdout.readline())["thread_id"] == before
                await store.checkpoint(after, [said(0)], run_of(after))
                line = json.loads(await following.stdout.readline())
            assert (line["thread_id"], line["kind"], line["version"]) == (after, "snapshot", 1)
        finally:
            following.terminate()
            await following.wait()


async def test_what_is_followed_goes_on_from_the_end_that_was_shown_and_anew_in_a_new_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: where a node that was cut off has led, it says for seconds where the log ended before.

    What the log lost is not waited for: other entries get its positions.
    """
    states, asked, shown = iter([(3, "a"), (5, "a"), (4, "a"), (6, "a"), (3, "b")]), list[int](), list[Any]()

    class Following(_EntryReader):
        async def _range(self, log: Any, start: int, end: int) -> AsyncGenerator[Any]:
            for sequence in range(start, end):
                yield log.created, sequence

    async def look(*, reached: int = 0) -> Any:
        asked.append(reached)
        end, created = next(states)
        return SimpleNamespace(first=1, end=end, created=created)

    monkeypatch.setattr(log_entries, "_FOLLOW_S", 0.0)
    reader: Any = SimpleNamespace(look=look)
    with suppress(RuntimeError):  # there are no more states
        await Following(reader, Wanted((), (), None, None, False)).show(9, shown.append, follow=True)
    assert asked == [0, 3, 5, 4, 6, 3]
    assert shown == [("a", n) for n in (1, 2, 3, 4, 4, 5)] + [("b", n) for n in (1, 2)]
