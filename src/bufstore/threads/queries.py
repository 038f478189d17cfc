"""What can be asked of many messages, runs and threads, and the cursors of the pages that answer.

A cursor is opaque and carries the shape of its query. With another query it is refused, because it would silently skip
or repeat items. Pages continue after the last item that was delivered (not at a count of items), so writes
and deletions in the meantime do not shift the other items.
"""

from __future__ import annotations

import binascii
import enum
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from bufstore.errors import InvalidId, InvalidQuery
from bufstore.threads.model import Run, RunStatus, Thread, decode_message, id_of
from bufstore.types import Message, check_choice, check_id

P = TypeVar("P")
T = TypeVar("T")
#: How many items a page has by default, and at most.
LIMIT = 50
LIMIT_MAX = 200


class Order(enum.StrEnum):
    """Which messages of a thread come first."""

    OLDEST_FIRST = "oldest-first"
    NEWEST_FIRST = "newest-first"


class Visibility(enum.StrEnum):
    """Which messages: a message is internal when it is a dict whose ``visibility`` is ``"internal"``."""

    ANY = "any"
    EXTERNAL = "external"
    INTERNAL = "internal"


class MessageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which messages of a thread. Positions are 1-based; `after` and `before` are not included."""

    after: int | None = None
    before: int | None = None
    order: Order = Order.OLDEST_FIRST
    visibility: Visibility = Visibility.ANY
    #: Only messages whose ``metadata`` has this ``run_id``.
    run_id: str | None = None

    @property
    def takes_all(self) -> bool:
        """Whether the query selects by positions alone."""
        return self.visibility is Visibility.ANY and self.run_id is None

    def matches(self, record: MessageRecord) -> bool:
        """Whether the query selects the record, whatever its position."""
        if self.run_id is not None and record.run_id != self.run_id:
            return False
        return self.visibility is Visibility.ANY or record.internal is (self.visibility is Visibility.INTERNAL)


ALL_MESSAGES = MessageQuery()


class MessageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A message and what is known about it."""

    thread_id: str
    #: Its position in the thread, from 1.
    seq: int
    message: Message
    #: The message's ``id``, if that is a str.
    message_id: str | None = None
    #: The ``run_id`` in the message's ``metadata``, if that is a str.
    run_id: str | None = None
    internal: bool = False


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What pages have in common."""

    #: The cursor of the next page; None at the end.
    next_cursor: str | None = None
    #: The threads of this page whose chain is broken by a parked entry: the page shows them without that entry and
    #: whatever builds on it. Empty for a store without a buffer.
    quarantined: frozenset[str] = frozenset()


class MessagePage(Page, frozen=True, kw_only=True):
    """Some records of a thread."""

    records: list[MessageRecord]


class RunQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs. They come in the order of their creation, then by id."""

    thread_id: str | None = None
    status: RunStatus | None = None
    id_prefix: str | None = None


ALL_RUNS = RunQuery()


class RunPage(Page, frozen=True, kw_only=True):
    """Some runs."""

    runs: list[Run]


class ThreadQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which threads. The one that was changed last comes first, then by id."""

    resource_id: str | None = None
    #: Only children of this thread.
    parent_thread_id: str | None = None
    #: Only threads without a parent. Not together with `parent_thread_id`.
    roots: bool = False
    id_prefix: str | None = None


ALL_THREADS = ThreadQuery()


class ThreadPage(Page, frozen=True, kw_only=True):
    """Some threads, without messages and state."""

    threads: list[Thread]


Query = MessageQuery | RunQuery | ThreadQuery


def check_limit(limit: int) -> int:
    """`limit`, clamped to 1 … LIMIT_MAX. Raises InvalidQuery for anything but an int."""
    if type(limit) is not int:
        raise InvalidQuery(f"limit must be an int, not {type(limit).__name__}")
    return max(1, min(limit, LIMIT_MAX))


def check_query(query: Query, kind: Any = Query) -> None:
    """Raise InvalidId or InvalidQuery for a query that is of another kind or makes no sense; called before any I/O."""
    if not isinstance(query, kind):
        raise InvalidQuery(f"the query must be a {getattr(kind, '__name__', kind)}, not {type(query).__name__}")
    for name in ("run_id", "thread_id", "resource_id", "parent_thread_id", "id_prefix"):
        value = getattr(query, name, None)
        if value is not None:
            check_id(value, name)
    if isinstance(query, MessageQuery):
        for name in ("after", "before"):
            value = getattr(query, name)
            if value is not None:
                check_position(value, name)
        check_choice(query.order, Order, "order", InvalidQuery)
        check_choice(query.visibility, Visibility, "visibility", InvalidQuery)
    elif isinstance(query, RunQuery):
        if query.status is not None:
            check_choice(query.status, RunStatus, "status", InvalidQuery)
    elif type(query.roots) is not bool:
        raise InvalidQuery(f"roots must be True or False, not {query.roots!r}")
    elif query.roots and query.parent_thread_id is not None:
        raise InvalidQuery("roots have no parent: ask for roots or for the children of a thread")


def check_position(value: int, name: str) -> None:
    """Raise InvalidQuery unless `value` can be a position of a message, or 0."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise InvalidQuery(f"{name} must be a position, not {value!r}")


