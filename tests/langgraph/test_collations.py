"""The order of a thread's checkpoints does not depend on the database's collation."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from bufstore.embedded import Servers
from bufstore.langgraph.postgres.store import PostgresCheckpointStore
from bufstore.langgraph.protocol import Query
from bufstore.postgres.connection import arrays
from helpers import fresh, query
from langgraph_savers import META, Place, checkpoint, config

LANGUAGES = ["cs_CZ", "da_DK", "cy_GB"]
#: In the order in which the checkpoints are made.
IDS = [f"1f0{n}000-0000-6000-8000-000000000000" for n in ("99", "aa", "ab", "dd", "de")]


@pytest.fixture(scope="module")
def locales() -> Iterator[Servers]:
    """Servers whose Postgres has Czech, Danish and Welsh locales."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)  # the server may run under another account
    with pytest.MonkeyPatch.context() as patch:
        for name in LANGUAGES:
            if shutil.which("localedef"):
                subprocess.run(["localedef", "-i", name, "-f", "UTF-8", folder / f"{name}.UTF-8"], check=False)
            if not (folder / f"{name}.UTF-8").exists():
                pytest.skip("this host cannot make locales (localedef, and its package locales)")
        patch.setenv("LOCPATH", str(folder))
        with Servers() as servers:
            yield servers
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.parametrize("name", LANGUAGES)
async def test_the_newest_checkpoint_is_the_newest_in_every_language(locales: Servers, name: str) -> None:
    """Czech sorts digits after letters, Danish "aa" after all other letters, Welsh "dd" after "df"."""
    place, thread_id = Place(locales), fresh()
    made = f"CREATE DATABASE {name.lower()} TEMPLATE template0 LC_COLLATE '{name}.UTF-8' LC_CTYPE '{name}.UTF-8'"
    await query(place.dsn, made)
    place.dsn = make_conninfo(place.dsn, dbname=name.lower())
    assert (await query(place.dsn, "SELECT '9' < 'a' AND 'aa' < 'ab' AND 'dd' < 'de'"))[0] == (False,)
    async with place.saver() as saver:
        for n, id_ in enumerate(IDS):
            at = await saver.aput(config(thread_id), checkpoint({"a": str(n)}, {"a": [n]}, id_), META, {"a": str(n)})
            await saver.aput_writes(at, [("a", [n])], "task")
            await saver.force_flush()
            async with place.saver(flusher=False) as other:
                found = await other.aget_tuple(config(thread_id))
                assert found is not None
                assert (found.checkpoint["id"], found.pending_writes) == (id_, [("task", "a", [n])])
        newest = IDS[::-1]
        assert [found.checkpoint["id"] async for found in saver.alist(config(thread_id))] == newest
        before = config(thread_id, IDS[2])
        assert [found.checkpoint["id"] async for found in saver.alist(config(thread_id), before=before)] == newest[3:]
        store, after, told = saver.engine._store, None, []
        while page := await store.page(Query(thread_id=thread_id), after, 1):
            ((_, tables),) = page
            (row,) = tables.checkpoints.values()
            told.append(row.id)
            after = (row.id, thread_id, "")
        assert told == newest


async def test_elsewhere_the_index_finds_the_newest(servers: Servers) -> None:
    place = Place(servers)
    async with place.saver():
        pass
    insert = f"INSERT INTO {place.schema}.checkpoints SELECT 't', '', md5(n::text), NULL, NULL, '{{}}', '{{}}' "
    await query(place.dsn, insert + "FROM generate_series(1, 5000) AS n")
    await query(place.dsn, f"ANALYZE {place.schema}.checkpoints")
    store: PostgresCheckpointStore = place.store()
    async with store.pool, store.pool.lend(10) as connection:
        cursor = arrays.ArrayCursor(connection)
        for name, parameters in (
            ("latest", ("t", "", 10)),
            ("page", ("t", "", None, None, "8", "7", "t", "", 10)),
        ):
            await cursor.execute("EXPLAIN (COSTS OFF) " + store._sql.texts[name], parameters)  # type: ignore[arg-type]
            plan = "\n".join(line for (line,) in await cursor.fetchall())
            assert "Scan Backward using checkpoints_pkey" in plan, plan
            assert "Sort" not in plan, plan
