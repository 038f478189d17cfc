"""The command line as processes on real servers: status, flush, and commands that cannot work."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bufstore.embedded import Servers
from bufstore.errors import NoLog
from command_line import COMMAND, ENVIRONMENT, bufstore_cli, lines_of, where
from conftest import Deployment
from fault_proxy.proxy import FaultProxy
from helpers import eventually, fresh, query, run_of, said

#: A shell's background jobs, as which these tests may run, ignore Ctrl-C, and their children would too.
INTERRUPTIBLE: Any = {
    "stdout": asyncio.subprocess.DEVNULL,
    "stderr": asyncio.subprocess.DEVNULL,
    "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
}


async def status_of(deployment: Deployment, code: int = 0) -> Any:
    result = await asyncio.to_thread(bufstore_cli, "status", "--json", **where(deployment))
    assert (result.code, result.json["ok"]) == (code, code == 0), result
    return result.json


async def test_status_shows_lag_and_flushes_nothing(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy(partitions=3)
    threads = [fresh() for _ in range(20)]
    async with deployment.store(flusher=False) as store:
        for thread in threads:
            await store.checkpoint(thread, [said(1)], run_of(thread))
        for _ in range(2):
            found = await status_of(deployment, code=1)  # exit code 1: nobody flushes
            assert (found["lag"], found["members"], found["quarantined"]) == (20, [], 0)
            assert [p["cursor"] for p in found["partitions"]] == [0, 0, 0]
            assert {p["owner"] for p in found["partitions"]} == {None}
            assert 0 < found["log_bytes"] < found["log_bytes_max"] == deployment.log.max_bytes
            assert 0.9 * found["log_bytes"] < found["log_bytes_unflushed"] <= found["log_bytes"]
            assert (found["log_full_in_s"], found["waiting"]["entries"]) == (None, 0)
            assert 1 <= found["group_entries"] <= 20
            assert found["group_bytes"] > 100
            assert (found["can_write"], found["can_read"], found["flushing"]) == (True, True, False)
            assert "no flusher" in found["flush_trouble"]
        async with deployment.store():
            await store.force_flush_all()
            found = await status_of(deployment)
            (member,) = found["members"]
            assert (found["lag"], found["log_bytes_unflushed"], found["flushing"]) == (0, 0, True)
            assert [(p["owner"], p["lag"]) for p in found["partitions"]] == [(member, 0)] * 3
            result = await asyncio.to_thread(bufstore_cli, "status", **where(deployment))
            assert result.code == 0
            assert all(
                word in result.out for word in (deployment.log.stream, member, "quarantined entries: 0", "last groups")
            )


async def test_status_shows_the_trouble_of_each_flusher(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await store.buffer.shared.renew_member("other", 60, "the quarantine is full")
        found = await status_of(deployment, code=1)
        assert (found["flushing"], found["flush_trouble"]) == (False, "flusher other: the quarantine is full")
        await store.buffer.shared.leave("other")


@pytest.mark.long
async def test_status_and_doctor_say_when_the_log_will_be_full(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        threads = [fresh() for _ in range(200)]
        await asyncio.gather(*(store.checkpoint(t, [said(1)], run_of(t)) for t in threads))

        async def write_on() -> None:
            while True:
                await store.checkpoint(thread := fresh(), [said(1)], run_of(thread))
                await asyncio.sleep(0.05)

        # They look twice, a second apart; a writer that stood still meanwhile has written nothing.
        async def full_in_s() -> Any:
            return (await status_of(deployment, code=1))["log_full_in_s"]

        async def shown() -> bool:
            return " at this rate" in (await asyncio.to_thread(bufstore_cli, "status", **where(deployment))).out

        async def warned() -> bool:
            result = await asyncio.to_thread(bufstore_cli, "doctor", "--json", **where(deployment))
            (check,) = (c for c in result.json["checks"] if c["what"] == "headroom of the log")
            return check["level"] == "warning" and "not flushed, full in" in check["found"]

        writing = asyncio.create_task(write_on())
        try:
            assert await eventually(full_in_s, 60) > 0
            await eventually(shown, 60)
            await eventually(warned, 60)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


@pytest.mark.long  # fifteen seconds of timeouts
def test_without_postgres_status_shows_the_log_and_a_flush_says_why_it_waited(own_servers: Servers) -> None:
    addresses = {"BUFSTORE_NATS": own_servers.nats.url, "BUFSTORE_POSTGRES": own_servers.postgres.dsn}
    assert bufstore_cli("import", "-", stdin=lines_of([("t", [1])]), **addresses).code == 0
    own_servers.postgres.stop()
    result = bufstore_cli("flush", "--all", "--timeout", 10, **addresses)
    assert (result.code, "which entries wait: no connection to Postgres" in result.err) == (2, True), result
    result = bufstore_cli("status", "--json", **addresses)
    assert result.code == 2, result
    assert (result.json["ok"], result.json["lag"], result.json["quarantined"]) == (False, None, None)
    assert result.json["postgres_trouble"]
    assert [result.json[can] for can in ("can_write", "can_read", "flushing")] == [True, False, False]
    assert result.json["read_trouble"].startswith("Postgres: ")
    assert max(p["end"] for p in result.json["partitions"]) > 0


async def test_flush_of_one_thread_without_any_flusher(deployment: Deployment) -> None:
    thread = fresh()
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread, ["x"], run_of(thread))
    result = await asyncio.to_thread(bufstore_cli, "flush", thread, "--json", **where(deployment))
    assert result.code == 0, result
    assert (result.json["thread_id"], result.json["flushed"], result.json["flushed_here"]) == (thread, True, True)
    async with deployment.inner() as plain:
        assert await plain.load_messages(thread) == ["x"]


async def test_flush_asks_the_flusher_that_is_alive(deployment: Deployment) -> None:
    thread = fresh()
    async with deployment.store(flush_interval_s=3600) as store:
        await store.force_flush_all()
        await store.checkpoint(thread, ["x"], run_of(thread))
        result = await asyncio.to_thread(bufstore_cli, "flush", "--all", "--json", **where(deployment))
        assert (result.code, result.json["flushed_here"]) == (0, False), result
        async with deployment.inner() as plain:
            assert await plain.load_messages(thread) == ["x"]


@asynccontextmanager
async def hanging_postgres() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A Postgres that accepts connections and never answers; the event is set at the first connection."""
    connected = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        with contextlib.suppress(OSError):
            await reader.read(-1)
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1") as server:
        yield f"postgresql://u@127.0.0.1:{server.sockets[0].getsockname()[1]}/x", connected


