"""What a store of threads and runs can do, and what an app's own store must offer to be wrapped."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from bufstore.buffer.target import Kind
from bufstore.errors import ConfigError
from bufstore.threads.lineage import Children
from bufstore.threads.model import NO_METADATA, Checkpoint, Run, Thread, ThreadChange, ThreadMetadata
from bufstore.threads.queries import (
    ALL_MESSAGES,
    ALL_RUNS,
    ALL_THREADS,
    LIMIT,
    MessagePage,
    MessageQuery,
    MessageRecord,
    RunPage,
    RunQuery,
    ThreadPage,
    ThreadQuery,
)
from bufstore.types import Message, Receipt

#: The name of this domain in a `Kind`: it says what a log's entries mean.
DOMAIN = "threads"
#: The kind of an app's own store that declares none.
_OWN = "app"
_KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ThreadReader(Protocol):
    """The reads. Each returns None for what does not exist and raises StoreUnavailable when it cannot know."""

    async def load_checkpoint(self, thread_id: str) -> Checkpoint | None:
        """The thread, its messages and its latest run, all as of one moment."""

    async def load_thread(self, thread_id: str) -> Thread | None:
        """The thread without its messages."""

    async def load_messages(self, thread_id: str) -> list[Message] | None:
        """The thread's messages, oldest first."""

    async def load_run(self, run_id: str) -> Run | None:
        """A run as it was last saved."""

    async def latest_run(self, thread_id: str) -> Run | None:
        """The run of the thread's newest checkpoint."""

    async def load_thread_state(self, thread_id: str) -> Any:
        """What `save_thread_state` saved last."""


@runtime_checkable
class Queryable(Protocol):
    """The reads over many rows. A wrapped store that has them answers the buffered store's lists. It can take from
    `bufstore.threads.queries` and `bufstore.threads.message_pages` whatever is the same for the pages of all tables.

    A page of a buffered store shows the flushed state of a thread in quarantine, and names the thread in
    `Page.quarantined`. Any other store leaves that empty.

    Order in time is the order in which rows reached the store that answers, by its clock. Behind a buffer, that is the
    order of writing within one thread, unless that clock is set back; between threads it may differ from the order of
    writing by as much as a flush takes.
    """

    async def query_messages(
        self, thread_id: str, query: MessageQuery = ALL_MESSAGES, *, limit: int = LIMIT, cursor: str | None = None
    ) -> MessagePage:
        """A page of the thread's messages; an empty one if there is no such thread.

        `limit` is clamped to 1 … 200; `cursor` is a page's ``next_cursor``. Raises InvalidQuery, also for the cursor
        of another query.
        """

    async def load_message(self, thread_id: str, message_id: str) -> MessageRecord | None:
        """The first message of the thread with this id. A buffered store raises ThreadQuarantined, like its reads."""

    async def load_message_range(self, thread_id: str, first: int, last: int) -> list[MessageRecord]:
        """The messages that exist at positions `first` to `last` (counted from 1, both included).

        Raises as `load_message`.
        """

    async def query_runs(self, query: RunQuery = ALL_RUNS, *, limit: int = LIMIT, cursor: str | None = None) -> RunPage:
        """A page of runs, in the order of their creation. Arguments and errors as in `query_messages`."""

    async def query_threads(
        self, query: ThreadQuery = ALL_THREADS, *, limit: int = LIMIT, cursor: str | None = None
    ) -> ThreadPage:
        """A page of threads, the last changed first. Arguments and errors as in `query_messages`.

        A thread that changes while pages are read moves to the front: a reader of later pages may miss it.
        """


