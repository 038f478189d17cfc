"""Bad input on real servers: hostile ids, sizes, objects that callers change, and messages of other publishers."""

from __future__ import annotations

import asyncio
import random
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bufstore import (
    Consistency,
    InvalidId,
    InvalidQuery,
    InvalidRecord,
    PostgresThreadStore,
    Rejected,
    Run,
    RunQuery,
    RunStatus,
    ThreadMetadata,
    ThreadQuery,
)
from bufstore.buffer.entry import Base
from bufstore.cli.app import app
from bufstore.embedded import Servers
from bufstore.threads.model import encode_run
from bufstore.threads.payload import Payload, encode_payload
from conftest import Deployment
from helpers import eventually, fresh, healthy, query, run_of, said
from hostile import RUN, forged, publish_entry, publish_raw, saved, sealed

LONGEST = "é" * 512
HOSTILE = [
    ".", "..", "*", ">", "a.b", "a.*", "a.>", "a b", " ", "a ", " a", "/", "../x", "a/b", "\\", "\t", "a\n", "a\r",
    "\r\n", "\r\nPUB x 1\r\nx\r\n", "$JS.API.STREAM.DELETE.x", "_INBOX.x", "'; DROP TABLE threads; --", '"', "%s",
    "%(x)s", "{}", "{schema}", "$1", "\\x00", "\x01", "\x1b[2J", "\x7f", "\u2028", "\u202e", "\ufeff", "[red]x[/]", "=",
    "==", "-", "_", "é", unicodedata.normalize("NFD", "é"), "É", "ﬁ", "fi", "ß", "ss", "ẞ", "İ", "i", "I", "ı", "A",
    "a", "Ａ", "🧵", "\U0010ffff", "\ue000", "0", "00", "1", "-1", "null", "None", "true", "NaN", "t" * 1024,
    "t" * 1023, LONGEST,
]  # fmt: skip
UNUSABLE = ["", "\0", "a\0b", "t" * 1025, "é" * 512 + "t", "\ud800", "a\udfffb", None, 5, b"bytes", ["list"], 1.5, True]


async def test_hostile_ids_round_trip_and_never_meet(deployment: Deployment) -> None:
    async with deployment.store() as store:
        runs = {
            t: Run(run_id=t, thread_id=t, status=RunStatus.DONE, agent_id=f"agent {n}") for n, t in enumerate(HOSTILE)
        }

        async def write(thread_id: str) -> None:
            message = {"id": thread_id, "content": thread_id}
            first = await store.checkpoint(thread_id, [message], runs[thread_id], idempotency_key=thread_id)
            again = await store.checkpoint(thread_id, [message], runs[thread_id], idempotency_key=thread_id)
            assert (again.repeated, again.thread_seq) == (True, first.thread_seq)
            await store.checkpoint_append(thread_id, [{"id": thread_id + "'"}], runs[thread_id])

        await asyncio.gather(*map(write, HOSTILE))
        for level in (Consistency.READ_YOUR_WRITES, Consistency.EVENTUAL):
            for thread_id in HOSTILE:
                found = await store.load_checkpoint(thread_id, consistency=level)
                assert found is not None, ascii(thread_id)
                assert found.messages == [{"id": thread_id, "content": thread_id}, {"id": thread_id + "'"}]
                assert found.thread.thread_id == thread_id
                assert await store.load_run(thread_id, consistency=level) == runs[thread_id]
            await store.force_flush_all()
        for thread_id in HOSTILE:
            record = await store.load_message(thread_id, thread_id)
            assert record is not None
            assert record.seq == 1
            alone = await store.query_runs(RunQuery(thread_id=thread_id))
            assert [r.run_id for r in alone.runs] == [thread_id]
            by_prefix = await store.query_threads(ThreadQuery(id_prefix=thread_id), limit=200)
            assert {t.thread_id for t in by_prefix.threads} == {t for t in HOSTILE if t.startswith(thread_id)}
        tables = await query(deployment.servers.postgres.dsn, f"SELECT count(*) FROM {deployment.name}.buffer_threads")
        assert tables == [(len(HOSTILE),)]