@pytest.mark.long
async def test_a_flush_ends_in_its_time_while_postgres_hangs(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread := fresh(), ["x"], run_of(thread))
    async with hanging_postgres() as (dsn, _):
        hangs = where(deployment) | {"BUFSTORE_POSTGRES": dsn}
        for what in ([thread], ["--all"]):
            result = await asyncio.to_thread(bufstore_cli, "flush", *what, "--timeout", 0.5, "--json", **hangs)
            assert (result.code, result.json["error"]) == (2, "FlushTimeout"), result


@pytest.mark.long  # twenty seconds of timeouts
async def test_a_flush_ends_in_its_time_when_postgres_hangs_in_the_middle(deployment: Deployment) -> None:
    """The statement in progress delays the command neither at its timeout nor at Ctrl-C."""
    dsn, thread = deployment.servers.postgres.dsn, fresh()
    async with deployment.store() as store:
        await store.checkpoint(thread, ["x"], run_of(thread))
    async with deployment.store(flusher=False) as store:
        await store.checkpoint_append(thread, ["y"], run_of(thread))
    await query(dsn, f"CREATE FUNCTION {deployment.name}.hang() RETURNS trigger LANGUAGE plpgsql AS "
                     "'BEGIN PERFORM pg_sleep(600); RETURN NEW; END'")  # fmt: skip
    await query(dsn, f"CREATE TRIGGER hang BEFORE INSERT ON {deployment.name}.messages "
                     f"FOR EACH ROW EXECUTE FUNCTION {deployment.name}.hang()")  # fmt: skip
    asleep = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    postgres = conninfo_to_dict(dsn)
    todo = [(600, 130), (15, 2)]
    while todo:
        seconds, code = todo.pop()
        async with FaultProxy(str(postgres["host"]), int(str(postgres["port"])), protocol="postgres") as proxy:
            hangs = where(deployment) | {"BUFSTORE_POSTGRES": make_conninfo(dsn, host="127.0.0.1", port=proxy.port)}
            process = await asyncio.create_subprocess_exec(
                *COMMAND, "flush", thread, "--timeout", str(seconds), env=ENVIRONMENT | hangs, **INTERRUPTIBLE
            )
            try:
                await eventually(partial(_begun, process, dsn, asleep), 120)
                if process.returncode is None:
                    proxy.to_client.hold()
                    if code == 130:
                        process.send_signal(signal.SIGINT)
                    async with asyncio.timeout(2 * seconds if code == 2 else 30):
                        assert await process.wait() == code
                else:  # a busy machine had no time for the statement
                    assert (process.returncode, code, seconds < 100) == (2, 2, True)
                    todo.append((2 * seconds, code))
            finally:
                if process.returncode is None:
                    process.kill()
        await query(dsn, f"SELECT pg_terminate_backend(pid) FROM ({asleep}) AS _")
        await eventually(lambda: _none(dsn, asleep))


async def _begun(process: asyncio.subprocess.Process, dsn: str, rows: str) -> bool:
    """True when the process has a statement in progress, or has ended."""
    return process.returncode is not None or bool(await query(dsn, rows))


async def _none(dsn: str, rows: str) -> bool:
    return not await query(dsn, rows)


