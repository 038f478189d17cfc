"""Everything works with exactly the rights that `bufstore setup` and `bufstore permissions` give, and no others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from bench.three_servers import three_servers
from bufstore import (
    BufferedThreadStore,
    BufstoreError,
    ConfigError,
    Consistency,
    NatsConfig,
    PostgresThreadStore,
    StoreMisconfigured,
)
from bufstore.embedded import Servers
from bufstore.nats.permissions import Role, permissions
from bufstore.testing import CHECKS
from command_line import Result, bufstore_cli, where
from conftest import Deployment
from helpers import eventually, fresh, healthy, query, run_of, said
from integration.test_quarantine import Picky, poisoned
from integration.test_setup import NatsByHand


def rights(deployment: Deployment, role: Role) -> str:
    """Return a user named after the role, with the rights that `bufstore permissions` prints for it."""
    return f"{{ user: {role.value}, password: {role.value}\n{permissions(role, deployment.log).config()} }}"


@dataclass
class Site:
    """A deployment on servers whose users have exactly the rights of their roles."""

    deployment: Deployment
    nats: NatsByHand
    owner: str = field(repr=False)
    app: str = field(repr=False)

    def user(self, role: Role) -> NatsConfig:
        return NatsConfig(servers=self.nats.url, user=role.value, password=role.value)

    async def cli(self, *arguments: object, role: Role = Role.OPERATOR, postgres: str | None = None) -> Result:
        environment = where(self.deployment) | {
            "BUFSTORE_NATS": self.nats.url,
            "BUFSTORE_NATS_USER": role.value,
            "BUFSTORE_NATS_PASSWORD": role.value,
            "BUFSTORE_POSTGRES": postgres or self.app,
        }
        return await asyncio.to_thread(bufstore_cli, *arguments, **environment)

    async def set_up(self) -> Result:
        log = ("--max-bytes", 128 << 20, "--subject", self.deployment.log.subject)
        result = await self.cli("setup", "--grant", self.app_role, *log, "--json", postgres=self.owner)
        assert result.code == 0, result
        return result

    @property
    def app_role(self) -> str:
        return f"app_{self.deployment.name}"

    @asynccontextmanager
    async def store(self, role: Role, inner: Any = None, **options: Any) -> AsyncIterator[BufferedThreadStore]:
        inner = inner or PostgresThreadStore(self.app, schema=self.deployment.name, pool_size=4)
        level = options.pop("consistency", Consistency.READ_YOUR_WRITES)
        config = self.deployment.config(**{"flusher": role is Role.FLUSHER} | options)
        nats = self.user(role)
        async with await BufferedThreadStore.open(inner, nats=nats, consistency=level, config=config) as store:
            yield store


@pytest.fixture
async def site(servers: Servers, tmp_path: Path) -> AsyncIterator[Site]:
    deployment = Deployment(servers)
    dsn, owner, app = servers.postgres.dsn, f"owner_{deployment.name}", f"app_{deployment.name}"
    await query(dsn, f"CREATE ROLE {owner} LOGIN PASSWORD 'right'")
    await query(dsn, f"GRANT CREATE ON DATABASE postgres TO {owner}")
    await query(dsn, f"CREATE ROLE {app} LOGIN PASSWORD 'right'")
    users = "\n".join(rights(deployment, role) for role in Role)
    nats = NatsByHand(tmp_path / "nats", f"accounts {{ A {{ jetstream: enabled, users: [\n{users}\n] }} }}")
    async with nats:
        as_owner, as_app = (make_conninfo(dsn, user=role, password="right") for role in (owner, app))
        yield Site(deployment, nats, as_owner, as_app)
    await query(dsn, f"DROP OWNED BY {owner}, {app} CASCADE")
    await query(dsn, f"DROP ROLE {owner}, {app}")


@pytest.fixture
def nothing_forbidden(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which NATS refused anything."""
    with caplog.at_level(logging.ERROR, "bufstore"):
        yield
    # `caplog.records` would be those of the teardown.
    said = [*caplog.get_records("setup"), *caplog.get_records("call")]
    assert [r.getMessage() for r in said if getattr(r, "action", "") == "nats_forbidden"] == []


