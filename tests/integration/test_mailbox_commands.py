"""`bufstore mailbox`, the checks of `bufstore doctor` on a mailbox, and its gauges."""

from __future__ import annotations

import asyncio

import pytest

from bufstore.embedded import Servers
from bufstore.mailbox import MailboxGauges
from bufstore.mailbox.nats import NatsBackend
from command_line import Result, bufstore_cli
from helpers import query
from mailboxes import KINDS, Mailboxes


async def run(boxes: Mailboxes, *arguments: object) -> Result:
    """Run a mailbox command. `NAME` stands for the mailbox's name on NATS, and is left out on Postgres."""
    environment = {"BUFSTORE_NATS": boxes.servers.nats.url, "BUFSTORE_POSTGRES": boxes.servers.postgres.dsn}
    given = [boxes.name if a == "NAME" else a for a in arguments if a != "NAME" or boxes.kind == "nats"]
    return await asyncio.to_thread(bufstore_cli, *given, "--schema", boxes.name, **environment)


@pytest.mark.parametrize("kind", KINDS)
async def test_gauges_say_how_things_stand(kind: str, servers: Servers) -> None:
    async with Mailboxes(kind, servers).open(1) as (store,):
        now = store.backend.now_ms()
        empty = await store.gauges()
        assert (empty.oldest_queued_s, empty.oldest_lease_over_s, empty.signals_waiting) == (None, None, 0)
        await store.enqueue("a", now_ms=now - 5000)
        await store.enqueue("b")
        found = await store.gauges()
        assert isinstance(found, MailboxGauges)
        assert found.oldest_queued_s is not None
        assert found.oldest_queued_s >= (5 if kind != "postgres" else 0)
        assert found.signals_waiting == 2
        await store.pull_signals(limit=2, timeout_s=5)
        for thread_id in ("a", "b"):
            assert await store.claim(thread_id, "w", lease_s=1, now_ms=now - 4000) is not None
        found = await store.gauges()
        assert (found.signals_waiting, found.oldest_queued_s) == (0, None)
        assert found.oldest_lease_over_s is not None
        assert 3 <= found.oldest_lease_over_s < 60
        assert found.signals_out in (2, None)


async def test_a_signal_that_comes_again_is_as_old_as_its_queue(servers: Servers) -> None:
    """Regression: in Postgres a thread seemed to wait since 1970 once a worker left work in it, and alerts fired."""
    async with Mailboxes("postgres", servers).open(1) as (store,):
        await store.enqueue("t")
        (signal,) = await store.pull_signals(timeout_s=5)
        assert await signal.ack()  # there is work left: the signal comes again
        found = await store.gauges()
        assert (found.signals_waiting, found.oldest_queued_s is not None) == (1, True)
        assert found.oldest_queued_s is not None
        assert found.oldest_queued_s < 60


@pytest.mark.parametrize("kind", ["nats", "postgres"])
async def test_people_see_what_waits_and_wake_and_purge(kind: str, servers: Servers) -> None:
    boxes = Mailboxes(kind, servers)
    async with boxes.open(1, signal_ack_wait_s=7.0) as (store,):
        for n in range(2):
            await store.enqueue("thread 1", dispatch_id=f"d{n}")
        claim = await store.claim("thread 1", "host 7")
        assert claim is not None
        await store.ack(claim)
        assert await store.claim("thread 1", "host 7") is not None
        await store.enqueue("thread 2")
        found = await run(boxes, "mailbox", "status", "NAME", "--count", "--json")
        assert found.code == 0, found.err
        assert (found.json["counts"]["queued"], found.json["counts"]["claimed"]) == (1, 1)
        assert found.json["gauges"]["signals_waiting"] == 2
        shown = (await run(boxes, "mailbox", "status", "NAME")).out
        assert ("signals waiting: 2" in shown, "None" in shown) == (True, False)
        assert "longest-expired lease: none" in shown
        assert (await run(boxes, "mailbox", "list", "NAME")).out.split("\n") == ["thread 2", ""]
        listed = (await run(boxes, "mailbox", "list", "NAME", "--thread", "thread 1", "--status", "claimed")).out
        assert "d1  claimed, 'host 7' since" in listed
        assert "d0" not in listed
        threads = (await run(boxes, "mailbox", "list", "NAME", "--json")).json
        assert threads == {"threads": ["thread 2"], "dispatches": None}
        of_one = (await run(boxes, "mailbox", "list", "NAME", "--thread", "thread 1", "--json")).json
        assert ([d["dispatch_id"] for d in of_one["dispatches"]], of_one["threads"]) == (["d0", "d1"], None)
        for signal in await store.pull_signals(limit=10, timeout_s=5):
            await signal.nack(600)
        done = await run(boxes, "mailbox", "wake", "NAME", "--json")
        assert done.json == {"count": 1}
        assert [s.thread_id for s in await store.pull_signals(timeout_s=5)] == ["thread 2"]
        assert (await run(boxes, "mailbox", "purge", "NAME", "--older-than", "0", "--json")).json == {"count": 1}
        assert await store.list_finished() == []
        await store.enqueue("clears\x1b[2J")
        assert r"clears\x1b[2J" in (await run(boxes, "mailbox", "list", "NAME")).out.splitlines()