class ThreadRunStore(ThreadReader, Queryable, Protocol):
    """The contract of PostgresThreadStore, MemoryThreadStore and BufferedThreadStore."""

    async def checkpoint(
        self, thread_id: str, messages: Sequence[Message], run: Run, *, idempotency_key: str | None = None
    ) -> Receipt:
        """Make `messages` the thread's whole list and save `run`, together; create the thread if it is new.

        Returns the receipt once that is durable. Raises InvalidId, InvalidRecord, TooLarge, AlreadyExists (the
        run id belongs to another thread) or LineageError (the thread has no parent yet, and the one that the run names
        does not exist or is the thread's descendant) before anything is stored; IdempotencyConflict for a key that
        was used with other content (a key used with the same content returns a receipt with ``repeated`` set and
        stores nothing; once the thread was deleted, its keys may be forgotten, and a repeat creates it again).
        """

    async def checkpoint_append(
        self,
        thread_id: str,
        delta: Sequence[Message],
        run: Run,
        *,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> Receipt:
        """Append `delta` to the thread's messages and save `run`, together; create the thread if it is new.

        `expected_version`: the number of messages the thread must have before; else VersionConflict. A message
        whose ``id`` (a str field of a dict message) is in the thread already, or twice in `delta`, raises
        AlreadyExists. Otherwise like `checkpoint`.
        """

    # Edits change one thread without a checkpoint. Repeating one is safe, also after OutcomeUnknown: the repetition
    # leads to the same thread, or raises a Rejected error that says that the edit has been done. The one exception:
    # `append_messages` appends again if the messages have no ids and no `expected_version` is given. Pass one of these.

    async def create_run(self, run: Run) -> Receipt:
        """Save a run on its own, creating its thread if that is new; the thread's row does not change with it.

        Raises AlreadyExists if there is a run with this id.
        """

    async def save_thread(self, thread_id: str, metadata: ThreadMetadata = NO_METADATA) -> Receipt:
        """Replace the thread's metadata; create it if it is new."""

    async def update_metadata(self, thread_id: str, metadata: ThreadMetadata) -> Receipt:
        """Replace the metadata of a thread that exists. Raises NotFound."""

    async def save_thread_state(self, thread_id: str, state: Any) -> Receipt:
        """Replace the state kept with a thread: any value that a message can be. Raises NotFound, InvalidRecord."""

    async def append_messages(
        self, thread_id: str, messages: Sequence[Message], *, expected_version: int | None = None
    ) -> Receipt:
        """Append to the thread's messages without a run; create the thread if it is new.

        Errors as in `checkpoint_append`.
        """

    async def delete_messages(self, thread_id: str, message_ids: Sequence[str] | None = None) -> Receipt:
        """Delete the messages with these ids, or all. Raises NotFound for a thread or an id that is not there."""

    async def set_parent(self, thread_id: str, parent_thread_id: str | None) -> Receipt:
        """Give the thread another parent, or none. Raises NotFound.

        Raises LineageError if the parent is the thread itself or one of its descendants, or if it or one of its
        ancestors does not exist.
        """

    async def delete_thread(self, thread_id: str, *, children: Children = Children.REJECT) -> Receipt:
        """Delete the thread with its messages, runs, metadata and state. Raises NotFound.

        `children`: whether the thread's children prevent the deletion (LineageError), stay without a parent, or are
        deleted too. A later write to the thread's id makes a new thread. A repetition raises NotFound.
        """

    async def aclose(self) -> None:
        """Release what the store holds. Idempotent."""


class WrappableStore(Protocol):
    """What `BufferedThreadStore` needs of an app's own Postgres store: two reads, and one method that writes.

    A store that is `Queryable` too is expected to apply all of a `ThreadChange`. With any other, only checkpoints are
    written; edits (metadata, state, runs or messages on their own, deletions) raise ConfigError: an `apply` that
    was written for checkpoints would silently leave them out.

    The log records the kind of store that it is flushed into, so that it is never flushed into another kind. An app's
    own store is of kind "app", whatever its class is called. A store that must be told apart from another one of the
    same app declares a lasting name: ``store_kind = "tickets"`` on its class. So must a subclass of
    PostgresThreadStore whose `apply` writes more; otherwise bufstore's own tools would flush in its place.
    """

    async def load_checkpoint(self, thread_id: str) -> Checkpoint | None:
        """The thread, its messages and its latest run, all as of one moment; None if there is no such thread."""

    async def load_run(self, run_id: str) -> Run | None:
        """A run as it was last saved."""

    async def apply(self, connection: Any, batch: Sequence[ThreadChange]) -> None:
        """Write one flush: at most one change per thread, in any order.

        `connection` is a psycopg AsyncConnection inside the transaction that also moves our watermarks: write with
        it, commit nothing, and the batch takes effect exactly once, in order. The base of each change is exactly
        the thread as earlier batches left it. Let errors through: a database error of class 22 or 23 marks the entry
        as poison; after any other the flush is retried (docs/OWN_STORE.md says for how long).
        """


def kind_of(store: object) -> Kind:
    """Return the store's kind: see `WrappableStore`. Raises ConfigError for a name that cannot be a kind's."""
    # Not getattr alone: a store that delegates every attribute to an inner store would take the inner store's name.
    declared = inspect.getattr_static(store, "store_kind", None) is not None
    name: object = store.store_kind if declared else _OWN  # type: ignore[attr-defined]
    if not isinstance(name, str) or not _KIND.fullmatch(name):
        raise ConfigError(
            f"{type(store).__name__}.store_kind must have 1 to 64 characters out of A-Z, a-z, 0-9, '_', '-' and '.'"
        )
    return Kind(DOMAIN, name)
