"""What the bundled servers share: the exclusive data folder, the port, the guard, and methods such as `start`."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, Protocol

from bufstore.errors import EmbeddedError

from . import _guard, _wheels

START_SECONDS = 30.0
USER = "bufstore"
_LOG_BYTES = 10_000_000  # a longer log is set aside at the next start
# These lie below the range from which systems take the local ports of outgoing connections. While a server is down,
# any connection can take a port of that range, even a client's own attempt to reconnect to the server.
_PORTS = range(15_000, 30_000)


class FolderLock:
    """Exclusive use of a data folder; the system releases it when the process dies."""

    def __init__(self, folder: Path) -> None:
        """Take it. Raises EmbeddedError."""
        try:
            self._take(folder)
        except OSError as e:
            raise EmbeddedError(f"folder {folder} cannot be used: {e.strerror}") from e

    def _take(self, folder: Path) -> None:
        self._file = open(folder / "lock", "a+", opener=_private)  # noqa: SIM115 - held open as long as the lock
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise EmbeddedError(f"{folder} is in use (by process {owner})") from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Server:
    """What all servers share: folder, port, password, guard, and the methods that act on the running process."""

    _name = ""
    _stop_signal: int = signal.SIGTERM
    #: The signal that ends the server without saving anything, but leaves nothing behind in the system.
    _abandon_signal: int = signal.SIGKILL

    def __init__(self, data: Path, *, port: int | None = None) -> None:
        self.data = Path(data).resolve()
        self._wanted_port = port
        self._port: int | None = None
        self.temporary = False  # whether the guard removes the data when the owner dies
        self._lock: FolderLock | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._process: Any | None = None
        self._log_start = 0
        owners.add(self)

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return f"<{type(self).__name__} {self._address('***') if self._port else self.data} {state}>"

    @property
    def port(self) -> int:
        """The port on 127.0.0.1; a restart keeps it while it is free. Raises EmbeddedError before the first start."""
        if self._port is None:
            raise EmbeddedError(f"{self._name} has not been started yet")
        return self._port

    @property
    def pid(self) -> int | None:
        """The process id of the running server (for Postgres: of its parent process), else None."""
        return int(self._process.pid) if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the server's process exists; a paused process exists, too."""
        return self._process is not None and _guard.alive(self._process)

    def start(self, timeout: float = START_SECONDS) -> None:
        """Start the server and return when it answers; do nothing if it runs already.

        Cleans up what an earlier owner of the data folder left behind when it crashed.
        Raises EmbeddedError, with the end of the server's log, if it does not answer within `timeout` seconds
        (the first creation of the database is not counted), if another process uses the data folder, or if a
        wheel is missing.
        """
        if self.running:
            return
        if importlib.util.find_spec("psutil") is None:
            raise EmbeddedError(f"psutil is not installed; {_wheels.INSTALL_HINT}")
        self._check_programs()
        make_folder(self.data)
        self._lock = self._lock or FolderLock(self.data)
        try:
            self._leave_guard()
            self._sweep()
            account, environment = self._initialise()
            self._port = self._choose_port()
            deadline = time.monotonic() + timeout
            self._launch(self._command(self._port), account, environment)
            self._await_answer(deadline, timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server gracefully, or with SIGKILL if that takes too long, and give up the data folder."""
        if self._lock is None:
            return
        self._leave_guard()
        self._sweep()
        self._process = None
        self._lock.close()
        self._lock = None

    def abandon(self) -> None:
        """End the server at once and give up the data folder, which is not meant to be used again."""
        if self._process is not None:
            _guard.thaw(self._process)
            _guard.send(self._process, self._abandon_signal)
        self.stop()

    def restart(self, timeout: float = START_SECONDS) -> None:
        """Stop the server and start it again. Raises as `start` does."""
        self.stop()
        self.start(timeout)

    def kill(self) -> None:
        """End the server and its children at once (SIGKILL), as a crash would; the server can be started again."""
        if self._process is not None and not _guard.kill(self._process):
            raise EmbeddedError(f"{self._name} was killed and does not end")

    def pause(self) -> None:
        """Suspend the server and its children: connections stay open, but nothing is answered.

        Raises EmbeddedError if the server is not running.
        """
        _guard.freeze(self._running_process())

    def resume(self) -> None:
        """Let a paused server go on. Raises EmbeddedError if the server is not running."""
        _guard.thaw(self._running_process())

    # Each kind of server implements these.

    def _address(self, password: str) -> str:
        raise NotImplementedError

    def _check_programs(self) -> None:
        raise NotImplementedError

    def _initialise(self) -> tuple[_wheels.Account | None, dict[str, str]]:
        """Make what the server needs; return the account it runs under (None: this one's) and its environment."""
        return None, dict(os.environ)

    def _command(self, port: int) -> list[str]:
        raise NotImplementedError

    def _answers(self, seconds: float) -> bool:
        raise NotImplementedError

    # Common machinery.

    def _running_process(self) -> Any:
        if not self.running:
            raise EmbeddedError(f"{self._name} is not running")
        return self._process

    @functools.cached_property
    def _password(self) -> str:
        path = self.data / "password"
        if not path.exists():
            write_private(path, secrets.token_hex(24))
        return path.read_text()

    def _choose_port(self) -> int:
        """Return the wanted port, else the port used before if it is free, else a new port."""
        if self._wanted_port is not None:
            if not 1 <= self._wanted_port <= 65_535:
                raise EmbeddedError(f"{self._name}: a port is a number from 1 to 65535, not {self._wanted_port}")
            if not _port_is_free(self._wanted_port):
                raise EmbeddedError(f"{self._name}: port {self._wanted_port} is in use")
            return self._wanted_port
        path = self.data / "port"
        before = [int(path.read_text())] if path.exists() else []
        # Not from `random`: two processes with the same seed would try the same ports at the same time.
        port = next(port for port in before + secrets.SystemRandom().sample(_PORTS, 500) if _port_is_free(port))
        write_private(path, str(port))
        return port

    def _launch(self, argv: list[str], account: _wheels.Account | None, environment: dict[str, str]) -> None:
        log = self.data / "log"
        if log.exists() and log.stat().st_size > _LOG_BYTES:
            log.replace(self.data / "log.old")
        command = [sys.executable, "-P", _guard.__file__, str(self.data)]
        with open(log, "ab", opener=_private) as output:
            self._log_start = output.tell()
            # The guard has a session of its own: Ctrl-C in a terminal reaches only the owner, which stops the servers.
            self._guard = subprocess.Popen(  # noqa: S603 - our own script, no shell
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        order = {"argv": argv, "env": environment, "user": account, "signal": int(self._stop_signal),
                 "temporary": self.temporary, "guard": command}  # fmt: skip
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(json.dumps(order).encode() + b"\n")
            self._guard.stdin.flush()
        answer = self._guard.stdout.readline()
        self._process = _guard.find_process(int(answer)) if answer else None
        if self._process is None:
            self._fail("ended at once")

    def _await_answer(self, deadline: float, timeout: float) -> None:
        while True:
            if not self.running:
                self._fail("ended while it started")
            if self._answers(max(deadline - time.monotonic(), 0.05)):
                return
            if time.monotonic() > deadline:
                self._fail(f"did not answer within {timeout:g} s")
            time.sleep(0.01)

    def _fail(self, what: str) -> None:
        with (self.data / "log").open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        raise EmbeddedError("\n  ".join([f"{self._name} {what}; the end of its log:", *lines[-20:]]))

    def _leave_guard(self) -> None:
        """Have the guard stop the server, if both are there, and wait until the guard has ended."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        assert guard.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(b"stop\n")
            guard.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.close()
        try:
            guard.wait(_guard.STOP_SECONDS + 2 * _guard.KILL_SECONDS)
        except subprocess.TimeoutExpired:  # somebody has paused the guard; the sweep ends the server
            guard.kill()
            guard.wait()
        guard.stdout.close()

    def _sweep(self) -> None:
        """End the processes left from an earlier run in this folder, which must be locked."""
        try:
            record = json.loads((self.data / "run.json").read_text())
            of_guard, of_server = record["guard"], record["server"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return  # there is none, or it is none of ours
        guard = _recorded(of_guard)
        if guard is not None and not _guard.wait_until(
            lambda: not _guard.alive(guard), _guard.STOP_SECONDS + _guard.KILL_SECONDS
        ):
            _guard.kill(guard)  # this also kills the server, which is its child
        server = _recorded(of_server)
        if server is not None and not _guard.end(server, self._stop_signal):
            raise EmbeddedError(f"{self._name}: process {server.pid} from an earlier run does not end; end it by hand")
        with contextlib.suppress(FileNotFoundError):
            (self.data / "run.json").unlink()

    def _forget(self) -> None:
        """In a forked child, let go of what would keep the owner's servers alive and its folder locked."""
        if self._guard is not None:
            for pipe in (self._guard.stdin, self._guard.stdout):
                if pipe is not None:
                    pipe.close()
            self._guard.returncode = 0  # the guard is not a child of this process
        if self._lock is not None:
            self._lock.close()
        self._guard = self._process = self._lock = None


class _Owner(Protocol):
    def _forget(self) -> None: ...


# All objects that hold a lock or a guard's pipe; a forked child makes them let go of it.
owners: weakref.WeakSet[_Owner] = weakref.WeakSet()


def _forget_in_child() -> None:
    for owner in list(owners):
        owner._forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step, readable by its owner only: a crash leaves the old file or the new one."""
    fresh = path.with_name(f"{path.name}.new")
    # In an ASCII locale a path in the text may have bytes that Python could not decode: they are written as they were.
    with open(fresh, "w", encoding="utf-8", errors="surrogateescape", opener=_private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def make_folder(folder: Path) -> None:
    """Make the missing folders, closed to others; those that root makes let others pass, for Postgres' account."""
    mode = 0o711 if os.geteuid() == 0 else 0o700
    try:
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            missing.mkdir(mode, exist_ok=True)
            missing.chmod(mode)  # regardless of the umask
    except OSError as error:
        raise EmbeddedError(f"cannot create the data folder {folder}: {error.strerror}") from error


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # The servers set this, too: connections that linger after a stop do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _recorded(entry: tuple[int, list[str]]) -> Any | None:
    """Return the recorded process, or None if the pid is no longer its own. Its arguments name the data folder."""
    psutil = importlib.import_module("psutil")
    pid, argv = entry
    process = _guard.find_process(pid)
    # An error of psutil means that the process has ended, or is another user's and so not the recorded one.
    with contextlib.suppress(psutil.Error):
        if process is not None and _guard.alive(process) and process.cmdline()[1:] == argv[1:]:
            return process
    return None
