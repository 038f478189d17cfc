"""Postgres, also when started by root."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bufstore.errors import EmbeddedError

from . import _guard, _wheels
from ._base import USER, Server, write_private

_INIT_SECONDS = 120.0  # for the first creation of the database


class PostgresServer(Server):
    """One Postgres with full durability and its data below `data`; the user is a superuser.

    When root starts it, the server runs under an unprivileged account, which must be able to enter `data`.
    `port`: None: the first start chooses a free port, and later starts keep it while it is free.
    """

    _name = "postgres"
    _stop_signal = signal.SIGINT  # "fast": ends sessions, does not wait for clients to leave
    _abandon_signal = signal.SIGQUIT  # "immediate": no checkpoint; SIGKILL would leave shared memory behind

    @property
    def dsn(self) -> str:
        """What clients connect with, password included. Raises EmbeddedError before the first start."""
        return self._address(self._password if self._port else "")

    def _address(self, password: str) -> str:
        # The server has no TLS, which an exported PGSSLMODE might ask for; an exported PGOPTIONS is for another server.
        # More parameters would keep out drivers that hand on to the server what they do not know.
        return f"postgresql://{USER}:{password}@127.0.0.1:{self.port}/postgres?sslmode=disable&options="

    @property
    def _cluster(self) -> Path:
        return self.data / "cluster"

    def _program(self, name: str) -> str:
        return str(self._package / "pginstall/bin" / name)

    def _check_programs(self) -> None:
        self._package = _wheels.postgres_package()

    def _initialise(self) -> tuple[_wheels.Account | None, dict[str, str]]:
        account = _wheels.postgres_account(self._cluster)
        if account is not None:
            self.data.chmod(0o711)  # the account may enter the folder, but not list it
            _wheels.check_reachable(self.data, account)
            self._package = _wheels.reachable_package(self._package, account, self.data)
        if not self._cluster.exists():
            self._create(account)
        return account, _clean_environment()

    def _create(self, account: _wheels.Account | None) -> None:
        """Make the database files. They get the final name only when complete: a crash leaves no half-made folder."""
        for left in self.data.glob("new.*"):
            shutil.rmtree(left, ignore_errors=True)
        fresh = self.data / f"new.{uuid.uuid4().hex}"
        fresh.mkdir(0o711)
        fresh.chmod(0o711)
        try:
            self._fill(fresh, account)
            (fresh / "cluster").rename(self._cluster)
        except subprocess.TimeoutExpired as e:
            why = f"initdb did not end within {e.timeout:g} s"
            raise EmbeddedError(f"postgres: cannot create the database in {self.data}: {why}") from e
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _fill(self, fresh: Path, account: _wheels.Account | None) -> None:
        """Run initdb in a folder. Raises EmbeddedError, TimeoutExpired."""
        password = fresh / "password"
        write_private(password, self._password)
        (fresh / "cluster").mkdir(0o700)
        who: dict[str, Any] = {}
        if account is not None:
            os.chown(fresh / "cluster", *account)
            os.chown(password, *account)
            who = {"user": account[0], "group": account[1], "extra_groups": []}
        command = [
            self._program("initdb"), "-D", str(fresh / "cluster"), "-U", USER, f"--pwfile={password}",
            "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-instructions",
            # Iterations make weak passwords costly to guess, but each connection pays. Ours has 192 random bits.
            "--set", "scram_iterations=1",
        ]  # fmt: skip
        # initdb ends with an fsync of all files; without it a power failure could take acknowledged data.
        command += ["--no-sync"] if self.temporary else []
        result = subprocess.run(  # noqa: S603 - our own program, no shell
            command, cwd=fresh, env=_clean_environment(), stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_INIT_SECONDS, **who,
        )  # fmt: skip
        if result.returncode != 0:
            output = (result.stdout + result.stderr).decode(errors="replace").strip()
            why = next((line for line in output.splitlines() if "error" in line), "initdb failed")
            raise EmbeddedError(f"postgres: cannot create the database in {self.data}: {why}\n{output}")

    def _command(self, port: int) -> list[str]:
        # These go on the command line, where neither the configuration file nor ALTER SYSTEM can override them.
        settings = {
            "listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "",
            "max_connections": 200, "shared_buffers": "128MB",
            "fsync": "on", "synchronous_commit": "on", "full_page_writes": "on",
            "log_destination": "stderr", "logging_collector": "off",
        }  # fmt: skip
        if sys.platform == "darwin":
            settings["wal_sync_method"] = "fsync_writethrough"  # else the drive's cache may lose commits
        command = [self._program("postgres"), "-D", str(self._cluster)]
        for key, value in settings.items():
            command += ["-c", f"{key}={value}"]
        return command

    def _sweep(self) -> None:
        super()._sweep()
        lock = self._cluster / "postmaster.pid"
        try:
            recorded = abs(int(lock.read_bytes().split(b"\n", 1)[0]))
        except (FileNotFoundError, ValueError):
            return
        # Paused backends outlive a killed parent; we recognize them by the folder they work in.
        for process in _processes_in(self._cluster):
            _guard.kill(process)
        # Postgres would take any process that now has the dead server's pid for a rival.
        if _guard.find_process(recorded) is not None:
            lock.unlink(missing_ok=True)

    def _answers(self, seconds: float) -> bool:
        try:
            status = (self._cluster / "postmaster.pid").read_bytes().split(b"\n")  # one line is a path, of any bytes
        except FileNotFoundError:
            return False
        if len(status) < 8 or status[0] != str(self.pid).encode() or status[7].strip() != b"ready":
            return False
        environment = _clean_environment() | {
            "PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGUSER": USER, "PGPASSWORD": self._password,
            "PGDATABASE": "postgres", "PGSSLMODE": "disable", "PGCONNECT_TIMEOUT": "2",
        }  # fmt: skip
        try:
            query = [self._program("psql"), "-XAtqc", "select 1"]
            result = subprocess.run(  # noqa: S603 - our own program, no shell
                query,
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return False
        return result.stdout.strip() == b"1"


def _clean_environment() -> dict[str, str]:
    """Return the environment without the variables that would steer Postgres or its tools elsewhere."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


def _processes_in(folder: Path) -> Iterator[Any]:
    psutil = importlib.import_module("psutil")
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd() == str(folder) and Path(process.exe()).name == "postgres":
                yield process
