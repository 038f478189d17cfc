"""`bufstore import` as a process, and its verification."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from bufstore import RunStatus
from bufstore.cli.connect import Endpoints
from bufstore.cli.conversations import transactions
from bufstore.cli.conversations.comparison import Comparison, Expected, compare
from bufstore.config import NatsConfig
from bufstore.embedded import Servers
from command_line import COMMAND, ENVIRONMENT, bufstore_cli, generate, lines_of, stored, where
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said

REPORT = {
    "threads", "checkpoints", "acknowledged", "flushed", "lost", "mismatched", "quarantined", "bad_lines",
    "postgres_transactions", "append_p50_ms", "append_p99_ms", "seconds",
}  # fmt: skip


@pytest.fixture
def data() -> Iterator[Path]:
    """A folder that the account which runs Postgres for root can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="cli-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.mark.long
def test_import_of_a_gzipped_file_into_embedded_servers(tmp_path: Path) -> None:
    threads = list(generate(7, 60))
    file = tmp_path / "conversations.jsonl.gz"
    file.write_bytes(gzip.compress(lines_of(threads)))
    checkpoints = sum(len(m) for _, m in threads)
    result = bufstore_cli("import", file, "--embedded", "--json")
    assert result.code == 0, result
    assert set(result.json) == REPORT
    assert result.json["threads"] == 60
    assert result.json["checkpoints"] == result.json["acknowledged"] == result.json["flushed"] == checkpoints
    assert [result.json[k] for k in ("lost", "mismatched", "quarantined", "bad_lines")] == [0, 0, 0, 0]
    # The slower the machine, the more windows of the same length.
    assert 0 < result.json["postgres_transactions"] <= checkpoints / 10
    assert 0 < result.json["append_p50_ms"] <= result.json["append_p99_ms"] < result.json["seconds"] * 1000


def test_import_of_real_conversations(conversations_file: Path) -> None:
    result = bufstore_cli("import", conversations_file, "--embedded", "--json")
    assert result.code == 0, result
    counts = {k: result.json[k] for k in ("threads", "acknowledged", "flushed", "lost", "mismatched", "bad_lines")}
    assert counts == {"threads": 200, "acknowledged": 5308, "flushed": 5308, "lost": 0, "mismatched": 0, "bad_lines": 0}
    assert 0 < result.json["postgres_transactions"] <= 5308 / 20


