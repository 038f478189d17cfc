"""A plugin of pytest that runs LangGraph's own tests of graphs on our savers: `make langgraph-tests`.

Their suite runs its graphs on several savers. Ours take the place of those for SQLite, and keep their names there. A
test that fails with LangGraph's saver in memory, too, says nothing about ours: the checkout and the installed packages
are of different versions, say.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import nats
import pytest
from tests import conftest_checkpointer  # LangGraph's

from bufstore import BufferConfig, LogConfig
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver, BufferedSaver, PostgresCheckpointStore

_LANES = int(os.environ.get("BUFSTORE_LANES", "1"))
_FLUSH_S = float(os.environ.get("BUFSTORE_FLUSH_S", "0.02"))
_MEMORY, _OURS = ("memory",), ("sqlite", "sqlite_aio")

_open = ExitStack()
#: How many tests of our savers ended how.
_ended: Counter[str] = Counter()
#: The tests that failed with LangGraph's saver in memory.
_failed: set[tuple[str, str]] = set()


@cache
def _servers() -> Servers:
    folder = Path(_open.enter_context(tempfile.TemporaryDirectory()))
    folder.chmod(0o755)  # Postgres may run as another user
    return _open.enter_context(Servers(folder / "data"))


def pytest_unconfigure() -> None:
    _open.close()


def _place() -> tuple[PostgresCheckpointStore, str, BufferConfig]:
    """Return tables and a log of one test's own."""
    name = f"lg{secrets.token_hex(5)}"
    names = {"stream": f"LG-{name}", "bucket": f"lg-{name}", "subject": name}
    log = LogConfig(**names, partitions=2, max_bytes=16 << 20, lanes=_LANES)
    store = PostgresCheckpointStore(_servers().postgres.dsn, pool_size=2, schema=name, buffer_schema=f"{name}_b")
    return store, _servers().nats.url, BufferConfig.fitting(log, lease_s=4, flush_interval_s=_FLUSH_S)


@contextmanager
def _blocking() -> Iterator[BufferedSaver]:
    store, url, config = _place()
    saver = BufferedSaver.open(store, nats=url, config=config)
    try:
        yield saver
    finally:
        saver.close()
        asyncio.run(_remove_streams(url))


@asynccontextmanager
async def _asynchronous() -> AsyncIterator[AsyncBufferedSaver]:
    store, url, config = _place()
    saver = await AsyncBufferedSaver.open(store, nats=url, config=config)
    try:
        yield saver
    finally:
        await saver.aclose()
        await _remove_streams(url)


async def _remove_streams(url: str) -> None:
    """Remove the logs of the tests so far: they reserve room. Their tables may stay."""
    client = await nats.connect(url)
    try:
        for info in await client.jetstream().streams_info():
            await client.jetstream().delete_stream(str(info.config.name))
    finally:
        await client.close()


conftest_checkpointer._checkpointer_sqlite = _blocking
conftest_checkpointer._checkpointer_sqlite_aio = _asynchronous


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    saver = params.get("sync_checkpointer") or params.get("async_checkpointer")
    others = {name: value for name, value in params.items() if name not in ("sync_checkpointer", "async_checkpointer")}
    test = item.nodeid.split("[")[0], repr(sorted(others.items(), key=str))
    if report.failed and saver in _MEMORY:
        _failed.add(test)
    if report.failed and (saver in _MEMORY or (saver in _OURS and test in _failed)):
        report.outcome, report.wasxfail = "skipped", "fails with LangGraph's saver in memory, too"
    if saver in _OURS and (report.when == "call" or not report.passed):
        _ended[report.outcome] += 1
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _ended["passed"]:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED  # LangGraph has changed what it runs its tests on


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"on bufstore's savers: {dict(_ended)}")
