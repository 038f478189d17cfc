"""What the buffered saver needs of the store behind it: LangGraph's tables in Postgres, or the same in memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Backing
from bufstore.buffer.ports.ledger import Ledger
from bufstore.config import BufferConfig, LogConfig
from bufstore.langgraph.domain import Tail
from bufstore.langgraph.model import BlobKey, CheckpointKey, LangGraphChange, Tables


class Part(msgspec.Struct, frozen=True):
    """Some rows of a thread, and the thread's watermark, all of one moment."""

    watermark: Watermark
    tables: Tables
    #: All namespaces of the thread, if they were asked for.
    namespaces: frozenset[str] | None = None
    #: The thread's state, as a question for it would have told; None: it was not asked for with the rest.
    state: Tail | None = None


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoints a list shows; None: any."""

    thread_id: str | None = None
    ns: str | None = None
    checkpoint_id: str | None = None
    #: What the metadata must contain, as JSON.
    metadata: bytes | None = None
    #: Only checkpoints whose id is less.
    before: str | None = None


#: Where a list goes on: behind this checkpoint (its id, thread and namespace), newest first.
Cursor = tuple[str, str, str]


class Outline(msgspec.Struct, frozen=True):
    """A checkpoint without its values: what a decision about old rows needs."""

    ns: str
    id: str
    parent: str | None
    #: The blobs that it names.
    blobs: frozenset[BlobKey]
    #: The root graph's checkpoint that the subgraph's call started from.
    root: str | None
    #: Whether its channels' values are rebuilt from earlier checkpoints' writes.
    delta: bool
    #: Whether it takes what was sent to it from its parent's writes: see `bufstore.langgraph.model.takes_sends`.
    needs_parent: bool
    #: The time of the checkpoint (ISO 8601); empty: not known.
    ts: str


class CheckpointStore(Protocol):
    """LangGraph's tables. Every read is of one moment. Reads raise StoreUnavailable, StoreMisconfigured, Closed."""

    @property
    def history(self) -> str:
        """How much of a thread's history is written: see `bufstore.langgraph.history`."""

    def of_lane(self, log: LogConfig) -> CheckpointStore:
        """Return this store as the buffer of a lane sees it: the watermarks of each lane are kept by themselves."""

    def behind(self, config: BufferConfig) -> tuple[Ledger, Backing[Tail]]:
        """Return what the buffer of the lane works with."""

    async def apply(self, connection: Any, batch: Sequence[LangGraphChange]) -> None:
        """See `bufstore.buffer.domain.Applies`."""

    async def latest(self, thread_id: str, ns: str, namespaces_max: int) -> Part:
        """Return the namespace's newest checkpoint, its blobs and writes; of an old version also what was sent to it.

        Also returns the writes of later checkpoints that are not there yet, and the thread's namespaces unless there
        are more than `namespaces_max`.
        """

    async def one(self, thread_id: str, ns: str, checkpoint_id: str) -> Part:
        """Return a checkpoint with its blobs and writes, and what was sent to it; without it, its writes alone."""

    async def ancestors(self, thread_id: str, ns: str, at: str, channels: Sequence[str], limit: int) -> Part:
        """Return this checkpoint and its ancestors, `limit` at most, with their blobs and writes of these channels.

        Metadata are left out. Beyond the nearest stored value of a channel nothing more of that channel is needed, and
        beyond the nearest stored values of all of them nothing at all.
        """

    async def rows(self, thread_id: str, blobs: Sequence[BlobKey], writes_of: Sequence[CheckpointKey]) -> Part:
        """Return these blobs, and the writes of these checkpoints."""

    async def page(self, query: Query, after: Cursor | None, limit: int) -> list[tuple[str, Tables]]:
        """Return the next checkpoints of a list, newest first, each with its thread, blobs and writes."""

    async def outlines(self, thread_id: str) -> list[Outline]:
        """Return the outlines of all checkpoints of a thread."""

    async def now(self) -> datetime:
        """Return the time by the store's clock, with its UTC offset."""

    async def idle(self, before: str) -> list[str]:
        """Return the threads whose last checkpoint is older than this time (ISO 8601)."""

    async def of_runs(self, run_ids: Sequence[str]) -> list[tuple[str, str, str]]:
        """Return thread, namespace and id of the checkpoints that these runs have saved."""
