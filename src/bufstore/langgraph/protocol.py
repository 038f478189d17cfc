"""What the buffered saver needs of the store behind it: LangGraph's tables in Postgres, or the same in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Backing
from bufstore.buffer.ports.ledger import Ledger
from bufstore.config import BufferConfig
from bufstore.langgraph.domain import Tail
from bufstore.langgraph.model import BlobKey, CheckpointKey, LangGraphChange, Tables


class Part(msgspec.Struct, frozen=True):
    """Some rows of a thread, and the thread's watermark, all of one moment."""

    watermark: Watermark
    tables: Tables
    #: All namespaces of the thread, if they were asked for.
    namespaces: frozenset[str] | None = None
    #: What a question for the thread's state would have told, if it was asked with the rest.
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
    #: Its channels' values are rebuilt from earlier checkpoints' writes.
    delta: bool
    #: It takes what was sent from its parent's writes: see `bufstore.langgraph.model.takes_sends`.
    needs_parent: bool
    #: ISO 8601.
    ts: str


class CheckpointStore(Protocol):
    """LangGraph's tables. Every read is of one moment. Reads raise StoreUnavailable, StoreMisconfigured, Closed."""

    @property
    def history(self) -> str:
        """How much of a thread's history is written: see `bufstore.langgraph.history`."""
        ...

    def behind(self, config: BufferConfig) -> tuple[Ledger, Backing[Tail]]:
        """What a buffer in front of it works with."""
        ...

    async def apply(self, connection: Any, batch: Sequence[LangGraphChange]) -> None:
        """See `bufstore.buffer.domain.Applies`."""
        ...

    async def latest(self, thread_id: str, ns: str, namespaces_max: int) -> Part:
        """The namespace's newest checkpoint with its blobs and writes; of an old version also what was sent to it.

        With it the writes of later checkpoints that are not there yet; and the thread's namespaces, unless there are
        more than `namespaces_max`.
        """
        ...

    async def one(self, thread_id: str, ns: str, checkpoint_id: str) -> Part:
        """A checkpoint by its id, with its blobs and writes, and what was sent to it; its writes also without it."""
        ...

    async def ancestors(self, thread_id: str, ns: str, at: str, channels: Sequence[str], limit: int) -> Part:
        """This checkpoint and its ancestors, `limit` at most, with their blobs and writes of these channels.

        Metadata are left out. Behind what is stored last of a channel nothing more of it need come, and behind what is
        stored last of all of them nothing at all.
        """
        ...

    async def rows(self, thread_id: str, blobs: Sequence[BlobKey], writes_of: Sequence[CheckpointKey]) -> Part:
        """These blobs, and the writes of these checkpoints."""
        ...

    async def page(self, query: Query, after: Cursor | None, limit: int) -> list[tuple[str, Tables]]:
        """The next checkpoints of a list, newest first, each with its thread, blobs and writes."""
        ...

    async def outlines(self, thread_id: str) -> list[Outline]:
        """All checkpoints of a thread."""
        ...

    async def idle(self, before: str) -> list[str]:
        """The threads whose last checkpoint is older than this time (ISO 8601)."""
        ...

    async def of_runs(self, run_ids: Sequence[str]) -> list[tuple[str, str, str]]:
        """Thread, namespace and id of the checkpoints that these runs have saved."""
        ...
