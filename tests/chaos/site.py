"""The environment of a chaos run: real servers, fault proxies, processes, and a way around the proxies."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
import nats
import psutil
import psycopg
from nats.aio.client import Client

from bufstore import BufferConfig, LogConfig, Unavailable
from bufstore.buffer.lanes import lane_configs, lane_of, ledger_schema
from bufstore.buffer.places import first_place, last_place
from bufstore.buffer.ports.log import Log
from bufstore.buffer.subjects import Subjects
from bufstore.config import as_nats_config
from bufstore.embedded import Servers
from bufstore.jetstream.messages import Outgoing
from bufstore.nats.session import NatsSession
from chaos.domain import Domain
from chaos.history import LANE, Fault, Poison, Recorder, Sample, Started
from chaos.process import Options, Store
from fault_proxy.proxy import FaultProxy

SCHEMA = "chaos"
PARTITIONS = 8
#: The processes of a run: name, role, and number of threads written at once.
PROCESSES = (
    ("w1", "writer", 64),
    ("w2", "writer", 64),
    ("f1", "flusher", 0),
    ("f2", "flusher", 0),
    ("r1", "reader", 0),
    ("a1", "all", 32),
)
#: Short windows, so that entries leave the log, and lookups miss, within a run.
LOG = {
    "stream": "CHAOS",
    "bucket": "chaos-hot",
    "subject": "chaos",
    "partitions": PARTITIONS,
    "max_bytes": 1 << 30,
    "failover_window_s": 8.0,
}
BUFFER = {
    "append_timeout_s": 4.0,
    "read_timeout_s": 4.0,
    "retain_after_flush_s": 10.0,
    "lease_s": 3,
    "flush_interval_s": 0.2,
}
LEASE_S: int = BUFFER["lease_s"]  # type: ignore[assignment]
FAILOVER_WINDOW_S: float = LOG["failover_window_s"]  # type: ignore[assignment]


class Process:
    """A worker process that is restarted after each kill; each of its lives has its own name."""

    def __init__(self, site: Site, name: str, role: str, slots: int) -> None:
        self._site = site
        self._base = name
        self.role = role
        self._slots = slots
        self._lives = 0
        self._process: asyncio.subprocess.Process | None = None
        #: True while it should run: a process that ends then has crashed.
        self.wanted = False

    @property
    def name(self) -> str:
        return f"{self._base}.{self._lives}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Begin a new life."""
        self._lives += 1
        site = self._site
        side = "flushers" if self.role == "flusher" else "clients"
        options = Options(
            name=self.name,
            role=self.role,
            seed=site.seed,
            nats=site.through(site.servers.nats.url, f"nats {side}"),
            postgres=site.through(site.servers.postgres.dsn, f"postgres {side}"),
            schema=SCHEMA,
            log=LOG | {"lanes": site.domain.lanes},
            buffer=BUFFER,
            history=str(site.folder / f"{self.name}.jsonl"),
            readers=tuple(str(site.folder / f"{n}.socket") for n, role, _ in PROCESSES if role == "reader"),
            socket=str(site.folder / f"{self._base}.socket"),
            slots=self._slots,
        )
        with (site.folder / f"{self.name}.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", site.domain.worker, msgspec.json.encode(options).decode(),
                stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )  # fmt: skip
        self.wanted = True

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process runs."""
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None and self._process.returncode is None:
                self._process.send_signal(number)

    async def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.wanted = False
        self.send(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def end(self, timeout_s: float) -> bool:
        """Send SIGTERM, then SIGKILL. Returns True if it ended in time and without an error."""
        self.wanted = False
        # A process that has just started has no handler yet.
        clean = (0,) if self._site.started(self) is not None else (0, -signal.SIGTERM)
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        assert self._process is not None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.wait() in clean
        except TimeoutError:
            await self.kill()
            return False


class Lane:
    """One log and its ledger, past the proxies. Partitions and positions are numbered across all lanes."""

    def __init__(self, site: Site, number: int, config: BufferConfig) -> None:
        self._site = site
        self.number = number
        self._config = config
        self.stream, self.bucket = config.log.stream, config.log.bucket
        self.schema = ledger_schema(SCHEMA, config.log)
        self.subjects = Subjects(config.log.subject, PARTITIONS)

    def partition(self, number: int) -> int:
        """Return a partition's number across all lanes."""
        return self.number * PARTITIONS + number

    def position(self, seq: int) -> int:
        """Return a position's number across all lanes."""
        return self.number * LANE + seq

    async def cursors(self) -> dict[int, tuple[int, int]]:
        """Return each partition's term and position in this log."""
        rows = await self._site.sql(f"SELECT partition, term, cursor_seq FROM {self.schema}.buffer_partitions")
        return {self.partition(p): (term, seq) for p, term, seq in rows}

    async def owners(self) -> dict[int, str]:
        """Return each partition's owner."""
        rows = await self._site.sql(f"SELECT partition, owner FROM {self.schema}.buffer_partitions")
        return {self.partition(p): owner for p, owner in rows}

    @contextlib.asynccontextmanager
    async def log(self) -> AsyncIterator[Log]:
        """Open the log past the proxies, as a new process does."""
        session = NatsSession(as_nats_config(self._site.servers.nats.url), self._config, "chaos")
        await session.open()
        try:
            await session.log.epoch()
            yield session.log
        finally:
            await session.aclose()

    async def ends(self) -> dict[int, int]:
        """Return the position of each partition's last entry in the log; partitions flushed long ago have none."""
        async with self.log() as log:
            found = await log.partition_ends()
        return {self.partition(p): end for p, end in enumerate(found) if end}

    async def settled(self) -> dict[int, int]:
        """Return the position below which each partition needs no entry, as its owners have reported."""
        settled = {}
        for p in range(PARTITIONS):
            body = {"last_by_subj": f"$KV.{self.bucket}.floor.{p}"}
            with contextlib.suppress(RuntimeError):  # no owner has reported yet
                found = (await self._site.api(f"STREAM.MSG.GET.KV_{self.bucket}", body))["message"]
                settled[self.partition(p)] = max(map(int, base64.b64decode(found["data"]).split(b",")))
        return settled


