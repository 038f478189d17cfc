"""What an edit of a thread becomes: one decision for the memory, Postgres and buffered stores.

An `Edit` is decided on the whole thread as it is at that moment; the caller makes sure that nothing changes the thread
before the edit is written (by a lock on the row, or the log's compare-and-set).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bufstore.errors import AlreadyExists, NotFound, VersionConflict
from bufstore.threads.model import (
    Run,
    Thread,
    ThreadMetadata,
    check_run,
    check_version,
    encode_messages,
    encode_metadata,
    encode_run,
    encode_value,
    encoded_id,
    encoded_ids,
)
from bufstore.threads.payload import Edit, Removal
from bufstore.threads.queries import check_message_id
from bufstore.types import Message, check_id, check_ids


class Known(msgspec.Struct, frozen=True):
    """A thread as an edit finds it."""

    thread: Thread | None
    messages: Sequence[bytes] = ()
    #: Whether the run that the edit creates exists.
    run_exists: bool = False
    #: Whether entries of the thread are in quarantine, from which it may come even if it is not there.
    parked: bool = False


class WantedEdit(msgspec.Struct, frozen=True):
    """An edit that is checked and encoded, and holds none of the caller's objects."""

    thread_id: str
    #: Decides what the edit writes. Raises Rejected errors.
    decide: Callable[[Known], Edit | Removal]
    #: The run that the edit creates.
    run_id: str | None = None
    #: True when the edit may be made to a thread whose chain is broken.
    heals: bool = False


def create_run(run: Run) -> WantedEdit:
    """See `ThreadRunStore.create_run`."""
    check_run(run)
    record = encode_run(run)

    def decide(known: Known) -> Edit:
        if known.run_exists:
            raise AlreadyExists(f"run {run.run_id!r} exists")
        return Edit(keep=len(known.messages), run=record, run_id=run.run_id)

    return WantedEdit(run.thread_id, decide, run.run_id)


def save_thread(thread_id: str, metadata: ThreadMetadata) -> WantedEdit:
    """See `ThreadRunStore.save_thread`."""
    encoded = encode_metadata(metadata)
    return WantedEdit(check_id(thread_id, "thread_id"), lambda known: Edit(len(known.messages), metadata=encoded))


def update_metadata(thread_id: str, metadata: ThreadMetadata) -> WantedEdit:
    """See `ThreadRunStore.update_metadata`."""
    encoded = encode_metadata(metadata)

    def decide(known: Known) -> Edit:
        _there(thread_id, known)
        return Edit(len(known.messages), metadata=encoded)

    return WantedEdit(check_id(thread_id, "thread_id"), decide)


def save_state(thread_id: str, state: Any) -> WantedEdit:
    """See `ThreadRunStore.save_thread_state`."""
    encoded = encode_value(state, "thread state")

    def decide(known: Known) -> Edit:
        _there(thread_id, known)
        return Edit(len(known.messages), state=encoded)

    return WantedEdit(check_id(thread_id, "thread_id"), decide)


def append_messages(thread_id: str, messages: Sequence[Message], expected_version: int | None) -> WantedEdit:
    """See `ThreadRunStore.append_messages`."""
    check_id(thread_id, "thread_id")
    check_version(expected_version)
    encoded = encode_messages(messages)
    new = encoded_ids(encoded)
    if len(set(new)) < len(new):
        raise AlreadyExists(f"thread {thread_id!r}: two of the new messages have the same id")

    def decide(known: Known) -> Edit:
        version = len(known.messages)
        if expected_version is not None and expected_version != version:
            raise VersionConflict(thread_id, expected=expected_version, actual=version)
        if new and not set(encoded_ids(known.messages)).isdisjoint(new):
            raise AlreadyExists(f"thread {thread_id!r} already has a message with the id of a new one")
        return Edit(version, encoded)

    return WantedEdit(thread_id, decide)


def delete_messages(thread_id: str, message_ids: Sequence[str] | None) -> WantedEdit:
    """See `ThreadRunStore.delete_messages`."""
    check_id(thread_id, "thread_id")
    wanted = None if message_ids is None else {check_message_id(i) for i in check_ids(message_ids, "message_ids")}

    def decide(known: Known) -> Edit:
        _there(thread_id, known)
        if wanted is None:
            return Edit(0)
        ids = [encoded_id(m) for m in known.messages]
        missing = wanted.difference(ids)
        if missing:
            raise NotFound(f"thread {thread_id!r} has no message {min(missing)!r}")
        keep = next((n for n, i in enumerate(ids) if i in wanted), len(ids))
        rest = [m for m, i in zip(known.messages[keep:], ids[keep:], strict=True) if i not in wanted]
        return Edit(keep, rest)

    return WantedEdit(thread_id, decide)


def set_parent(thread_id: str, parent_thread_id: str | None) -> WantedEdit:
    """Give the thread this parent, or none. The caller has checked the lineage."""

    def decide(known: Known) -> Edit:
        _there(thread_id, known)
        return Edit(len(known.messages), parent=(parent_thread_id,))

    return WantedEdit(thread_id, decide)


def detach(thread_id: str, parent_thread_id: str) -> WantedEdit:
    """Take this parent from the thread. `decide` raises NotFound if it has another parent, or none, by now."""

    def decide(known: Known) -> Edit:
        if known.thread is None or known.thread.parent_thread_id != parent_thread_id:
            raise NotFound(f"thread {thread_id!r} is not a child of {parent_thread_id!r}")
        return Edit(len(known.messages), parent=(None,))

    return WantedEdit(thread_id, decide)


def delete_thread(thread_id: str) -> WantedEdit:
    """Delete the thread with all that belongs to it. The caller has handled its children."""

    def decide(known: Known) -> Removal:
        if not known.parked:
            _there(thread_id, known)
        return Removal()

    return WantedEdit(thread_id, decide, heals=True)


def remove_remains(thread_id: str) -> WantedEdit:
    """Write a removal of a thread that does not exist, behind what the log may hold of it.

    `decide` raises AlreadyExists if the thread exists.
    """

    def decide(known: Known) -> Removal:
        if known.thread is not None:
            raise AlreadyExists(f"thread {thread_id!r} has been written to again")
        return Removal()

    return WantedEdit(thread_id, decide, heals=True)


def _there(thread_id: str, known: Known) -> None:
    if known.thread is None:
        raise NotFound(f"there is no thread {thread_id!r}")
