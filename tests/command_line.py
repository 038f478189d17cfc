"""Runs `bufstore` commands as processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import bufstore
import forked_command
from bufstore import PostgresThreadStore
from bufstore.cli.conversations.generated import conversation
from conftest import Deployment

SOURCE = Path(next(iter(bufstore.__path__))).parent
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("BUFSTORE_")} | {
    "PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path[1:]]),
    "COLUMNS": "200",
}
COMMAND = [sys.executable, "-W", "error", "-m", "bufstore.cli"]


def generate(seed: int, threads: int) -> Iterator[tuple[str, list[Any]]]:
    return (conversation(seed, index) for index in range(threads))


class Result:
    """A command's exit code and output."""

    def __init__(self, process: subprocess.CompletedProcess[bytes]) -> None:
        self.code = process.returncode
        self.out = process.stdout.decode()
        self.err = process.stderr.decode()

    def __repr__(self) -> str:
        return f"exit {self.code}\n{self.out}\n{self.err}"

    @property
    def json(self) -> Any:
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


def bufstore_cli(*arguments: object, stdin: bytes = b"", **environment: str) -> Result:
    """Run a command to its end, in a forked process."""
    env = ENVIRONMENT | environment
    return Result(forked_command.run([*map(str, arguments)], stdin=stdin, env=env, timeout_s=60))


def where(deployment: Deployment) -> dict[str, str]:
    """Return the environment variables that point the command line at a deployment."""
    return {
        "BUFSTORE_NATS": deployment.servers.nats.url,
        "BUFSTORE_POSTGRES": deployment.servers.postgres.dsn,
        "BUFSTORE_STREAM": deployment.log.stream,
        "BUFSTORE_BUCKET": deployment.log.bucket,
        "BUFSTORE_SCHEMA": deployment.name,
    }


def lines_of(threads: Iterable[tuple[Any, Any]]) -> bytes:
    return b"".join(json.dumps({"thread_id": t, "messages": m}).encode() + b"\n" for t, m in threads)


def stored(where: Deployment | str, *thread_ids: str) -> list[Any]:
    """Return each thread's messages from Postgres (of a deployment, or by its DSN), read without the buffer."""

    async def read() -> list[Any]:
        async with PostgresThreadStore(where) if isinstance(where, str) else where.inner() as plain:
            return [await plain.load_messages(t) for t in thread_ids]

    return asyncio.run(read())