def test_transactions_are_those_that_the_server_counts(made: Deployment) -> None:
    """Transactions of other sessions count too: here a hundred, in a session that ended while the import ran."""
    count = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    dsn = made.servers.postgres.dsn
    with subprocess.Popen(
        [*COMMAND, "import", "-", "--json", "-v"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=ENVIRONMENT | where(made),
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(lines_of([(fresh(), [1])]))
        process.stdin.flush()
        next(line for line in process.stderr if b"acknowledged" in line)
        with psycopg.connect(dsn, autocommit=True) as connection:
            for _ in range(100):
                connection.execute(count)
        process.stdin.close()
        report = json.load(process.stdout)
    assert process.returncode == 0
    assert 100 < report["postgres_transactions"] < 1000  # the import's own polling needs about as many


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
async def test_transactions_are_counted_as_soon_as_our_sessions_have_ended(
    made: Deployment, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """The count waits for the session's statistics also when this takes longer than one query may."""
    monkeypatch.setattr(transactions, "_TIMEOUT_S", 4.0)
    monkeypatch.setattr(transactions, "_SESSION_END_S", 60.0)
    dsn, role = made.servers.postgres.dsn, fresh("role")
    await query(dsn, f"CREATE ROLE \"{role}\" SUPERUSER LOGIN PASSWORD 'x'")
    await query(dsn, f"ALTER ROLE \"{role}\" SET default_transaction_isolation = '{level}'")
    own = make_conninfo(dsn, user=role, password="x")
    target = Endpoints(nats=NatsConfig(), postgres=own, schema=made.name, stream="S", bucket="b")
    looks = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND query LIKE %s"
    session = await psycopg.AsyncConnection.connect(make_conninfo(own, application_name=target.session))
    async with session, asyncio.timeout(60):
        counted = asyncio.create_task(transactions.count_transactions(target))
        await eventually(lambda: query(dsn, looks, target.session, "%pg_stat_activity%"))
        ended, _ = await asyncio.wait([counted], timeout=4.5)
        assert not ended, "longer than one question may take"
        await session.close()
        assert await counted > 0


def test_messages_of_any_shape_come_back_exactly(made: Deployment, tmp_path: Path) -> None:
    shapes = [
        None,
        True,
        1,
        1.0,
        -0.0,
        1e300,
        2**63,
        -(2**63),
        "",
        "\0",
        "日本\u2028🙂",
        [],
        [[1], {}],
        {"b": 1, "a": {"": None}},
    ]
    threads = {
        fresh(): shapes,
        fresh("'; DROP TABLE x; -- \n"): ["odd id"],
        fresh("空 * > ."): [{"role": "user"}],
        fresh(): [],
    }
    (tmp_path / "f").write_bytes(lines_of(threads.items()))
    result = bufstore_cli("import", tmp_path / "f", "--json", **where(made))
    assert result.code == 0, result
    # The thread without messages gets a checkpoint too, or it would not exist.
    assert (result.json["acknowledged"], result.json["flushed"], result.json["mismatched"]) == (17, 17, 0)
    assert repr(stored(made, *threads)) == repr(list(threads.values()))


def test_a_run_of_the_import_ends_as_done(made: Deployment) -> None:
    long_id = "x" * 1024
    assert bufstore_cli("import", "-", stdin=lines_of([(long_id, [1, 2])]), **where(made)).code == 0

    async def read() -> Any:
        async with made.inner() as plain:
            return await plain.load_checkpoint(long_id)

    checkpoint = asyncio.run(read())
    assert (checkpoint.messages, checkpoint.latest_run.status) == ([1, 2], RunStatus.DONE)
    assert (checkpoint.thread.active_run_id, checkpoint.thread.open_run_id) == (None, None)


def test_bad_lines_are_reported_by_number_and_skipped(made: Deployment) -> None:
    good = fresh(), fresh()
    bad = [
        b"not json",
        b'{"thread_id": "t", "messages": [NaN]}',
        b'"a string"',
        b'{"messages": []}',
        b'{"thread_id": "t"}',
        b'{"thread_id": 1, "messages": []}',
        b'{"thread_id": "", "messages": []}',
        b'{"thread_id": "a\\u0000b", "messages": []}',
        b'{"thread_id": "\\ud800", "messages": []}',
        b'{"thread_id": "' + b"x" * 1025 + b'", "messages": []}',
        b'{"thread_id": "t", "messages": {}}',
        b'{"thread_id": "t", "messages": [1, 99999999999999999999]}',
        b'{"thread_id": "t", "messages": [' + b"[" * 200 + b"]" * 200 + b"]}",
        b'{"thread_id": "t", "messages": ' + b"[" * 100_000,
        b"\xff\xfe",
    ]
    first, last = lines_of([(good[0], ["a"])]), lines_of([(good[1], ["b"])]).rstrip(b"\n")
    result = bufstore_cli("import", "-", "--json", stdin=first + b"\n \n" + b"\n".join([*bad, last]), **where(made))
    assert result.code == 1, "a script must see that something was skipped"
    assert result.json["bad_lines"] == len(bad)
    assert (result.json["threads"], result.json["acknowledged"]) == (2, 2)
    reported = [line.partition(":")[0] for line in result.err.splitlines()]
    assert reported == [f"line {n}" for n in range(4, 4 + len(bad))]
    assert stored(made, *good, "t") == [["a"], ["b"], None]


def test_many_bad_lines_are_counted_but_not_all_printed(made: Deployment) -> None:
    result = bufstore_cli("import", "-", "--json", stdin=b"{}\n" * 50, **where(made))
    assert (result.code, result.json["bad_lines"]) == (1, 50)
    assert len(result.err.splitlines()) == 21
    assert "30 more" in result.err


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_import_of_standard_input(made: Deployment, pack: Callable[[bytes], bytes]) -> None:
    threads = [(fresh(), [said(n) for n in range(5)]) for _ in range(20)]
    result = bufstore_cli("import", "-", "--json", stdin=pack(lines_of(threads)), **where(made))
    assert (result.code, result.json["acknowledged"], result.json["lost"]) == (0, 100, 0), result
    assert stored(made, *(t for t, _ in threads)) == [m for _, m in threads]


def test_a_damaged_file_is_imported_as_far_as_it_goes(made: Deployment, tmp_path: Path) -> None:
    threads = [(fresh(), [os.urandom(3000).hex()]) for _ in range(50)]
    packed = gzip.compress(lines_of(threads))
    (tmp_path / "cut").write_bytes(packed[: len(packed) // 2])
    result = bufstore_cli("import", tmp_path / "cut", "--json", **where(made))
    assert result.code == 1, result
    assert "cannot be read from here on" in result.err
    assert 10 < result.json["threads"] < 50
    assert result.json["threads"] == result.json["flushed"]


def test_a_thread_that_exists_is_an_error_unless_overwritten(made: Deployment) -> None:
    old, new = fresh(), fresh()
    assert bufstore_cli("import", "-", stdin=lines_of([(old, ["a", "b", "c"])]), **where(made)).code == 0
    again = lines_of([(new, ["n"]), (old, ["A"])])
    result = bufstore_cli("import", "-", "--json", stdin=again, **where(made))
    assert (result.code, result.json["threads"], result.json["bad_lines"]) == (1, 1, 1)
    assert result.err.startswith(f"line 2: thread {old!r} exists with 3 messages, and the line has 1 ")
    assert stored(made, old, new) == [["a", "b", "c"], ["n"]]
    result = bufstore_cli("import", "-", "--json", "--overwrite", stdin=again, **where(made))
    assert (result.code, result.json["threads"], result.json["bad_lines"]) == (0, 2, 0), result
    assert stored(made, old, new) == [["A"], ["n"]]


async def test_a_thread_that_is_only_in_the_log_exists_too(deployment: Deployment) -> None:
    thread = fresh()
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread, ["unflushed"], run_of(thread))
    result = await asyncio.to_thread(
        bufstore_cli, "import", "-", stdin=lines_of([(thread, ["x"])]), **where(deployment)
    )
    assert result.code == 1
    assert "exists" in result.err


def test_lines_of_one_thread_follow_in_order(made: Deployment) -> None:
    thread = fresh()
    versions = [(thread, [f"{v}:{n}" for n in range(8 - v)]) for v in range(8)]
    result = bufstore_cli("import", "-", "--json", stdin=lines_of(versions), **where(made))
    assert (result.code, result.json["bad_lines"], result.json["acknowledged"]) == (1, 7, 8)
    assert "line 2: thread" in result.err
    assert stored(made, thread) == [versions[0][1]]
    result = bufstore_cli("import", "-", "--json", "--overwrite", stdin=lines_of(versions), **where(made))
    assert (result.code, result.json["acknowledged"], result.json["flushed"]) == (0, 36, 36), result
    assert stored(made, thread) == [versions[-1][1]]


@pytest.mark.long
def test_a_message_too_large_for_the_log_is_reported_and_the_rest_is_imported(made: Deployment) -> None:
    # Below the limit of a line as JSON, above the log's limit as an entry, where each number takes nine bytes.
    huge = b"[" + b"1e1," * 8_000_000 + b"0]"
    thread, other = fresh(), fresh()
    big = b'{"thread_id": "%b", "messages": ["small", %b]}\n' % (thread.encode(), huge)
    result = bufstore_cli("import", "-", "--json", stdin=big + lines_of([(other, ["o"])]), **where(made))
    assert result.code == 1, result
    assert result.err.startswith("line 1: refused after 1 checkpoints")
    counts = [result.json[k] for k in ("threads", "checkpoints", "acknowledged", "flushed", "lost", "bad_lines")]
    assert counts == [2, 3, 2, 2, 0, 1]
    assert stored(made, thread, other) == [["small"], ["o"]]


@pytest.mark.long
def test_an_import_waits_for_postgres(own_servers: Servers) -> None:
    threads = list(generate(3, 200))
    addresses = {"BUFSTORE_NATS": own_servers.nats.url, "BUFSTORE_POSTGRES": own_servers.postgres.dsn}
    with subprocess.Popen(
        [*COMMAND, "import", "-", "--json", "-v"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=ENVIRONMENT | addresses,
    ) as process:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(lines_of(threads[:100]))
        process.stdin.flush()
        next(line for line in process.stderr if b"acknowledged" in line)
        own_servers.postgres.stop()
        process.stdin.write(lines_of(threads[100:]))
        process.stdin.close()
        next(line for line in process.stderr if b"cannot flush" in line)
        own_servers.postgres.start()
        report = json.load(process.stdout)
    assert process.returncode == 0
    assert report["flushed"] == sum(len(m) for _, m in threads)
    assert (report["threads"], report["lost"], report["mismatched"]) == (200, 0, 0)


@pytest.mark.long
def test_nothing_acknowledged_is_lost_when_an_import_is_killed(data: Path, tmp_path: Path) -> None:
    threads = dict(generate(5, 2000))
    (tmp_path / "f").write_bytes(lines_of(threads.items()))
    with subprocess.Popen(
        [*COMMAND, "import", tmp_path / "f", "--embedded", "--data", data / "d", "-v"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        assert process.stderr
        finished = (line.decode().split("'")[1] for line in process.stderr if b"checkpoints acknowledged" in line)
        acknowledged = set(itertools.islice(finished, 100))
        process.kill()
        acknowledged.update(finished)
    assert 100 <= len(acknowledged) < 2000
    result = bufstore_cli("flush", "--all", "--embedded", "--data", data / "d", "--json")
    assert (result.code, result.json["flushed"]) == (0, True), result
    with Servers(data / "d") as servers:
        found = dict(zip(threads, stored(servers.postgres.dsn, *threads), strict=True))
    assert [t for t in acknowledged if found[t] != threads[t]] == []
    # Threads that were not acknowledged hold a beginning of their messages, in order.
    assert [t for t, m in found.items() if m is not None and m != threads[t][: len(m)]] == []


@pytest.mark.long
def test_ctrl_c_ends_an_import_that_waits_for_input(data: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "import", "-", "--embedded", "--data", data / "d", "-v"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
        # A shell's background jobs, as which these tests may run, ignore Ctrl-C, and their children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    ) as process:  # fmt: skip
        assert process.stdin and process.stderr and process.stdout
        process.stdin.write(lines_of([("t", ["x"])]))
        process.stdin.flush()
        next(line for line in process.stderr if b"acknowledged" in line)
        process.send_signal(signal.SIGINT)
        # Standard input stays open: the command must not wait for its end.
        last = [line for line in process.stderr if b"INFO" not in line]
        assert process.wait(30) == 130
        assert process.stdout.read() == b""
    assert [line for line in last if b"WARNING" not in line] == [b"interrupted\n"]
    flushed = bufstore_cli("flush", "--all", "--embedded", "--data", data / "d", "--json")
    assert flushed.code == 0, flushed  # the command may have had too little time for it
    with Servers(data / "d") as servers:  # the command has stopped its servers, so the folder is free
        assert stored(servers.postgres.dsn, "t") == [["x"]]


async def test_verification_finds_what_is_lost_and_what_differs(deployment: Deployment) -> None:
    threads = {name: ["one", 2, {"three": 3.0}] for name in ("same", "changed", "typed", "cut", "gone", "longer")}

    async def expected() -> AsyncIterator[Expected]:
        for thread, messages in threads.items():
            yield Expected(thread, messages, 3, receipts[thread])

    async def compared() -> Comparison:
        async with deployment.inner() as plain:
            return await compare(plain, expected())

    async with deployment.store() as store:
        receipts = {t: (await store.checkpoint(t, m, run_of(t))).thread_seq for t, m in threads.items()}
        await store.force_flush_all()
        found = await compared()
        assert (found.ok, found.threads, found.compared, found.flushed) == (True, 6, 18, 18)
    # Make by hand the damage that a broken flush could do.
    dsn, schema = deployment.servers.postgres.dsn, deployment.name
    for statement in (
        f"UPDATE {schema}.messages SET payload = '\\xa3544f4f' WHERE thread_id = 'changed' AND payload = '\\xa36f6e65'",
        f"UPDATE {schema}.messages SET payload = '\\xcb4000000000000000' "
        "WHERE thread_id = 'typed' AND payload = '\\x02'",
        f"DELETE FROM {schema}.messages WHERE thread_id = 'cut' AND payload <> '\\xa36f6e65'",
        f"UPDATE {schema}.threads SET version = 1 WHERE thread_id = 'cut'",
        f"DELETE FROM {schema}.messages WHERE thread_id = 'gone'",
        f"DELETE FROM {schema}.threads WHERE thread_id = 'gone'",
        f"INSERT INTO {schema}.messages SELECT thread_id, max(seq) + 1, '\\x07' FROM {schema}.messages "
        "WHERE thread_id = 'longer' GROUP BY thread_id",
        f"UPDATE {schema}.threads SET version = 4 WHERE thread_id = 'longer'",
    ):
        await query(dsn, statement)
    found = await compared()
    assert (found.ok, found.lost, found.mismatched) == (False, 2 + 3, 3)
    assert {problem.split("'")[1] for problem in found.problems} == {"changed", "typed", "cut", "gone", "longer"}