@pytest.mark.parametrize("bad", UNUSABLE, ids=lambda v: ascii(v)[:20])
async def test_an_unusable_id_is_refused_before_any_io(
    deployment: Deployment, bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = deployment.inner()
    async with deployment.store(inner, flusher=False) as store:
        lend, lent = inner.pool.lend, list[Any]()

        def noted(*arguments: Any) -> Any:
            lent.append(arguments)
            return lend(*arguments)

        monkeypatch.setattr(inner.pool, "lend", noted)
        good = fresh()
        run = run_of(good)
        traffic = store.buffer.session.connection.traffic
        calls = [
            store.checkpoint(bad, [], Run(run_id="r", thread_id=bad)),
            store.checkpoint(good, [], Run(run_id=bad, thread_id=good)),
            store.checkpoint_append(bad, [], Run(run_id="r", thread_id=bad)),
            store.append_messages(bad, [1]),
            store.create_run(Run(run_id=bad, thread_id=good)),
            store.save_thread(bad),
            store.save_thread_state(bad, 1),
            store.set_parent(good, bad) if bad is not None else store.set_parent(bad, good),
            store.delete_thread(bad),
            store.load_checkpoint(bad),
            store.load_thread(bad),
            store.load_messages(bad),
            store.load_run(bad),
            store.latest_run(bad),
            store.load_thread_state(bad),
            store.query_messages(bad),
            store.load_message_range(bad, 1, 2),
            store.load_message(bad, "m"),
            store.delete_messages(bad, ["m"]),
            store.update_metadata(bad, ThreadMetadata(title="x")),
            store.erase(bad),
            store.force_flush(bad),
            store.quarantine.replay_thread(bad),
        ]
        if bad is not None:  # None is allowed there
            calls += [
                store.checkpoint(good, [], run, idempotency_key=bad),
                store.checkpoint(good, [], Run(run_id="r", thread_id=good, parent_run_id=bad)),
                store.checkpoint(good, [], Run(run_id="r", thread_id=good, parent_thread_id=bad)),
                store.query_runs(RunQuery(thread_id=bad)),
                store.query_threads(ThreadQuery(resource_id=bad)),
                store.quarantine.page(thread_id=bad),
            ]
        for call in calls:
            with pytest.raises((InvalidId, InvalidRecord)):
                await call
        assert (store.buffer.session.connection.traffic, lent) == (traffic, [])
        assert await store.load_thread(good) is None
        assert lent


async def test_what_is_no_run_no_list_or_no_query_is_refused_before_any_io(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        traffic = store.buffer.session.connection.traffic
        calls: list[Any] = [
            *(store.checkpoint("t", [], no_run) for no_run in (None, {}, "run", Run)),
            *(store.checkpoint_append("t", [], no_run) for no_run in (None, {}, "run", Run)),
            *(store.create_run(no_run) for no_run in (None, {}, "run", Run)),
            *(store.checkpoint("t", no_list, run_of("t")) for no_list in (None, "text", {}, 5, iter([]))),
            store.query_runs(limit="many"),
            store.query_runs(cursor="garbage"),
            store.query_threads(cursor="\ud800"),
            store.query_messages("t", cursor="\0"),
        ]
        for call in calls:
            with pytest.raises(Rejected):
                await call
            assert store.buffer.session.connection.traffic == traffic, call


async def test_a_thread_of_no_one_and_ten_thousand_messages(deployment: Deployment) -> None:
    async with deployment.store() as store:
        for count in (0, 1, 10_000):
            thread_id = fresh()
            messages = [{"id": f"m{n}", "content": n} for n in range(count)]
            receipt = await store.checkpoint(thread_id, messages, run_of(thread_id))
            assert receipt.version == count
            assert await store.load_messages(thread_id) == messages
            await store.checkpoint_append(thread_id, ["one more"], run_of(thread_id), expected_version=count)
            await store.force_flush(thread_id)
            assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [*messages, "one more"]


@pytest.mark.long
async def test_twenty_mebibytes_in_many_messages(deployment: Deployment) -> None:
    async with deployment.store() as store:
        thread_id = fresh()
        chance = random.Random(3)
        messages = [{"n": n, "blob": chance.randbytes(20 << 10)} for n in range(1024)]
        await store.checkpoint(thread_id, messages, run_of(thread_id))
        assert await store.load_messages(thread_id) == messages
        await store.force_flush(thread_id)
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == messages


async def test_an_entry_around_max_payload_with_its_headers(deployment: Deployment) -> None:
    """One byte too many does not raise: the server closes the connection."""
    async with deployment.store() as store:
        most = store.buffer.session.stream.message_bytes_max
        empty = len(encode_payload(Payload(0, [b"\xc4\x00"], encode_run(run_of("t" * 39)), saved("r"))))
        sizes = sorted(
            {most + d for d in (-2100, -1025, -1024, -1023, -1, 0, 1)} | {most - empty - 1024 + d for d in range(-3, 4)}
        )
        receipts = []
        for size in sizes:
            thread_id = fresh()
            receipts.append(await store.checkpoint(thread_id, [bytes(size)], run_of(thread_id)))
            assert await store.load_messages(thread_id) == [bytes(size)]
        await store.force_flush_all()
        for size, receipt in zip(sizes, receipts, strict=True):
            found = await store.load_messages(receipt.thread_id, consistency=Consistency.EVENTUAL)
            assert found == [bytes(size)]
        assert store.buffer.session.connection._past == [0, 0], "the connection was never lost"


async def test_values_hard_for_postgres_are_stored_exactly_or_refused(deployment: Deployment) -> None:
    exact = [
        "\0",
        "a\0b",
        float("inf"),
        float("-inf"),
        2**63 - 1,
        -(2**63),
        2**64 - 1,
        5e-324,
        -0.0,
        "\ufffe",
        b"\xff\0",
    ]
    refused = ["\ud800", "a\udfff", 2**64, -(2**63) - 1, 10**400, (1,), {1}, bytearray(b"x"), object()]
    async with deployment.store() as store:
        thread_id = fresh()
        for value in refused:
            for wrapped in (value, [value], {"k": {"deep": value}}):
                with pytest.raises(InvalidRecord):
                    await store.checkpoint(thread_id, [wrapped], run_of(thread_id))
                with pytest.raises(InvalidRecord):
                    await store.checkpoint(thread_id, [], run_of(thread_id, input=wrapped))
                with pytest.raises(InvalidRecord):
                    await store.save_thread_state(thread_id, wrapped)
        run = run_of(thread_id, input=exact, output={"\0": exact}, extensions={"": exact})
        await store.checkpoint(thread_id, [*exact, {"id": "\0", "all": exact}], run)
        await store.force_flush(thread_id)
        for level in Consistency:
            found = await store.load_messages(thread_id, consistency=level)
            assert repr(found) == repr([*exact, {"id": "\0", "all": exact}])
            assert repr(await store.load_run(run.run_id, consistency=level)) == repr(run)
        await store.save_thread_state(thread_id, [float("nan"), "\0"])
        assert repr(await store.load_thread_state(thread_id)) == "[nan, '\\x00']"


async def test_what_a_caller_changes_after_the_call_began_changes_nothing(deployment: Deployment) -> None:
    async with deployment.store() as store:

        async def one() -> None:
            thread_id = fresh()
            message = {"content": ["before"]}
            messages, extensions = [message], {"list": ["before"]}
            call = asyncio.create_task(store.checkpoint(thread_id, messages, run_of(thread_id, extensions=extensions)))
            await asyncio.sleep(0)  # the call has begun and waits for NATS
            message["content"].append("after")
            messages.append({"content": ["another"]})
            extensions["list"].append("after")
            await call
            await store.force_flush(thread_id)
            for level in Consistency:
                found = await store.load_checkpoint(thread_id, consistency=level)
                assert found is not None
                assert found.messages == [{"content": ["before"]}]
                assert found.latest_run is not None
                assert found.latest_run.extensions == {"list": ["before"]}

        await asyncio.gather(*(one() for _ in range(5)))


async def test_what_a_caller_changes_in_what_he_was_given_changes_nothing(deployment: Deployment) -> None:
    async with deployment.store() as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [{"content": []}], run_of(thread_id))
        for _ in range(2):
            found = await store.load_messages(thread_id)
            assert found == [{"content": []}]
            found[0]["content"].append("mine")
            found.append("mine")


# --- messages of other publishers --------------------------------------------------------------------------------


HEADERS = [
    b"NATS/1.0 404 No Messages\r\n\r\n", b"NATS/1.0 204 EOB\r\n\r\n", b"NATS/1.0 409 MaxRequestMaxBytes\r\n\r\n",
    b"NATS/1.0 100 Idle Heartbeat\r\n\r\n", b"NATS/1.0 503\r\n\r\n", b"NATS/1.0\r\nStatus: 404\r\n\r\n",
    b"NATS/1.0\r\nStatus: 204\r\nNats-Num-Pending: 7\r\n\r\n", b"NATS/1.0\r\nStatus: 503\r\n\r\n",
    b"NATS/1.0\r\nStatus: 100\r\nNats-Last-Consumer: 99999\r\n\r\n", b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    b"NATS/1.0 200 \xff\xfe\r\n\r\n", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\n", b"NATS/1.0", b"NATS/1.0 ", b"NATS/1.0 1",
    b"x", b"\0", b"garbage\r\n\r\n", b"NATS/1.0\r\nno colon\r\n\r\n", b"NATS/1.0\r\n\xff: x\r\n\r\n",
    b"NATS/1.0\r\nBufstore-Entry: \xff\xfe\r\n\r\n",
    b"NATS/1.0\r\nBufstore-Entry: 1.0.\r\nBufstore-Entry: 1.0.\r\n\r\n",
    b"NATS/1.0\r\nNats-Sequence: 1\r\nNats-Subject: evil\r\n\r\n", b"NATS/1.0\r\nNats-Sequence: x\r\n\r\n",
    b"NATS/1.0\r\n" + b"X: y\r\n" * 500 + b"\r\n", b"NATS/1.0\r\nNats-Stream: evil\r\n\r\n",
    b"NATS/1.0\r\nNats-Stream: evil\r\n", b"NATS/1.0\r\nNats-Stream: evil",
]  # fmt: skip


async def test_headers_that_are_none_are_quarantined_and_nothing_else_stops(deployment: Deployment) -> None:
    async with deployment.store() as store:
        connected = store.buffer.session.connection.client()
        for head in HEADERS:
            thread_id, other = fresh(), fresh()
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            before = await store.quarantined()
            await publish_raw(store, head, b"body")
            receipt = await store.checkpoint(other, [said(0)], run_of(other))
            await store.force_flush_all(timeout_s=20)
            assert await eventually(lambda n=before: _parked(store, n + 1)), head  # type: ignore[misc]
            assert await store.load_messages(thread_id) == [said(0)], "it is no thread's"
            assert await store.load_messages(other, at_least=receipt) == [said(0)]
        assert store.buffer.session.connection.client() is connected


async def _parked(store: Any, count: int) -> bool:
    return await store.quarantined() == count


@pytest.mark.parametrize("head", [*HEADERS[4:9], b"x", None], ids=ascii)
async def test_what_was_acknowledged_behind_garbage_is_read(deployment: Deployment, head: bytes | None) -> None:
    """A foreign status header must not be taken for the end of the log."""
    async with deployment.store(flusher=False) as store, deployment.store(flusher=False) as reader:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await publish_raw(store, head, b"body")
        receipt = await store.checkpoint(thread_id, [said(0), said(1)], run_of(thread_id))
        for _ in range(2):
            assert await reader.load_messages(thread_id, at_least=receipt) == [said(0), said(1)]
            await reader.checkpoint(thread_id, [said(0), said(1), said(2)], run_of(thread_id))
            found = await store.load_messages(thread_id)
            assert found == [said(0), said(1), said(2)]
            receipt = await store.checkpoint(thread_id, [said(0), said(1)], run_of(thread_id))


DEEP = b"\x91" * 100_000
PAYLOADS = {
    "nothing": b"",
    "garbage": b"\xc1\xff garbage",
    "bomb of depth": DEEP,
    "bomb of length": b"\xdd\xff\xff\xff\xff",
    "bomb of bytes": b"\xc6\xff\xff\xff\xff",
    "bomb in a payload": b"\x95\xaacheckpoint\x00" + DEEP,
    "another kind": msgspec.msgpack.encode(["a kind of the future", 0, []]),
    "kept more than there is": encode_payload(Payload(5, [], RUN, saved("run"))),
    "negative keep": msgspec.msgpack.encode(["checkpoint", -1, [], RUN, ["run", "done", None]]),
    "kept more than a number holds": encode_payload(Payload(1 << 63, [], RUN, saved("run"))),
    "no such status": msgspec.msgpack.encode(["checkpoint", 0, [], RUN, ["run", "gone", None]]),
    "not its version": encode_payload(Payload(0, [b"\x01", b"\x02"], RUN, saved("run"))),
    "a message that is none": encode_payload(Payload(0, [b"\xc1"], RUN, saved("run"))),
    "a message cut short": encode_payload(Payload(0, [b"\x81\xa2id"], RUN, saved("run"))),
    "a message and more": encode_payload(Payload(0, [b"\x01\x02"], RUN, saved("run"))),
    "a deep message": encode_payload(Payload(0, [DEEP], RUN, saved("run"))),
    "a run that is none": encode_payload(Payload(0, [b"\x01"], b"\xc1", saved("run"))),
    "a run id with a NUL": encode_payload(Payload(0, [b"\x01"], RUN, saved("a\0b"))),
    "a parent with a NUL": encode_payload(Payload(0, [b"\x01"], RUN, saved("run", parent="a\0b"))),
}


async def test_sealed_entries_with_hostile_contents_are_quarantined(deployment: Deployment) -> None:
    """The checksums are right: anyone who may publish can compute them."""
    deployment.verified = False
    async with deployment.store() as store:
        threads = {what: fresh() for what in PAYLOADS}
        for what, payload in PAYLOADS.items():
            await publish_entry(store, threads[what], forged(payload), payload)
        huge = fresh()
        body = encode_payload(Payload(2**40, [], RUN, saved("run")))
        meta = [1, 0, Base.NONE, 0, 2**40, False, b"", 0, 1, True]
        await publish_entry(store, huge, sealed(meta, body), body)
        good = fresh("good")
        await store.checkpoint(good, [said(0)], run_of(good))
        await store.force_flush(good, timeout_s=10)
        await store.force_flush_all(timeout_s=10)
        parked = {p.thread_id: p.cause for p in await store.quarantine.page()}
        assert set(parked) == {*threads.values(), huge}, set(threads.values()) - set(parked)
        await store.checkpoint(good, [said(0), said(1)], run_of(good))
        assert await store.load_messages(good, consistency=Consistency.STRONG) == [said(0), said(1)]
        for thread_id in parked:  # a whole list heals each thread
            assert thread_id is not None
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == [said(0)]


async def test_entries_of_another_version_cut_or_changed_are_quarantined_byte_for_byte(deployment: Deployment) -> None:
    body = encode_payload(Payload(0, [b"\x01"], RUN, saved("run")))
    sound = forged(body)
    meta = [7, 0, Base.UNKNOWN, 0, 1, True, b"", 0, 1, True]
    variants = {
        "future version": (sealed(meta, body, version=2), body),
        "version of nothing": (sealed(meta, body, version=""), body),
        "body cut": (sound, body[:-1]),
        "body longer": (sound, body + b"\0"),
        "body changed": (sound, body[:-1] + bytes([body[-1] ^ 1])),
        "header cut": (sound[:-20] + b"\r\n\r\n", body),
        "the first of pieces": (sealed([*meta[:7], 0, 3, True], body), body),
        "one of pieces": (sealed([*meta[:7], 1, 3, True], body), body),
        "one of more pieces than any": (sealed([*meta[:7], 0, 2**40, True], body), body),
        "no header": (None, body),
        "empty": (None, b""),
        "a message of the most there is": (None, b"x" * ((1 << 20) - 100)),
    }
    async with deployment.store() as store:
        threads = {what: fresh() for what in variants}
        for what, (head, data) in variants.items():
            await publish_entry(store, threads[what], head, data)
        for body in (b"nowhere", b"", b"\0" * 100_000):
            await publish_raw(store, None, body)
        good = [fresh() for _ in range(20)]
        for thread_id in good:
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            await store.force_flush(thread_id, timeout_s=10)
        await store.force_flush_all(timeout_s=10)

        async def parked() -> bool:
            return await store.quarantined() == len(variants) + 3

        await eventually(parked)
        kept = {p.thread_id: p.seq for p in await store.quarantine.page()}
        for what, thread_id in threads.items():
            item: Any = (await store.quarantine.show(kept[thread_id])).item
            assert item.messages[0].body == variants[what][1], what


async def test_garbage_in_the_hot_bucket_and_on_its_subjects_makes_nothing_wrong(deployment: Deployment) -> None:
    garbage = [b"", b"\xff\xfe", b"-1", b"9" * 400, b"99999999999", b"nan", b"\0", b"a" * 5000, b"left"]
    async with deployment.store() as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        bucket, name = f"$KV.{deployment.log.bucket}", deployment.name
        client = store.buffer.session.connection.client()
        for data in garbage:
            for key in ("flushed.x", "flushed.-1", "run.dA", "run.*x", "lineage.x", "what", "a.b.c"):
                await client.publish(f"{bucket}.{key}", data)
            for subject in (f"{name}-flush.x", f"{name}-flush.99", f"{name}-flush.members", f"{name}-parked"):
                await client.publish(subject, data)
        await client.flush()
        assert store.buffer.session.connection.client() is client
        await store.checkpoint_append(thread_id, [said(1)], run_of(thread_id))
        assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == [said(0), said(1)]
        other = fresh()
        await store.checkpoint(other, [said(0)], run_of(other))
        await store.force_flush_all()
        await healthy(store)


async def test_a_message_that_postgres_would_not_take_is_refused_by_the_direct_store(deployment: Deployment) -> None:
    async with deployment.inner() as store:
        await store.setup()
        assert isinstance(store, PostgresThreadStore)
        for bad in UNUSABLE:
            with pytest.raises((InvalidId, InvalidRecord)):
                await store.checkpoint(bad, [], Run(run_id="r", thread_id=bad))
        for bad in (None, {}, "run", Run):
            with pytest.raises(InvalidRecord):
                await store.checkpoint("t", [], bad)
        with pytest.raises(InvalidQuery):
            await store.query_threads(cursor="garbage")


@pytest.mark.long
def test_hostile_arguments_of_the_command_line_end_in_one_line(servers: Servers, tmp_path: Path) -> None:
    """Whatever reaches the servers must be refused by them, or by us, with one line that explains it."""
    name = fresh("c").replace("-", "_")
    there = {
        "BUFSTORE_NATS": servers.nats.url,
        "BUFSTORE_POSTGRES": servers.postgres.dsn,
        "BUFSTORE_STREAM": name,
        "BUFSTORE_BUCKET": name,
        "BUFSTORE_SCHEMA": name,
    }
    runner = CliRunner(env=there)
    lines = tmp_path / "one.jsonl"
    lines.write_text('{"thread_id": "t", "messages": [1]}\n')
    huge, ids = 2**64, ["", "\udcff", "t" * 1025, "\x1b[2J", "[red]x[/]", "a\nb", "'; DROP TABLE x; --"]
    tries = [
        *(["quarantine", "show", str(n)] for n in (0, 2**63, huge)),
        ["quarantine", "discard", str(huge)],
        ["quarantine", "list", "--after", str(huge)],
        ["quarantine", "list", "--after", "-5"],
        ["quarantine", "list", "--limit", str(huge)],
        ["quarantine", "replay", str(huge)],
        ["quarantine", "replay", "\u0663"],
        *(["quarantine", "list", "--thread", id_] for id_ in ids),
        *(["quarantine", "replay", "--thread", id_] for id_ in ids),
        *(["flush", id_] for id_ in ids),
        ["flush", "t", "--timeout", "nan"],
        *(["log", "entries", side, text] for side in ("--after", "--before") for text in ("9999-12-31", "0001-01-02")),
        *(["status", "--stream", text] for text in ("", "a b", "a.b", "*", "a\r\nPUB x 0\r\n")),
        *(["status", "--schema", text] for text in ("", "\udcff", "pg_x", "x" * 64)),
        ["doctor", "--nats-monitor", "http://x y"],
        ["doctor", "--nats-monitor", "file:///etc/passwd"],
    ]
    assert runner.invoke(app, ["import", str(lines)]).exit_code == 0
    for arguments in tries:
        result = runner.invoke(app, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), arguments
        assert result.exit_code in (0, 1, 2), arguments
        assert "\x1b" not in result.output, arguments
        assert result.exit_code != 2 or "Error: " in result.output or arguments[0] == "doctor", arguments
    assert runner.invoke(app, ["verify"]).exit_code == 0