async def test_what_is_no_mailbox_is_not_made_one(servers: Servers) -> None:
    boxes = Mailboxes("nats", servers)
    found = await run(boxes, "mailbox", "status", "NAME")
    assert (found.code, "there is no mailbox" in found.err) == (2, True)
    environment = {"BUFSTORE_NATS": servers.nats.url}
    found = await asyncio.to_thread(bufstore_cli, "mailbox", "status", **environment)
    assert (found.code, "in Postgres" in found.err) == (2, True)
    environment = {"BUFSTORE_POSTGRES": servers.postgres.dsn}
    found = await asyncio.to_thread(bufstore_cli, "mailbox", "purge", "NAME", "--older-than", "1", **environment)
    assert (found.code, "is on NATS: give --nats" in found.err) == (2, True)
    for command in (["status"], ["list"], ["wake"], ["purge", "--older-than", "1"]):
        found = await asyncio.to_thread(bufstore_cli, "mailbox", *command, "--schema", "no_mailbox", **environment)
        assert (found.code, "there is no mailbox in schema 'no_mailbox'" in found.err) == (2, True), command
    found_schemas = await query(servers.postgres.dsn, "SELECT 1 FROM pg_namespace WHERE nspname = 'no_mailbox'")
    assert found_schemas == []


async def test_looking_at_a_mailbox_makes_no_consumer(servers: Servers) -> None:
    """Regression: it made the consumer that was gone, with defaults, and the app itself could not open the mailbox."""
    boxes = Mailboxes("nats", servers)
    async with boxes.open(1, signal_ack_wait_s=60.0) as (store,):
        assert isinstance(store.backend, NatsBackend)
        await store.enqueue("t")
        await store.backend._stream.remove_consumer(boxes.names.consumer)
        assert (await run(boxes, "mailbox", "list", "NAME", "--thread", "t")).code == 0
        for command in (("mailbox", "status", "NAME"), ("doctor", "--mailbox", "NAME")):
            found = await run(boxes, *command, "--json")
            assert "consumer not found" in found.out, found
            assert "the next instance that is opened" in found.out, found
    async with boxes.open(1, signal_ack_wait_s=60.0) as (store,):
        assert await store.claim("t", "w") is not None


async def test_a_mailbox_with_short_times_is_found(servers: Servers) -> None:
    """Regression: commands refused a mailbox whose signals come again sooner than a request for signals waits."""
    boxes = Mailboxes("nats", servers)
    async with boxes.open(1, signal_ack_wait_s=0.4, signal_fetch_expires_s=0.3):
        found = await run(boxes, "mailbox", "status", "NAME", "--json")
        assert found.code == 0, found.err


async def test_the_doctor_looks_at_a_mailbox(servers: Servers) -> None:
    boxes = Mailboxes("nats", servers)
    missing = await run(boxes, "doctor", "--mailbox", boxes.name, "--json")
    (check,) = [c for c in missing.json["checks"] if c["part"] == f"mailbox {boxes.name}"]
    assert check["level"] == "bad"
    async with boxes.open(1) as (store,):
        await store.enqueue("t", now_ms=store.backend.now_ms() - 3600_000)
        found = await run(boxes, "doctor", "--mailbox", boxes.name, "--json")
        said = {c["what"]: c["found"] for c in found.json["checks"] if c["part"] == f"mailbox {boxes.name}"}
        assert said["sweeper"] == "no lease has expired"
        assert said["workers"].endswith("1 signals waiting")
        levels = {c["what"]: c["level"] for c in found.json["checks"] if c["part"] == f"mailbox {boxes.name}"}
        assert set(levels) == {"room", "sweeper", "workers"}
        assert levels["room"] == levels["sweeper"] == "ok"
        assert levels["workers"] != "ok"
