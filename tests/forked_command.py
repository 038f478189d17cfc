"""Runs `bufstore` commands in forks of a process that has imported bufstore: the import is most of their time.

A command has its own arguments, environment, standard streams and exit code, may be killed, and ends as any Python
program does. `command_line.COMMAND` starts `python -m bufstore.cli` without a fork.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_READY = b"ready\n"
_START_S = 60.0
_STREAMS = 3
_LENGTH = struct.Struct("!I")
_STATUS = struct.Struct("!i")


def run(
    arguments: Sequence[str], *, stdin: bytes, env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[bytes]:
    """Run a command as `subprocess.run` does. Raises TimeoutExpired, and kills the command, after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_START_S)
    connection.connect(_parent())
    pipes = [os.pipe() for _ in range(_STREAMS)]
    ours, theirs = [pipes[0][1], pipes[1][0], pipes[2][0]], [pipes[0][0], pipes[1][1], pipes[2][1]]
    with connection, ThreadPoolExecutor(_STREAMS) as pool:
        request = json.dumps({"arguments": arguments, "env": dict(env), "folder": str(Path.cwd())}).encode()
        socket.send_fds(connection, [_LENGTH.pack(len(request))], theirs)
        connection.sendall(request)
        for stream in theirs:
            os.close(stream)
        pool.submit(_fed, ours[0], stdin)
        out, err = (pool.submit(_read, stream) for stream in ours[1:])
        pid = _STATUS.unpack(_received(connection, _STATUS.size))[0]
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            code = _STATUS.unpack(_received(connection, _STATUS.size))[0]
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(list(arguments), timeout_s) from None
        return subprocess.CompletedProcess(list(arguments), code, out.result(), err.result())


def _fed(stream: int, data: bytes) -> None:
    try:
        with open(stream, "wb") as pipe:
            pipe.write(data)
    except BrokenPipeError:
        pass  # the command ended without reading all of its input


def _read(stream: int) -> bytes:
    with open(stream, "rb") as pipe:
        return pipe.read()


def _received(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError("the process that forks commands is gone")
        found += part
    return found


@functools.cache
def _parent() -> str:
    """Start the process that forks, once, and return its socket. It ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="bufstore-commands-")
    address = str(Path(folder.name) / "socket")
    search = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p)])
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "forked_command", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": search},
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ended(stdin: int = process.stdin.fileno()) -> None:
        process.stdin.close()
        process.stdout.close()
        process.wait(60)
        folder.cleanup()

    atexit.register(ended)
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        assert ready.select(_START_S), f"the process that forks commands did not start within {_START_S:g} s"
    assert process.stdout.readline() == _READY
    return address


# The process that forks.


def _serve(address: str) -> None:
    """Fork a process for each connection. Returns only in such a process, which then runs the command."""
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as ready:
        listener.bind(address)
        listener.listen(64)
        sys.stdout.buffer.write(_READY)
        sys.stdout.buffer.flush()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes
        ready.register(listener, selectors.EVENT_READ)
        ready.register(sys.stdin.buffer, selectors.EVENT_READ)
        while not any(key.fileobj is sys.stdin.buffer for key, _ in ready.select()):
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    return _begin(connection)
    raise SystemExit(0)


def _begin(connection: socket.socket) -> None:
    """Fork the command and wait for its end. Returns only in the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, _STREAMS)
    request = json.loads(_received(connection, _LENGTH.unpack(length)[0]))
    command = os.fork()
    if command == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv[1:] = request["arguments"]
        return
    for stream in (*range(_STREAMS), *streams):  # readers see the pipes' end only when every holder has closed them
        os.close(stream)
    connection.sendall(_STATUS.pack(command))
    _, status = os.waitpid(command, 0)
    connection.sendall(_STATUS.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


if __name__ == "__main__":
    import bufstore.cli.app  # noqa: F401 - what each command would import
    from bufstore.cli import main

    gc.freeze()  # what is imported stays, so a command's garbage collector need not look through it
    _serve(sys.argv[1])
    main()