class Site:
    """All resources of a run, within an ``async with`` block. Used by the faults and the supervisor."""

    def __init__(self, folder: Path, seed: int, small_disk: Path | None, domain: Domain) -> None:
        self.folder = folder
        self.seed = seed
        self.domain = domain
        #: A small file system for the tables, or None where none can be mounted.
        self.small_disk = small_disk
        self.servers = Servers()
        self.recorder = Recorder(folder / "supervisor.jsonl")
        self.config = BufferConfig(log=LogConfig(**LOG, lanes=domain.lanes), **BUFFER)  # type: ignore[arg-type]
        self.lanes = [Lane(self, number, config) for number, config in enumerate(lane_configs(self.config))]
        self.processes = [Process(self, *p) for p in PROCESSES]
        self.proxies: dict[str, FaultProxy] = {}
        #: For each kill of a flusher, how many seconds its partitions were not flushed.
        self.flusher_kills: list[float] = []
        #: Past cursors, and when they were read.
        self.cursor_past: list[tuple[float, dict[int, tuple[int, int]]]] = []
        self._client: Client | None = None
        self._database: psycopg.AsyncConnection[Any] | None = None
        self._database_lock = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await asyncio.to_thread(self.servers.start)
            stack.push_async_callback(asyncio.to_thread, self.servers.stop)
            for server, where in (("nats", self.servers.nats.url), ("postgres", self.servers.postgres.dsn)):
                for side in ("clients", "flushers"):
                    port = urlsplit(where).port
                    assert port is not None
                    proxy = FaultProxy("127.0.0.1", port, protocol=server)  # type: ignore[arg-type]
                    self.proxies[f"{server} {side}"] = await stack.enter_async_context(proxy)
            stack.push_async_callback(self._hang_up)
            if self.small_disk is not None:
                tables = self.small_disk / "tables"
                tables.mkdir()
                owner = (self.servers.postgres.data / "cluster").stat()
                os.chown(tables, owner.st_uid, owner.st_gid)
                await self.sql(f"CREATE TABLESPACE small LOCATION '{tables}'")
                await self.sql("ALTER ROLE CURRENT_USER SET default_tablespace = small")
            async with self.store(flusher=False):
                pass  # makes stream, bucket and tables
            # A short duplicate window, so that late retries come after it.
            for lane in self.lanes:
                info = await self.api(f"STREAM.INFO.{lane.stream}")
                await self.api(f"STREAM.UPDATE.{lane.stream}", info["config"] | {"duplicate_window": 2_000_000_000})
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(p.kill() for p in self.processes))
        await self._stack.aclose()
        self.recorder.close()

    def through(self, url: str, proxy: str) -> str:
        """Return the URL with a proxy's port."""
        return url.replace(f":{urlsplit(url).port}", f":{self.proxies[proxy].port}")

    def started(self, process: Process) -> Started | None:
        """Return the process's event of its start, or None if it is not ready."""
        path = self.folder / f"{process.name}.jsonl"
        if not path.exists():
            return None
        with path.open("rb") as lines:
            first = lines.readline()
        return msgspec.json.decode(first, type=Started) if first.endswith(b"\n") else None

    def store(self, *, flusher: bool) -> contextlib.AbstractAsyncContextManager[Store]:
        """Open a store for the supervisor, past the proxies."""

        @contextlib.asynccontextmanager
        async def opened() -> Any:
            config = replace(self.config, flusher=flusher)
            store = await self.domain.open(self.servers.postgres.dsn, self.servers.nats.url, config)
            try:
                yield store
            finally:
                await store.aclose()

        return opened()

    def note(self, kind: str, what: str, detail: str = "") -> None:
        """Record the begin or end of a fault."""
        self.recorder.write(Fault(time.monotonic(), kind, what, detail))

    # --- past the proxies -------------------------------------------------------------------------------------

    async def _hang_up(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._database is not None:
            await self._database.close()

    async def client(self) -> Client:
        """Return a connection to NATS."""

        async def quiet(_: Exception) -> None:
            pass

        if self._client is None or not self._client.is_connected:
            if self._client is not None:
                await self._client.close()
            url = self.servers.nats.url
            self._client = await nats.connect(url, allow_reconnect=False, connect_timeout=2, error_cb=quiet)
        return self._client

    async def api(self, verb: str, body: Any = None, timeout_s: float = 3.0) -> dict[str, Any]:
        """Send a request to the JetStream API. Raises RuntimeError when it is refused."""
        client = await self.client()
        payload = json.dumps(body).encode() if body is not None else b""
        answer = await client.request(f"$JS.API.{verb}", payload, timeout=timeout_s)
        result: dict[str, Any] = json.loads(answer.data)
        if "error" in result:
            raise RuntimeError(f"{verb}: {result['error']}")
        return result

    async def sql(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        async with self._database_lock:
            if self._database is None or self._database.closed:
                self._database = await psycopg.AsyncConnection.connect(
                    self.servers.postgres.dsn, autocommit=True, connect_timeout=2, application_name="chaos"
                )
            async with asyncio.timeout(5):
                cursor = await self._database.execute(query, parameters or None)  # type: ignore[arg-type]
                return await cursor.fetchall() if cursor.description else []

    async def persist(self, work: Callable[[], Awaitable[Any]], timeout_s: float = 20.0) -> Any:
        """Repeat the work until it succeeds: servers may be away."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await work()
                except (RuntimeError, OSError, TimeoutError, nats.errors.Error, psycopg.Error, Unavailable):
                    await asyncio.sleep(0.1)

    async def cursors(self) -> dict[int, tuple[int, int]]:
        """Return each partition's term and position."""
        return {p: at for lane in self.lanes for p, at in (await lane.cursors()).items()}

    async def owners(self) -> dict[int, str]:
        """Return each partition's owner."""
        return {p: owner for lane in self.lanes for p, owner in (await lane.owners()).items()}

    async def ends(self) -> dict[int, int]:
        """Return the position of each partition's last entry in the log; partitions flushed long ago have none."""
        return {p: end for lane in self.lanes for p, end in (await lane.ends()).items()}

    def one_of(self, chance: random.Random) -> Lane:
        """Return a lane for a fault of its log."""
        # With one lane nothing is drawn, so that seeds decide as they did before lanes existed.
        return chance.choice(self.lanes) if len(self.lanes) > 1 else self.lanes[0]

    async def publish(self, thread: str, body: bytes, header: str | None) -> None:
        """Publish and record a malformed entry on the thread's log."""
        lane = self.lanes[lane_of(thread, self.config.log)]
        async with lane.log() as log:
            # Long, because poison of which nobody knows whether it is there could not be judged.
            seq = await log.publish(Outgoing(lane.subjects.of(thread), body, header), 15.0)
        self.recorder.write(Poison(time.monotonic(), thread, lane.position(seq), body))

    async def publish_among_groups(self, lane: Lane, body: bytes) -> None:
        """Publish and record a malformed group."""
        client = await self.client()
        ack = json.loads((await client.request(lane.subjects.groups, body, timeout=15)).data)
        if ack.get("seq"):
            self.recorder.write(Poison(time.monotonic(), None, lane.position(first_place(ack["seq"])), body))

    async def sample(self) -> None:
        """Record a sample: first what is settled, then the cursors, then the log's end."""
        rss = {}
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                rss[process.name] = psutil.Process(process.pid).memory_info().rss
        passed: dict[int, tuple[int, int]] = {}
        for lane in self.lanes:
            settled = await lane.settled()
            cursors = await lane.cursors()
            rows = await self.sql(
                f"SELECT thread_id, flushed_seq FROM {lane.schema}.buffer_threads ORDER BY thread_id DESC LIMIT 200"
            )
            info = (await self.api(f"STREAM.INFO.{lane.stream}"))["state"]
            end = last_place(info["last_seq"])
            now = time.monotonic()
            self.recorder.write(Sample(now, settled, cursors, dict(rows), end, info["bytes"], rss, lane.number))
            passed |= cursors
        self.cursor_past.append((time.monotonic(), passed))
