"""A saver under a role that may create nothing: how it comes to its tables and log, and which rights it needs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from bufstore import ConfigDrift, NatsConfig, PostgresThreadStore, StoreMisconfigured
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver
from bufstore.nats.permissions import Role, permissions
from command_line import Result, bufstore_cli
from helpers import fresh, query
from integration.test_least_rights import nothing_forbidden
from integration.test_setup import NatsByHand
from langgraph_savers import META, Place, checkpoint, config, where

__all__ = ["nothing_forbidden"]

_DOCS = Path(__file__).parent.parent.parent / "docs" / "LANGGRAPH.md"


class Site:
    """A place whose users have exactly the rights of their roles."""

    def __init__(self, servers: Servers, server: NatsByHand, place: Place) -> None:
        self.servers, self.server, self.place = servers, server, place
        self.owner, self.app = (f"{role}_{place.schema}" for role in ("owner", "app"))

    def dsn(self, role: str) -> str:
        return make_conninfo(self.servers.postgres.dsn, user=role, password="right")

    @asynccontextmanager
    async def saver(self, role: str, user: Role, **options: Any) -> AsyncIterator[AsyncBufferedSaver]:
        self.place.dsn = self.dsn(role)
        self.place.nats = NatsConfig(servers=self.server.url, user=user.value, password=user.value)
        async with self.place.saver(**options) as saver:
            yield saver

    async def cli(self, *arguments: str, **environment: str) -> Result:
        """Run a command as owner and operator, with what docs/LANGGRAPH.md exports."""
        exported = {
            "BUFSTORE_NATS": self.server.url,
            "BUFSTORE_NATS_USER": Role.OPERATOR.value,
            "BUFSTORE_NATS_PASSWORD": Role.OPERATOR.value,
            "BUFSTORE_POSTGRES": self.dsn(self.owner),
            "BUFSTORE_STREAM": self.place.log.stream,
            "BUFSTORE_BUCKET": self.place.log.bucket,
            "BUFSTORE_SCHEMA": f"{self.place.schema}_b",
        }
        return await asyncio.to_thread(bufstore_cli, *arguments, **(exported | environment))


@pytest.fixture
async def site(servers: Servers, tmp_path: Path) -> AsyncIterator[Site]:
    place = Place(servers)
    of_roles = (
        f"{{ user: {role.value}, password: {role.value}\n{permissions(role, place.log).config()} }}" for role in Role
    )
    users = "\n".join(of_roles)
    server = NatsByHand(tmp_path / "nats", f"accounts {{ A {{ jetstream: enabled, users: [\n{users}\n] }} }}")
    site, dsn = Site(servers, server, place), servers.postgres.dsn
    for role in (site.owner, site.app):
        await query(dsn, f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
    await query(dsn, f"GRANT CREATE ON DATABASE postgres TO {site.owner}")
    async with server:
        yield site
    await query(dsn, f"DROP OWNED BY {site.owner}, {site.app} CASCADE")
    await query(dsn, f"DROP ROLE {site.owner}, {site.app}")


def grants(site: Site) -> list[str]:
    """Return the statements of docs/LANGGRAPH.md that grant rights on LangGraph's tables, for this site."""
    told = re.findall(r"^    (GRANT .*;)$", _DOCS.read_text(), re.MULTILINE)
    assert len(told) == 4
    return [g.replace("public", site.place.schema).replace("app_role", site.app) for g in told]


