"""Contestants in processes of their own, called over a pipe.

`Worker` is the parent's handle. The child runs an event loop (uvloop's, when it is installed) with one contestant,
whose background tasks go on between the calls. It ends with its parent, when the pipe closes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from bench.contestant import Contestant, Place

#: Children are forked from a server that has only imported the store, so that they start at once. A contestant's other
#: imports are made in its own process, because a full garbage collection visits all imported objects.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["bench.ours"])
#: Timeout of every call, so that a hanging child does not hang the suite.
_CALL_TIMEOUT_S = 1800.0


class WorkerError(Exception):
    """A contestant raised; the message is its traceback."""


class Worker:
    """A contestant in a child process. Calls are method names; one runs at a time."""

    def __init__(self, kind: type[Contestant], place: Place, **options: Any) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_main, args=(theirs, kind, place, options), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, method: str, **arguments: Any) -> None:
        """Start a call, to be ended with `end`."""
        self._pipe.send((method, arguments))

    def end(self, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        """Return the result of the call. Raises WorkerError, or EOFError when the process has ended."""
        if not self._pipe.poll(timeout_s):
            raise WorkerError(f"no answer in {timeout_s:g} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise WorkerError(value)
        return value

    def call(self, method: str, **arguments: Any) -> Any:
        """Call `begin` and `end`."""
        self.begin(method, **arguments)
        return self.end()

    def memory(self) -> float:
        """Return the peak resident memory of the process, in MiB."""
        return float(self.call("_memory"))

    def kill(self) -> None:
        """Send SIGKILL, without `close`."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    @property
    def killed(self) -> bool:
        """True when the process was killed or stopped."""
        return self._pipe.closed

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def stop(self) -> None:
        """End the process, whose "close" was begun."""
        try:
            self.end()
        finally:
            self._pipe.close()
            self._process.join(30)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()


def _main(pipe: Connection, kind: type[Contestant], place: Place, options: dict[str, Any]) -> None:
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        from uvloop import new_event_loop as factory
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(pipe, kind, place, options))


async def _serve(pipe: Connection, kind: type[Contestant], place: Place, options: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    contestant: Contestant | None = None
    while True:
        try:
            # In a thread, which sleeps in the system until a call arrives.
            method, arguments = await loop.run_in_executor(None, pipe.recv)
        except (EOFError, OSError):
            return
        try:
            # Inside the try, so that the parent gets its errors.
            contestant = contestant or kind(place, **options)
            value = _peak_memory() if method == "_memory" else await getattr(contestant, method)(**arguments)
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        else:
            pipe.send((True, value))


def _peak_memory() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / (1 << 10)
