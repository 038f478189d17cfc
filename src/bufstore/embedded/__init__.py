"""Real NATS (JetStream) and Postgres servers from wheels, for development, tests and single-machine use.

The servers listen on 127.0.0.1 only, with a generated password, keep their data in a folder that survives
restarts, write durably, and end with the process that started them, however that process ends.
Needs the `embedded` extra; importing this module does not. Nothing here may be used from two threads at once.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

from bufstore.errors import EmbeddedError
from bufstore.lasting_executor import LastingExecutor

from ._base import START_SECONDS, FolderLock, make_folder, owners
from ._nats import NatsServer
from ._postgres import PostgresServer
from ._redis import RedisServer

__all__ = ["EmbeddedError", "NatsServer", "PostgresServer", "RedisServer", "Servers"]


class Servers:
    """A NATS server and a Postgres server in one data folder; a context manager that starts and stops both.

    `data`: None: a fresh temporary folder, which `stop` or the end of the process removes.
    The other arguments are those of `NatsServer` and `PostgresServer`.
    """

    def __init__(
        self,
        data: Path | None = None,
        *,
        sync_interval: str = "always",
        nats_port: int | None = None,
        postgres_port: int | None = None,
        nats_config: str = "",
    ) -> None:
        self._temporary = data is None
        self.data = Path(data or Path(tempfile.gettempdir()) / f"bufstore-{uuid.uuid4().hex}").resolve()
        self._lock: FolderLock | None = None
        self.nats = NatsServer(
            self.data / "nats", sync_interval=sync_interval, port=nats_port, extra_config=nats_config
        )
        self.postgres = PostgresServer(self.data / "postgres", port=postgres_port)
        self.nats.temporary = self.postgres.temporary = self._temporary
        owners.add(self)

    def __repr__(self) -> str:
        return f"Servers({self.nats!r}, {self.postgres!r})"

    def __enter__(self) -> Servers:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, timeout: float = START_SECONDS) -> None:
        """Start both at once, within `timeout` seconds each. Raises EmbeddedError; then neither runs."""
        make_folder(self.data)
        self._lock = self._lock or FolderLock(self.data)
        pool = ThreadPoolExecutor(2)
        attempts = [pool.submit(server.start, timeout) for server in (self.nats, self.postgres)]
        try:
            for attempt in attempts:
                attempt.result()
        except BaseException:
            wait(attempts)  # an interrupt ends only our wait: a start that goes on in its thread would undo the stop
            self.stop()
            raise
        finally:
            pool.shutdown()

    def stop(self) -> None:
        """Stop both at the same time: gracefully, or at once if their folder is temporary and is removed with them."""
        if self._lock is None:
            return
        pool = LastingExecutor(2)
        servers = (self.nats, self.postgres)
        attempts = [pool.submit(server.abandon if self._temporary else server.stop) for server in servers]
        try:
            wait(attempts)
        finally:  # also when the wait is interrupted
            pool.shutdown()
            self._lock.close()
            self._lock = None
            if self._temporary:
                shutil.rmtree(self.data, ignore_errors=True)
        for attempt in attempts:
            attempt.result()

    def _forget(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._lock = None
