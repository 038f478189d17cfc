"""`quarantine`, `verify` and `doctor` as processes."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import fresh, run_of, said
from integration.test_quarantine import picky, poisoned


async def cli(deployment: Deployment, *arguments: object) -> Any:
    return await asyncio.to_thread(bufstore_cli, *arguments, **where(deployment))


async def test_the_quarantine_from_the_command_line(deployment: Deployment) -> None:
    async with deployment.store(picky(deployment), flush_interval_s=600) as store:
        thread_id, healed = fresh(), fresh("[bold][/x]\x1b[2J" + "long " * 20)
        messages = await poisoned(store, thread_id)
        await poisoned(store, healed, behind=0)
        await store.checkpoint(healed, [said(0)], run_of(healed))
        await store.buffer.session.connection.request(f"{deployment.name}.groups.0", b"no group", 5)
        # An undecodable group counts as partition 0's, so a flush of a later entry of partition 0 meets it.
        behind = next(t for t in (f"behind-{n}" for n in range(1000)) if store.buffer.subjects.partition(t) == 0)
        await store.checkpoint(behind, [said(0)], run_of(behind))
        await store.force_flush_all()
    listed = await cli(deployment, "quarantine", "list", "--json")
    assert (listed.code, listed.json["total"]) == (0, 5), listed
    ids = [e["seq"] for e in listed.json["entries"] if e["thread_id"] == thread_id]
    assert [e["superseded"] for e in listed.json["entries"]] == [False, False, False, True, False]
    page = await cli(deployment, "quarantine", "list", "--thread", thread_id, "--after", ids[0], "--limit", 1, "--json")
    assert [e["seq"] for e in page.json["entries"]] == [ids[1]]
    table = await cli(deployment, "quarantine", "list")
    assert "5 entries" in table.out
    assert "division by zero" in table.out
    assert healed.replace("\x1b", "\\x1b") in table.out, "as it is, but for what a terminal would obey; in one line"

    shown = await cli(deployment, "quarantine", "show", ids[0], "--json")
    assert shown.json["messages"] == [messages[1]]
    assert shown.json["run"]["run_id"] == run_of(thread_id, 1).run_id
    human = await cli(deployment, "quarantine", "show", ids[0])
    assert ("poison" in human.out, "keeps" in human.out, "operation" in human.out) == (True, True, False)
    odd = next(e["seq"] for e in listed.json["entries"] if e["thread_id"] == healed)
    assert healed.replace("\x1b", "\\x1b") in (await cli(deployment, "quarantine", "show", odd)).out
    missing = await cli(deployment, "quarantine", "show", 999_999)
    assert (missing.code, "no entry" in missing.err) == (2, True)

    done = await cli(deployment, "quarantine", "replay", thread_id, "--json")
    assert (done.code, done.json["applied"], done.json["left"]) == (0, 3, [])
    async with deployment.inner() as plain:
        assert await plain.load_messages(thread_id) == messages
        assert await plain.load_messages(healed) == [said(0)]
    again = await cli(deployment, "quarantine", "replay", ids[0])
    assert again.code == 2, "it is not there any more"
    rest = await cli(deployment, "quarantine", "replay", "--all")
    assert (rest.code, "superseded" in rest.out, "undecodable" in rest.out) == (1, True, True), rest
    left = [e["seq"] for e in (await cli(deployment, "quarantine", "list", "--json")).json["entries"]]
    assert len(left) == 2
    gone = await cli(deployment, "quarantine", "discard", *left, 999_999, "--json")
    assert (gone.code, gone.json) == (1, {"discarded": 2, "missing": 1, "left": []})
    assert (await cli(deployment, "quarantine", "list", "--json")).json == {"total": 0, "entries": []}
    assert (await cli(deployment, "quarantine", "replay")).code == 2


@pytest.mark.long  # waits for a lock until the timeout
async def test_a_thread_that_somebody_holds_keeps_no_other_in_quarantine(deployment: Deployment) -> None:
    held, free, given_up = (f"{place}{fresh()}" for place in "abc")
    async with deployment.store(picky(deployment), flush_interval_s=600) as store:
        for thread_id in (held, free, given_up):
            await poisoned(store, thread_id, behind=0)
        first, _, third = [p.seq for p in await store.quarantine.page()]
    async with await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn) as other:
        lock = f"SELECT FROM {deployment.name}.buffer_threads WHERE thread_id = %s FOR UPDATE"
        await other.execute(lock, [held])  # type: ignore[arg-type]
        discarded = await cli(deployment, "quarantine", "discard", first, third, 999_999, "--json")
        assert (discarded.code, discarded.json["discarded"], discarded.json["missing"]) == (1, 1, 1), discarded
        replayed = await cli(deployment, "quarantine", "replay", "--all", "--json")
        assert (replayed.code, replayed.json["applied"], replayed.json["waits"]) == (1, 1, 1), replayed
        for report in (discarded.json, replayed.json):
            assert [(o["seq"], o["thread_id"], o["outcome"]) for o in report["left"]] == [(first, held, "waits")]
            assert "another session" in report["left"][0]["reason"]
        human = await cli(deployment, "quarantine", "discard", first)
        assert (human.code, "1 stay" in human.out, f"{first} of thread {held}" in human.out) == (1, True, True), human
    listed = await cli(deployment, "quarantine", "list", "--json")
    assert [e["thread_id"] for e in listed.json["entries"]] == [held]
    assert (await cli(deployment, "quarantine", "replay", "--all")).code == 0