async def _use(saver: AsyncBufferedSaver) -> None:
    """Do with the saver whatever writes, and read it back."""
    thread_id, copied = fresh(), fresh()
    at = await saver.aput(config(thread_id), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
    await saver.aput_writes(at, [("a", 1)], "task")
    await saver.aput_writes(at, [("a", 2)], "task")
    await saver.aput(at, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
    await saver.force_flush()
    await saver.acopy_thread(thread_id, copied)
    await saver.aprune([thread_id])
    assert len([found async for found in saver.alist(config(thread_id))]) == 1
    assert len([found async for found in saver.alist(config(copied))]) == 2
    await saver.adelete_thread(thread_id)
    await saver.force_flush()
    assert await saver.aget_tuple(config(thread_id)) is None
    found = await saver.aget_tuple(config(copied))
    assert found is not None
    assert found.checkpoint["channel_values"] == {"a": [2]}


@pytest.mark.usefixtures("nothing_forbidden")
async def test_a_saver_works_under_the_rights_that_the_document_lists(site: Site) -> None:
    with pytest.raises(StoreMisconfigured, match=r"may not create them.*start a saver once.*LANGGRAPH\.md, Rights"):
        async with site.saver(site.app, Role.FLUSHER):
            pass
    async with site.saver(site.owner, Role.OPERATOR):
        pass
    granted = await site.cli("setup", "--own-store", "--grant", site.app)
    assert granted.code == 0, granted
    async with await psycopg.AsyncConnection.connect(site.dsn(site.owner), autocommit=True) as owner:
        for statement in grants(site):
            await owner.execute(statement.encode())
    async with site.saver(site.app, Role.FLUSHER) as saver:
        await _use(saver)
        async with site.saver(site.app, Role.APP, flusher=False) as beside:
            await _use(beside)
    found = await site.cli("verify", BUFSTORE_POSTGRES=site.dsn(site.app))
    assert found.code == 0, found


async def test_who_may_not_make_langgraphs_tables_is_told_who_may(site: Site) -> None:
    """Regression: Postgres' own words were all that there was to read."""
    assert (await site.cli("setup", "--own-store", "--grant", site.app)).code == 0
    with pytest.raises(StoreMisconfigured, match=r"LangGraph's tables .* may not create them.*start a saver once"):
        async with site.saver(site.app, Role.FLUSHER):
            pass


async def test_setup_makes_no_log_of_messages_where_a_saver_looks_for_its_own(servers: Servers) -> None:
    """Regression: with what LANGGRAPH.md exports it did, and no saver could be opened there any more."""
    place = Place(servers)
    exported = dict(re.findall(r"(BUFSTORE_[A-Z]+)=(\w[\w-]*)", _DOCS.read_text()))
    assert len(exported) == 3
    for name, value in exported.items():
        refused = await asyncio.to_thread(
            bufstore_cli, "setup", "--subject", place.log.subject, **(where(place) | {name: value})
        )
        assert (refused.code, f"{value} is a LangGraph saver's" in refused.err) == (2, True), refused
    made = f"SELECT nspname FROM pg_namespace WHERE nspname IN ('{place.schema}_b', 'bufstore_langgraph')"
    assert await query(place.dsn, made) == []
    async with place.saver():
        pass


async def test_setup_makes_no_tables_of_messages_among_a_savers_own(servers: Servers) -> None:
    """Regression: with names that a saver was told, the tables were made before the log was refused, or printed."""
    place = Place(servers)
    async with place.saver():
        pass
    for sql in (["--sql"], []):
        refused = await asyncio.to_thread(bufstore_cli, "setup", *sql, **where(place))
        assert (refused.code, refused.out, "domain" in refused.err) == (2, "", True), refused
    client = await nats.connect(place.nats)
    for stream in (place.log.stream, f"KV_{place.log.bucket}"):
        await client.jetstream().delete_stream(stream)
    await client.close()
    refused = await asyncio.to_thread(bufstore_cli, "setup", **where(place))
    assert (refused.code, "domain" in refused.err) == (2, True), refused
    of_messages = f"SELECT 1 FROM pg_tables WHERE schemaname = '{place.schema}_b' AND tablename = 'threads'"
    assert await query(place.dsn, of_messages) == []
    await query(place.dsn, f"CREATE TABLE {place.schema}_b.threads AS SELECT 1 AS of_the_app")
    for sql in (["--sql"], []):
        refused = await asyncio.to_thread(bufstore_cli, "setup", *sql, **where(place))
        assert (refused.code, refused.out, "domain" in refused.err) == (2, "", True), refused
    granted = await asyncio.to_thread(bufstore_cli, "setup", "--own-store", "--sql", **where(place))
    assert (granted.code, granted.out) == (0, "-- Nothing is missing.\n"), granted


async def test_setup_prints_no_tables_of_messages_for_a_savers_names() -> None:
    """Regression: `--sql` did not look at the names."""
    for option, value in ("--schema", "bufstore_langgraph"), ("--stream", "LANGGRAPH"), ("--bucket", "langgraph-hot"):
        refused = await asyncio.to_thread(bufstore_cli, "setup", "--sql", option, value)
        assert (refused.code, refused.out, "--own-store" in refused.err) == (2, "", True), refused
    printed = await asyncio.to_thread(bufstore_cli, "setup", "--sql", "--own-store", "--schema", "bufstore_langgraph")
    assert (printed.code, "CREATE SCHEMA" in printed.out) == (0, True)


async def test_setup_makes_the_log_again_of_messages_that_have_a_savers_names(own_servers: Servers) -> None:
    """Regression: a store of messages with these names could not get its log again once NATS was lost."""
    async with PostgresThreadStore(own_servers.postgres.dsn, schema="bufstore_langgraph") as store:
        await store.setup()
    names = {
        "BUFSTORE_STREAM": "LANGGRAPH",
        "BUFSTORE_BUCKET": "langgraph-hot",
        "BUFSTORE_SCHEMA": "bufstore_langgraph",
    }
    at = {"BUFSTORE_NATS": own_servers.nats.url, "BUFSTORE_POSTGRES": own_servers.postgres.dsn}
    made = await asyncio.to_thread(bufstore_cli, "setup", "--max-bytes", str(64 << 20), **(at | names))
    assert (made.code, "log LANGGRAPH and its bucket: made" in made.out) == (0, True), made


async def test_a_saver_on_a_log_of_messages_says_how_to_clean_up(servers: Servers) -> None:
    place = Place(servers)
    place.log = replace(place.log, max_bytes=64 << 20)
    like = ("--subject", place.log.subject, "--partitions", "2", "--max-bytes", str(64 << 20))
    assert (await asyncio.to_thread(bufstore_cli, "setup", *like, **where(place))).code == 0
    with pytest.raises(ConfigDrift) as caught:
        async with place.saver():
            pass
    assert "store_kind" not in caught.value.way_out
    assert "remove the stream, its bucket and the buffer's schema" in caught.value.way_out
    client = await nats.connect(place.nats)
    for stream in (place.log.stream, f"KV_{place.log.bucket}"):
        await client.jetstream().delete_stream(stream)
    await client.close()
    await query(place.dsn, f"DROP SCHEMA {place.schema}_b CASCADE")
    async with place.saver() as saver:
        await _use(saver)