async def test_setup_makes_what_an_app_then_needs_no_rights_for(site: Site) -> None:
    # Before the setup, each side says what to do.
    with pytest.raises(StoreMisconfigured, match=r"may not create them.*bufstore setup --grant"):
        async with site.store(Role.FLUSHER):
            pass
    made = await site.set_up()
    assert made.json["log_made"] is True
    assert made.json["migrated"].keys() == {"buffer", "threads"}
    assert all(made.json["migrated"].values())
    again = await site.set_up()
    assert (again.json["log_made"], again.json["migrated"]) == (False, {"buffer": [], "threads": []})
    shown = await site.cli("setup", postgres=site.owner)
    assert (shown.code, shown.out.count("up to date")) == (0, 2), shown
    itself = await site.cli("setup", "--grant", f"owner_{site.deployment.name}", postgres=site.owner)
    assert (itself.code, "needs no grant" in itself.err) == (2, True), itself
    await query(site.deployment.servers.postgres.dsn, f"CREATE ROLE third_{site.deployment.name}")
    third = await site.cli("setup", "--grant", f"third_{site.deployment.name}", postgres=site.app)
    assert (third.code, "got no rights" in third.err) == (2, True), third
    nobody = await site.cli("setup", "--grant", "nobody at all", postgres=site.owner)
    assert (nobody.code, "does not exist" in nobody.err) == (2, True), nobody
    other = await site.cli("setup", "--failover-window", 90, "--archive", postgres=site.owner)
    assert (other.code, "failover_window_s" in other.err or "archive" in other.err) == (2, True), other
    drift = await site.cli("setup", "--partitions", 4, postgres=site.owner)
    assert (drift.code, "partitions" in drift.err) == (2, True), drift
    thread_id = fresh()
    async with site.store(Role.FLUSHER) as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.force_flush(thread_id)


@pytest.mark.long
async def test_setup_does_not_wait_for_servers_that_are_away(site: Site) -> None:
    async with asyncio.timeout(40):
        for way in ((), ("--sql",), ("--own-store",)):
            away = await site.cli("setup", *way, postgres="postgresql://u:p@127.0.0.1:1/x")
            assert (away.code, "no connection to Postgres" in away.err) == (2, True), away


async def test_a_log_that_only_an_operator_may_make_is_said_so(site: Site) -> None:
    await site.cli("setup", "--own-store", "--grant", site.app_role, postgres=site.owner)
    rest = await site.cli("setup", "--sql", "--grant", site.app_role, postgres=site.owner)
    assert ("-- buffer 0001" in rest.out, "-- threads 0001" in rest.out) == (False, True), "what is missing only"
    async with await psycopg.AsyncConnection.connect(site.owner, autocommit=True) as owner:
        await owner.execute(rest.out.encode())
    with pytest.raises(ConfigError, match="bufstore setup"):
        async with site.store(Role.FLUSHER):
            pass


async def test_the_sql_that_is_printed_does_the_same(site: Site) -> None:
    environment = {"BUFSTORE_SCHEMA": site.deployment.name}
    printed = await asyncio.to_thread(bufstore_cli, "setup", "--sql", "--grant", site.app_role, **environment)
    assert printed.code == 0, printed
    async with await psycopg.AsyncConnection.connect(site.owner, autocommit=True) as owner:
        await owner.execute(printed.out.encode())
    nothing_left = await site.cli("setup", "--sql", postgres=site.owner)
    assert nothing_left.out == "-- Nothing is missing.\n"
    made = await site.set_up()
    assert made.json["migrated"] == {"buffer": [], "threads": []}
    async with site.store(Role.FLUSHER) as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush("t")


@pytest.mark.long  # the same contract, with the rights of an app
@pytest.mark.usefixtures("nothing_forbidden")
async def test_an_app_beside_a_flusher_keeps_the_contract(site: Site) -> None:
    await site.set_up()
    async with site.store(Role.FLUSHER) as first, site.store(Role.APP) as app:
        for check in CHECKS:
            await check(app)
        async with site.store(Role.APP, consistency=Consistency.STRONG) as strong:
            for check in CHECKS[::8]:
                await check(strong)
        # Partitions change hands, and a large entry is published as a batch.
        async with site.store(Role.FLUSHER) as second:
            thread_ids = [fresh() for _ in range(40)]
            await asyncio.gather(*(app.checkpoint(t, [said(0, 2 << 20), said(1)], run_of(t)) for t in thread_ids[:2]))
            await asyncio.gather(*(app.checkpoint(t, [said(0)], run_of(t)) for t in thread_ids[2:]))
            await app.force_flush_all()
            await healthy(second)
        await app.force_flush_all()
        assert (await first.verify()).ok


@pytest.mark.usefixtures("nothing_forbidden")
async def test_an_app_on_three_replicas_reads_strongly(deploy: Any, tmp_path: Path) -> None:
    deployment = deploy(replicas=3)
    users = "\n".join(rights(deployment, role) for role in Role)
    with three_servers(tmp_path, users) as cluster:
        urls = [f"nats://127.0.0.1:{server.port}" for server in cluster]

        async def made() -> bool:
            try:  # the cluster may have no leaders yet
                async with deployment.store(nats=NatsConfig(servers=urls, user="all", password="all"), flusher=False):
                    return True
            except BufstoreError:
                return False

        await eventually(made, 60)
        flusher, app = (NatsConfig(servers=urls, user=r.value, password=r.value) for r in (Role.FLUSHER, Role.APP))
        strong = Consistency.STRONG
        async with (
            deployment.store(nats=flusher),
            deployment.store(nats=app, flusher=False, consistency=strong) as store,
        ):
            for check in CHECKS[::8]:
                await check(store)


