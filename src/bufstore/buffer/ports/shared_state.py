"""The state that instances share beside the log, and the session that leads to both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from bufstore.buffer.ports.log import Floor, Log

#: How many seconds the shared state keeps a run's id, to find the run until Postgres has it and to refuse it to others.
RUN_TTL_S = 7 * 24 * 3600


class SharedState(Protocol):
    """Small shared facts that may be lost: run → thread, members, progress, and calls to the owner of a partition."""

    #: Why this process's last new run was not registered; empty if it was.
    unregistered: str

    @property
    def refused(self) -> str:
        """Why the last new run was refused, if that was not long ago and somebody has to mend it; else empty."""

    async def check(self) -> None:
        """Raise ConfigDrift when the shared state is another log's. With several lanes, the first one checks all.

        Compares nothing else, and creates nothing. Raises LogUnavailable.
        """

    async def setup(self) -> None:
        """Create what is missing, or check what is there; get ready."""

    async def claim_run(self, run_id: str, thread_id: str, timeout_s: float) -> str:
        """Register `run_id` as a run of `thread_id`. Returns the thread that it belongs to (maybe another one)."""

    async def thread_of_run(self, run_id: str, timeout_s: float) -> str | None:
        """The thread of a run, if it is known here."""

    async def lineage(self, timeout_s: float) -> tuple[int, bytes]:
        """The sequence and the content of the one record of changes of lineage; (0, empty) if there is none."""

    async def put_lineage(self, record: bytes, expected: int, timeout_s: float) -> int:
        """Replace the record if it still has the sequence `expected`; return the new sequence.

        Raises Conflict, AppendUnknown, LogUnavailable.
        """

    async def renew_member(self, member: str, ttl_s: int, trouble: str = "") -> None:
        """Keep `member` in the list of live flushers for `ttl_s` more seconds; `trouble`: why it does not flush."""

    async def troubles(self) -> dict[str, str]:
        """Per flusher that reports trouble: what keeps it from flushing."""

    async def leave(self, member: str) -> None:
        """Take `member` off the list."""

    async def announce(self) -> None:
        """Tell the other flushers that the list has changed."""

    async def members(self) -> dict[str, int]:
        """The flushers with a record, and a number of each record that changes with every renewal.

        Most are alive; a server that crashed may have lost a record's expiry (see `membership.Pulse`).
        """

    async def report(self, progress: Mapping[int, int]) -> None:
        """Publish, per partition, up to which sequence everything is flushed."""

    async def progress(self) -> dict[int, int]:
        """The last reported progress of each partition."""

    async def on_progress(self, callback: Callable[[int, int], None]) -> None:
        """Call back with (partition, sequence) for every report of any flusher, from now on."""

    async def put_floors(self, floors: Mapping[int, Floor]) -> None:
        """Publish, per partition, what is no longer needed of the log."""

    async def floors(self) -> dict[int, Floor]:
        """The last published floor of each partition."""

    async def tell_parked(self, thread_id: str) -> None:
        """Tell every writer that the thread's chain is broken."""

    async def on_parked(self, callback: Callable[[str], None]) -> None:
        """Call back with the thread whenever a process reports that its chain is broken."""

    async def call_owner(self, partition: int) -> None:
        """Ask the partition's owner to flush now."""

    async def on_call(self, callback: Callable[[int], None]) -> None:
        """Call back with the partition whenever somebody asks for a flush, or -1 when members changed."""


class Session(Protocol):
    """One instance's way to the server that holds log and shared state."""

    @property
    def log(self) -> Log:
        """The log."""

    @property
    def shared(self) -> SharedState:
        """The shared state."""

    @property
    def traffic(self) -> tuple[int, int]:
        """Messages sent and received since the start."""

    async def open(self) -> None:
        """Connect. Raises ConfigError, LogUnavailable."""

    async def aclose(self) -> None:
        """Release everything: log and shared state cannot be used any more."""