def check_message_id(message_id: str) -> str:
    """Return `message_id` if a message can have it: any str without lone surrogates. Raises InvalidId."""
    if type(message_id) is not str:
        raise InvalidId(f"message_id must be a str, not {type(message_id).__name__}")
    try:
        message_id.encode()
    except UnicodeEncodeError:
        raise InvalidId(f"message_id {message_id!r} has a lone surrogate") from None
    return message_id


def new_cursor(query: Query, scope: str, position: Any) -> str:
    """The cursor of the page of `query` that goes on behind `position`. `scope`: a thread id, or empty."""
    return urlsafe_b64encode(msgspec.msgpack.encode((_shape(query, scope), position))).decode().rstrip("=")


def read_cursor(cursor: str, query: Query, scope: str, kind: type[P]) -> P:
    """The position in `cursor`, of type `kind`. Raises InvalidQuery for another query's cursor and for garbage."""
    try:
        raw = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        shape, found = msgspec.msgpack.decode(raw, type=tuple[bytes, Any])
        position = msgspec.convert(found, kind)
    except (msgspec.MsgspecError, binascii.Error, TypeError, ValueError, RecursionError):
        raise InvalidQuery("this is not a page cursor") from None
    if shape != _shape(query, scope):
        raise InvalidQuery("the cursor belongs to a page of another query")
    return position


#: The row behind which a page of runs or threads goes on: its time in microseconds (or another growing number), its id.
Position = tuple[int, str]


def read_position(cursor: str | None, query: RunQuery | ThreadQuery) -> Position | None:
    """The row behind which the page goes on; None for the first page. Raises InvalidQuery."""
    if cursor is None:
        return None
    when, row_id = read_cursor(cursor, query, "", tuple[int, str])
    if not 0 <= when < 2**53 or "\0" in row_id:
        raise InvalidQuery("this is not a page cursor")
    return when, row_id


def page_of(query: Query, limit: int, found: list[tuple[Position, T]]) -> tuple[list[T], str | None]:
    """The page and the next page's cursor. `found` has one row more than `limit` if there are more."""
    page = found[:limit]
    cursor = new_cursor(query, "", page[-1][0]) if len(found) > limit else None
    return [item for _, item in page], cursor


def _shape(query: Query, scope: str) -> bytes:
    shape = msgspec.msgpack.encode((type(query).__name__, scope, msgspec.to_builtins(query)))
    return blake2b(shape, digest_size=8).digest()


def record_of(thread_id: str, seq: int, payload: bytes) -> MessageRecord:
    """The record of an encoded message."""
    message = decode_message(payload)
    fields = message if isinstance(message, dict) else {}
    metadata = fields.get("metadata")
    run_id = metadata.get("run_id") if isinstance(metadata, dict) else None
    return MessageRecord(
        thread_id=thread_id,
        seq=seq,
        message=message,
        message_id=id_of(message),
        run_id=run_id if isinstance(run_id, str) else None,
        internal=fields.get("visibility") == "internal",
    )


def prefix_end(prefix: str) -> str | None:
    """The smallest string above all strings that begin with `prefix`, by code points; None if there is none."""
    for i in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[i])
        if code < 0x10FFFF:
            # Surrogates are not characters.
            return prefix[:i] + chr(0xE000 if code == 0xD7FF else code + 1)
    return None
