"""Ids reach Postgres unchanged, whatever encoding clients, roles and databases are set to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from psycopg.conninfo import make_conninfo

from bufstore import ConfigError, PostgresThreadStore
from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import query, run_of, said

#: The places where another encoding can be set.
PLACES = ("string", "options", "environment", "role")


@asynccontextmanager
async def latin(deployment: Deployment, place: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The connection string of a client whose encoding is LATIN1."""
    dsn, role = deployment.servers.postgres.dsn, f"latin_{deployment.name}"
    if place == "string":
        yield make_conninfo(dsn, client_encoding="LATIN1")
    elif place == "options":
        yield make_conninfo(dsn, options="-c client_encoding=LATIN1")
    elif place == "environment":
        with monkeypatch.context() as patch:
            patch.setenv("PGCLIENTENCODING", "LATIN1")
            yield dsn
    else:
        await query(dsn, f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD 'x'")
        await query(dsn, f"ALTER ROLE {role} SET client_encoding = 'LATIN1'")
        yield make_conninfo(dsn, user=role, password="x")
        await query(dsn, f"DROP OWNED BY {role}")
        await query(dsn, f"DROP ROLE {role}")


@pytest.mark.parametrize("place", PLACES)
async def test_another_client_encoding_changes_no_id(
    deployment: Deployment, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment.store(flusher=False):
        pass  # makes the tables, which the role must not own
    async with latin(deployment, place, monkeypatch) as dsn:
        inner = PostgresThreadStore(dsn, schema=deployment.name, pool_size=4)
        async with deployment.store(inner) as store:
            for thread_id in ("naïve", "スレッド"):
                await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
                await store.force_flush(thread_id)
                assert await inner.load_messages(thread_id) == [said(0)]
    found = await query(deployment.servers.postgres.dsn, f"SELECT thread_id FROM {deployment.name}.buffer_threads")
    assert {thread_id for (thread_id,) in found} == {"naïve", "スレッド"}


@asynccontextmanager
async def database(deployment: Deployment, encoding: str) -> AsyncIterator[str]:
    """The connection string of a new database with this encoding."""
    dsn, name = deployment.servers.postgres.dsn, f"{deployment.name}_{encoding.lower()}"
    locale = "TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    await query(dsn, f"CREATE DATABASE {name} ENCODING '{encoding}' {locale}")
    yield make_conninfo(dsn, dbname=name)
    await query(dsn, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_a_database_in_another_encoding_is_refused_before_anything_is_made(
    deployment: Deployment, encoding: str
) -> None:
    async with database(deployment, encoding) as dsn:
        with pytest.raises(ConfigError, match=encoding):
            async with deployment.store(PostgresThreadStore(dsn, schema=deployment.name)):
                pass
        at = where(deployment) | {"BUFSTORE_POSTGRES": dsn}
        made = await asyncio.to_thread(bufstore_cli, "setup", **at)
        assert made.code == 2, made
        assert encoding in made.err
        assert "Traceback" not in made.err
        looked = await asyncio.to_thread(bufstore_cli, "doctor", "--json", **at)
        checks = {f"{c['part']} {c['what']}": c for c in looked.json["checks"]}
        assert (checks["Postgres encoding"]["level"], checks["Postgres encoding"]["found"]) == ("bad", encoding)
        assert await query(dsn, "SELECT 1 FROM pg_namespace WHERE nspname = %s", deployment.name) == []


async def test_tables_that_are_there_in_another_encoding_are_worked_with(deployment: Deployment) -> None:
    """Earlier releases created such tables, and they work for an app whose ids are ASCII."""
    async with database(deployment, "UTF8") as dsn:
        inner = PostgresThreadStore(dsn, schema=deployment.name)
        async with deployment.store(inner, flusher=False):
            pass
        await query(
            deployment.servers.postgres.dsn,
            "UPDATE pg_database SET encoding = pg_char_to_encoding('WIN1252') WHERE datname = %s",
            f"{deployment.name}_utf8",
        )
        inner = PostgresThreadStore(dsn, schema=deployment.name)
        async with deployment.store(inner) as store:
            await store.checkpoint("t", [said(0)], run_of("t"))
            await store.force_flush("t")
            assert await inner.load_messages("t") == [said(0)]
