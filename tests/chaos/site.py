"""Where a chaos run takes place: real servers, fault proxies before them, processes, and a way around the proxies."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
import nats
import psutil
import psycopg
from nats.aio.client import Client

from bufstore import BufferConfig, LogConfig, Unavailable
from bufstore.buffer.places import first_place, last_place
from bufstore.buffer.ports.log import Log
from bufstore.buffer.subjects import Subjects
from bufstore.config import as_nats_config
from bufstore.embedded import Servers
from bufstore.jetstream.messages import Outgoing
from bufstore.nats.session import NatsSession
from chaos.domain import Domain
from chaos.history import Fault, Poison, Recorder, Sample, Started
from chaos.process import Options, Store
from fault_proxy.proxy import FaultProxy

SCHEMA = "chaos"
PARTITIONS = 8
#: The processes of a run: name, role, threads written to at once.
PROCESSES = (
    ("w1", "writer", 64),
    ("w2", "writer", 64),
    ("f1", "flusher", 0),
    ("f2", "flusher", 0),
    ("r1", "reader", 0),
    ("a1", "all", 32),
)
#: A window that is short enough that entries leave the log, and lookups miss, within a run.
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
    """A worker process, started anew whenever it was killed: each life has a name of its own."""

    def __init__(self, site: Site, name: str, role: str, slots: int) -> None:
        self._site = site
        self._base = name
        self.role = role
        self._slots = slots
        self._lives = 0
        self._process: asyncio.subprocess.Process | None = None
        #: Whether it shall run: one that ends then has failed.
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
            log=LOG,
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
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None and self._process.returncode is None:
                self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL."""
        self.wanted = False
        self.send(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def end(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL; whether it ended by itself, without an error."""
        self.wanted = False
        # One that has just begun has no handler yet.
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


class Site:
    """Everything that a run needs, while in its ``async with`` block. Faults use it; so does the supervisor."""

    def __init__(self, folder: Path, seed: int, small_disk: Path | None, domain: Domain) -> None:
        self.folder = folder
        self.seed = seed
        self.domain = domain
        #: A small file system that holds the tables, or None where none can be made.
        self.small_disk = small_disk
        self.servers = Servers()
        self.recorder = Recorder(folder / "supervisor.jsonl")
        self.subjects = Subjects(str(LOG["subject"]), PARTITIONS)
        self.processes = [Process(self, *p) for p in PROCESSES]
        self.proxies: dict[str, FaultProxy] = {}
        #: For each kill of a flusher: how long its partitions were not flushed.
        self.flusher_kills: list[float] = []
        #: Cursors of before, and when they were seen.
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
            # So that late retries come after it.
            info = await self.api("STREAM.INFO.CHAOS")
            await self.api("STREAM.UPDATE.CHAOS", info["config"] | {"duplicate_window": 2_000_000_000})
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(p.kill() for p in self.processes))
        await self._stack.aclose()
        self.recorder.close()

    def through(self, url: str, proxy: str) -> str:
        """The URL with the port of a proxy."""
        return url.replace(f":{urlsplit(url).port}", f":{self.proxies[proxy].port}")

    def started(self, process: Process) -> Started | None:
        """What a process said when it was ready, if it is."""
        path = self.folder / f"{process.name}.jsonl"
        if not path.exists():
            return None
        with path.open("rb") as lines:
            first = lines.readline()
        return msgspec.json.decode(first, type=Started) if first.endswith(b"\n") else None

    def store(self, *, flusher: bool) -> contextlib.AbstractAsyncContextManager[Store]:
        """A store of the supervisor's own, past the proxies."""

        @contextlib.asynccontextmanager
        async def opened() -> Any:
            config = BufferConfig(log=LogConfig(**LOG), flusher=flusher, **BUFFER)  # type: ignore[arg-type]
            store = await self.domain.open(self.servers.postgres.dsn, self.servers.nats.url, config)
            try:
                yield store
            finally:
                await store.aclose()

        return opened()

    def note(self, kind: str, what: str, detail: str = "") -> None:
        """Record a fault's begin or end."""
        self.recorder.write(Fault(time.monotonic(), kind, what, detail))

    # --- past the proxies -------------------------------------------------------------------------------------

    async def _hang_up(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._database is not None:
            await self._database.close()

    async def client(self) -> Client:
        """A connection to NATS."""

        async def quiet(_: Exception) -> None:
            pass

        if self._client is None or not self._client.is_connected:
            if self._client is not None:
                await self._client.close()
            url = self.servers.nats.url
            self._client = await nats.connect(url, allow_reconnect=False, connect_timeout=2, error_cb=quiet)
        return self._client

    async def api(self, verb: str, body: Any = None, timeout_s: float = 3.0) -> dict[str, Any]:
        """A request to the JetStream API. Raises RuntimeError when it is refused."""
        client = await self.client()
        payload = json.dumps(body).encode() if body is not None else b""
        answer = await client.request(f"$JS.API.{verb}", payload, timeout=timeout_s)
        result: dict[str, Any] = json.loads(answer.data)
        if "error" in result:
            raise RuntimeError(f"{verb}: {result['error']}")
        return result

    async def sql(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Rows of a query."""
        async with self._database_lock:
            if self._database is None or self._database.closed:
                self._database = await psycopg.AsyncConnection.connect(
                    self.servers.postgres.dsn, autocommit=True, connect_timeout=2, application_name="chaos"
                )
            async with asyncio.timeout(5):
                cursor = await self._database.execute(query, parameters or None)  # type: ignore[arg-type]
                return await cursor.fetchall() if cursor.description else []

    async def persist(self, work: Callable[[], Awaitable[Any]], timeout_s: float = 20.0) -> Any:
        """Do it again until it works: servers may be away."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await work()
                except (RuntimeError, OSError, TimeoutError, nats.errors.Error, psycopg.Error, Unavailable):
                    await asyncio.sleep(0.1)

    async def cursors(self) -> dict[int, tuple[int, int]]:
        """Per partition, term and position."""
        rows = await self.sql(f"SELECT partition, term, cursor_seq FROM {SCHEMA}.buffer_partitions")
        return {p: (term, seq) for p, term, seq in rows}

    @contextlib.asynccontextmanager
    async def log(self) -> AsyncIterator[Log]:
        """The log, past the proxies, as a process finds it that has just begun."""
        config = BufferConfig(log=LogConfig(**LOG), **BUFFER)  # type: ignore[arg-type]
        session = NatsSession(as_nats_config(self.servers.nats.url), config, "chaos")
        await session.open()
        try:
            await session.log.epoch()
            yield session.log
        finally:
            await session.aclose()

    async def ends(self) -> dict[int, int]:
        """Per partition, the position of its last entry in the log; of those that are flushed long since, none."""
        async with self.log() as log:
            found = await log.ends([self.subjects.of_partition(p) for p in range(PARTITIONS)], 3.0)
        return {p: end for p, end in enumerate(found) if end}

    async def publish(self, thread: str, body: bytes, header: str | None) -> None:
        """Put an entry into the log that is none, and record it."""
        async with self.log() as log:
            seq = await log.publish(Outgoing(self.subjects.of(thread), body, header), 3.0)
        self.recorder.write(Poison(time.monotonic(), thread, seq, body))

    async def publish_among_groups(self, body: bytes) -> None:
        """Put something among the groups that is none, and record it."""
        client = await self.client()
        ack = json.loads((await client.request(self.subjects.groups, body, timeout=3)).data)
        if ack.get("seq"):
            self.recorder.write(Poison(time.monotonic(), None, first_place(ack["seq"]), body))

    async def _settled(self) -> dict[int, int]:
        """Per partition, below which position nothing is needed any more, as its owners have said."""
        settled = {}
        for p in range(PARTITIONS):
            body = {"last_by_subj": f"$KV.{LOG['bucket']}.floor.{p}"}
            with contextlib.suppress(RuntimeError):  # nobody has said anything yet
                found = (await self.api(f"STREAM.MSG.GET.KV_{LOG['bucket']}", body))["message"]
                settled[p] = max(map(int, base64.b64decode(found["data"]).split(b",")))
        return settled

    async def sample(self) -> None:
        """Look, and record what is seen: what is settled before cursors, cursors before the log's end."""
        settled = await self._settled()
        cursors = await self.cursors()
        rows = await self.sql(
            f"SELECT thread_id, flushed_seq FROM {SCHEMA}.buffer_threads WHERE thread_id LIKE 'shared-%' LIMIT 200"
        )
        info = (await self.api("STREAM.INFO.CHAOS"))["state"]
        rss = {}
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                rss[process.name] = psutil.Process(process.pid).memory_info().rss
        now = time.monotonic()
        self.cursor_past.append((now, cursors))
        watermarks = dict(rows)
        self.recorder.write(Sample(now, settled, cursors, watermarks, last_place(info["last_seq"]), info["bytes"], rss))