async def test_ctrl_c_ends_a_flush_while_postgres_hangs(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread := fresh(), ["x"], run_of(thread))
    async with hanging_postgres() as (dsn, connected):
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "flush", thread, env=ENVIRONMENT | where(deployment) | {"BUFSTORE_POSTGRES": dsn}, **INTERRUPTIBLE
        )
        await connected.wait()
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(20):
            assert await process.wait() == 130


def test_what_only_looks_makes_no_log(servers: Servers) -> None:
    addresses = {"BUFSTORE_NATS": servers.nats.url, "BUFSTORE_POSTGRES": servers.postgres.dsn}
    names = {"BUFSTORE_STREAM": "NO-SUCH-LOG", "BUFSTORE_SCHEMA": "no_such_schema"}
    for command in (["status"], ["verify"], ["flush", "--all"], ["quarantine", "list"], ["log", "show"], ["status"]):
        result = bufstore_cli(*command, **addresses, **names)
        assert (result.code, result.out) == (2, "")
        assert str(NoLog("NO-SUCH-LOG")) in " ".join(result.err.split())
    with psycopg.connect(servers.postgres.dsn) as connection:
        assert connection.execute("SELECT FROM pg_namespace WHERE nspname = 'no_such_schema'").rowcount == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["status"], "--nats and --postgres"),
        (["status"], "--embedded"),
        (["status", "--nats", "nats://x"], "--postgres (or BUFSTORE_POSTGRES) is missing"),
        (["status", "--postgres", "dbname=x"], "--nats (or BUFSTORE_NATS) is missing"),
        (["status", "--embedded", "--nats", "nats://x"], "leave out --nats"),
        (["status", "--data", "x"], "--data is for embedded servers"),
        (["flush", "--embedded"], "either a THREAD or --all"),
        (["flush", "x", "--all", "--embedded"], "either a THREAD or --all"),
        (["import", "no-such-file", "--embedded"], "does not exist"),
        (["demo", "--seconds", "4", "--outage", "3"], "at most half"),
        *((command, "is not in the range") for command in (
            ["quarantine", "list", "--after", str(2**63)],
            ["quarantine", "list", "--limit", str(10**25)],
            ["quarantine", "discard", "1", str(10**25)],
            ["quarantine", "replay", str(10**25)],
            ["log", "entries", "--after", str(10**25)],
            ["log", "entries", "--limit", str(10**25)],
            ["mailbox", "list", "--limit", str(10**25)],
            ["spark", "quarantine", "list", "--after", str(10**25)],
            ["spark", "quarantine", "discard", str(10**25)],
            ["spark", "quarantine", "replay", str(10**25)],
        )),
        (["quarantine", "replay", "9" * 5000], "not a valid integer"),
        (["log", "entries", "--after", "9" * 5000], "not a valid integer"),
        (["log", "entries", "--before", "0001-01-01T00:00:00+23:00"], "neither a position nor a time"),
        (["mailbox", "purge", "--older-than", "1e306"], "is not a number of at most 1e+10"),
        (["mailbox", "purge", "--older-than", "nan"], "is not a number of at most 1e+10"),
        (["status", "--embedded", "--data", "/dev/null/x"], "cannot create the data folder"),
        (["status", "--nats", "nats://u:s3cret@127.0.0.1:1", "--postgres", "dbname=x"], "cannot reach NATS"),
        (["status", "--nats", "u:s3cret@h:p", "--postgres", "dbname=x"], "Error: "),
        (["import", "-", "--nats", "x", "--postgres", "postgresql://u:s3cret@127.0.0.1:1/x"], "no connection to"),
        (["import", "-", "--nats", "x", "--postgres", "password=s3cret nonsense"], "cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_work_ends_in_one_line_and_exit_code_2(arguments: Sequence[str], says: str) -> None:
    result = bufstore_cli(*arguments)
    assert (result.code, result.out) == (2, ""), result
    assert says in result.err
    assert "Traceback" not in result.err
    assert "s3cret" not in result.err
    assert sum(line.startswith("Error: ") for line in result.err.splitlines()) == 1


def test_what_prints_sql_prints_no_json() -> None:
    result = bufstore_cli("setup", "--sql", "--json")
    assert (result.code, result.json["message"]) == (2, "--sql prints SQL: leave out --json.")


def test_the_environment_does_not_contradict_embedded() -> None:
    result = bufstore_cli("status", "--embedded", "--json", BUFSTORE_NATS="nats://127.0.0.1:1", BUFSTORE_POSTGRES="x")
    assert (result.code, result.json["write_trouble"], result.json["members"]) == (1, "", []), result


@pytest.mark.parametrize(
    ("name", "value"), [("PGGSSENCMODE", "require"), ("PGHOSTADDR", "10.255.255.1"), ("PGSERVICE", "nope")]
)
def test_what_the_environment_says_of_another_postgres_is_not_for_embedded_servers(name: str, value: str) -> None:
    """Regression: the command's servers started, and then nobody could connect to their Postgres."""
    result = bufstore_cli("status", "--embedded", "--json", **{name: value})
    assert (result.code, result.json["write_trouble"], result.json["members"]) == (1, "", []), result
