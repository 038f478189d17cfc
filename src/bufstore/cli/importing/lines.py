"""The input of `import`: JSONL or JSONL.gz, read twice (to import it, and to compare it), never held as a whole."""

from __future__ import annotations

import gzip
import io
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from bufstore.errors import Rejected
from bufstore.threads.model import encode_messages
from bufstore.types import check_id

#: A longer line is a bad line: a line must be held in memory as a whole.
LINE_BYTES_MAX = 64 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_STDIN = 0


class Line(NamedTuple):
    """A thread to import."""

    number: int
    size: int
    thread_id: str
    messages: list[Any]


class BadLine(NamedTuple):
    """A line that cannot be imported, and why."""

    number: int
    size: int
    reason: str


class Input:
    """A file, or standard input (`-`). Input that cannot be read twice is also kept in a temporary file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._spool: IO[bytes] | None = None
        if path == "-" or not Path(path).is_file():
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`

    def close(self) -> None:
        if self._spool is not None:
            self._spool.close()

    def read(self) -> Iterator[Line | BadLine]:
        """Yield the lines, for the first time. Raises OSError when the file cannot be opened."""
        # Not sys.stdin: the interpreter cannot end while a thread waits in a read of it.
        with open(_STDIN if self._path == "-" else self._path, "rb", closefd=self._path != "-") as raw:
            for number, line in _split(raw):
                if self._spool is not None:
                    self._spool.write(line if isinstance(line, bytes) else b"\n")
                yield from _parse(number, line)

    def read_again(self) -> Iterator[Line | BadLine]:
        """Yield the lines once more, after `read` has come to its end."""
        if self._spool is None:
            yield from self.read()
            return
        self._spool.seek(0)
        for number, line in enumerate(self._spool, 1):
            yield from _parse(number, line)


def _split(raw: io.BufferedReader) -> Iterator[tuple[int, bytes | str]]:
    """Yield the number of each line with its bytes, or with the reason why they cannot be had."""
    # The content decides: a name says little, and standard input has none.
    packed = raw.peek(2)[:2] == _GZIP_MAGIC
    stream: IO[bytes] = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if packed else raw
    number = 0
    try:
        while line := stream.readline(LINE_BYTES_MAX + 1):
            number += 1
            if len(line) <= LINE_BYTES_MAX:
                yield number, line
                continue
            while line and not line.endswith(b"\n"):
                line = stream.readline(LINE_BYTES_MAX)
            yield number, f"longer than {LINE_BYTES_MAX >> 20} MiB"
    except (EOFError, OSError, zlib.error) as e:
        yield number + 1, f"cannot be read from here on: {e}"


def _parse(number: int, line: bytes | str) -> Iterator[Line | BadLine]:
    """Yield the thread of a line, or why the line has none; nothing for a blank line."""
    if isinstance(line, str):
        yield BadLine(number, 0, line)
        return
    if not line.strip():
        return
    try:
        yield Line(number, len(line), *_thread(line))
    except (Rejected, ValueError) as e:
        yield BadLine(number, 0, str(e))


def _thread(line: bytes) -> tuple[str, list[Any]]:
    """Return thread id and messages. Raises Rejected or ValueError for what cannot be stored."""
    try:
        value = msgspec.json.decode(line)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except (msgspec.MsgspecError, UnicodeError) as e:
        raise ValueError(f"not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    for name in ("thread_id", "messages"):
        if name not in value:
            raise ValueError(f"no {name}")
    messages = value["messages"]
    if not isinstance(messages, list):
        raise ValueError("messages is not a list")
    # All messages are checked now: a thread is imported whole or not at all.
    encode_messages(messages)
    return check_id(value["thread_id"], "thread_id"), messages