@pytest.mark.long
@pytest.mark.usefixtures("nothing_forbidden")
async def test_the_commands_work_with_an_operators_rights_and_an_apps_role(site: Site) -> None:
    await site.set_up()
    thread_id = fresh()
    inner = Picky(site.app, schema=site.deployment.name, pool_size=4)
    async with site.store(Role.FLUSHER, inner, flush_interval_s=600) as store:
        messages = await poisoned(store, thread_id)
    async with site.store(Role.APP) as store:
        await store.checkpoint("unflushed", [said(0)], run_of("unflushed"))
    for command in (("flush", "--all"), ("log", "entries"), ("quarantine", "list"), ("repair",)):
        result = await site.cli(*command)
        assert (result.code, "permit" in result.err) == (0, False), result
    status = await site.cli("status")
    assert (status.code, "permit" in status.err, "no flusher is alive" in status.out) == (1, False, True), status
    assert (await site.cli("log", "show")).code == 0
    for seconds in (90, 60):
        for command in (("log", "set", "--failover-window", seconds), ("log", "settle")):
            result = await site.cli(*command)
            assert (result.code, "permit" in result.err) == (0, False), result
    replayed = await site.cli("quarantine", "replay", thread_id)
    assert replayed.code == 0, replayed
    assert (await site.cli("verify")).code == 0
    for role in Role:
        looked = await site.cli("doctor", "--json", "--role", role.value, role=role)
        checks = {f"{c['part']} {c['what']}": c for c in looked.json["checks"]}
        assert {c["level"] for c in checks.values()} <= {"ok", "unknown", "warning"}, looked
        assert checks["NATS permissions"]["level"] == checks["Postgres permissions"]["level"] == "ok"
    too_little = await site.cli("doctor", "--json", "--role", "flusher", role=Role.APP)
    checks = {f"{c['part']} {c['what']}": c for c in too_little.json["checks"]}
    assert (too_little.code, checks["NATS permissions"]["level"]) == (2, "bad")
    assert "CONSUMER.CREATE" in checks["NATS permissions"]["found"]
    assert "bufstore permissions flusher" in checks["NATS permissions"]["advice"]
    async with site.store(Role.APP) as store:
        assert await store.load_messages(thread_id) == messages
        # Remove the log, as an operator may; the repair must notice.
        await site.cli("flush", "--all")
    async with site.store(Role.OPERATOR) as store:
        await store.buffer.session.stream.api(f"STREAM.DELETE.{site.deployment.log.stream}")
    assert (await site.cli("repair", "--apply")).code == 0
    assert (await site.set_up()).json["log_made"] is True


async def test_no_role_may_do_what_only_the_next_one_may(site: Site) -> None:
    await site.set_up()
    stream = site.deployment.log.stream
    refused = {
        Role.APP: [
            f"STREAM.PURGE.{stream}",
            f"CONSUMER.CREATE.{stream}.x.y",
            f"CONSUMER.INFO.{stream}.x",
            f"STREAM.DELETE.{stream}",
            "INFO",
        ],
        Role.FLUSHER: [f"STREAM.DELETE.{stream}", f"STREAM.UPDATE.{stream}", f"STREAM.MSG.DELETE.{stream}"],
        Role.OPERATOR: [
            "STREAM.DELETE.ANOTHER",
            "STREAM.INFO.ANOTHER",
            f"STREAM.PURGE.KV_{site.deployment.log.bucket}",
        ],
    }
    for role, verbs in refused.items():
        async with site.store(role) as store:
            for verb in verbs:
                with pytest.raises(ConfigError, match="does not permit"):
                    await store.buffer.session.stream.api(verb)
    name = site.deployment.name
    for statement in (
        f"CREATE TABLE {name}.mine ()",
        f"DROP TABLE {name}.messages",
        f"ALTER TABLE {name}.messages ADD COLUMN mine int",
        f"TRUNCATE {name}.messages",
        f"UPDATE {name}.bufstore_migrations SET version = 99",
        f"CREATE SCHEMA mine_{name}",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await query(site.app, statement)


async def test_grants_wait_for_those_that_are_on_their_way(site: Site) -> None:
    """Regression: Postgres refused the second of two concurrent grants ("tuple concurrently updated")."""
    await site.set_up()
    grants = ("setup", "--grant", site.app_role)
    script = (await site.cli(*grants, "--sql", postgres=site.owner)).out
    assert "pg_advisory_xact_lock" in script
    async with await psycopg.AsyncConnection.connect(site.owner, autocommit=True) as first:
        await first.execute(script.replace("COMMIT;", ""))
        second = asyncio.create_task(site.cli(*grants, postgres=site.owner))
        waits = "SELECT FROM pg_locks WHERE NOT granted"
        while not second.done() and not (await first.execute(waits)).rowcount:
            pass
        await first.execute("COMMIT")
    assert (await second).code == 0, await second
