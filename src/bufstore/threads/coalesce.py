"""Many entries of a thread, folded into one change."""

from __future__ import annotations

from collections.abc import Sequence

from bufstore.buffer.domain import Inapplicable
from bufstore.buffer.entry import Base, StoredEntry
from bufstore.threads.model import RunSave, ThreadChange
from bufstore.threads.payload import AnyPayload, Payload, Removal, decode_payload


def coalesce(thread_id: str, version: int, entries: Sequence[StoredEntry]) -> ThreadChange:
    """The change that equals `entries` in order, on a thread of `version` messages.

    A thread of which nothing is applied may be in the store all the same, from before the buffer. The writer of an
    entry that builds on no other has looked there, so the entry keeps exactly the messages that the store has.

    Raises Inapplicable for the first entry that has no valid payload, keeps more messages than there are, or does not
    arrive at the version that its envelope names.
    """
    fold = Fold(thread_id, version)
    for stored in entries:
        payload = decoded(stored)
        if stored is entries[0] and (stored.entry.base is Base.NONE or not stored.entry.prev_id):
            fold.begin_at(payload.keep)
        try:
            fold.add(payload, stored.seq, self_contained=stored.entry.self_contained)
        except ValueError as e:
            raise Inapplicable(stored.entry.id, str(e)) from e
    return fold.change()


class Fold:
    """Payloads folded into one change, on a thread of `version` messages."""

    def __init__(self, thread_id: str, version: int) -> None:
        self._thread_id = thread_id
        self._seq = 0
        self._deleted = False
        self.begin_at(version)
        self._begin()

    def begin_at(self, version: int) -> None:
        """Set the thread's number of messages, instead of the one given before."""
        self._version = self._keep = version

    def _begin(self) -> None:
        self._messages: list[bytes] = []
        self._whole = False
        self._gone = False
        self._runs: dict[str, bytes] = {}
        self._run_seqs: dict[str, int] = {}
        self._saves: list[RunSave] = []
        self._metadata: bytes | None = None
        self._state: bytes | None = None
        self._parent: tuple[str | None] | None = None

    def add(self, payload: AnyPayload, seq: int, *, self_contained: bool) -> None:
        """Add the payload of the entry at `seq`. Raises ValueError if it keeps more messages than there are."""
        self._seq = seq
        if isinstance(payload, Removal):
            self._begin()
            self._keep, self._deleted, self._gone = 0, True, True
            return
        if payload.keep > self._keep + len(self._messages):
            raise ValueError(f"keeps {payload.keep} of {self._keep + len(self._messages)} messages")
        self._gone = False
        if payload.keep >= self._keep:
            del self._messages[payload.keep - self._keep :]
            self._messages += payload.messages
        else:
            self._keep = payload.keep
            self._messages = list(payload.messages)
        if isinstance(payload, Payload):
            self._whole = self._whole or (self_contained and payload.keep == 0)
            self._add_run(payload.save.run_id, payload.run)
            self._saves.append(payload.save)
            if self._parent == (None,):  # the parent was taken off, so the next run that names one decides again
                self._parent = (payload.save.parent_thread_id,)
            return
        if payload.run is not None and payload.run_id is not None:
            self._add_run(payload.run_id, payload.run)
        self._metadata = payload.metadata if payload.metadata is not None else self._metadata
        self._state = payload.state if payload.state is not None else self._state
        self._parent = payload.parent if payload.parent is not None else self._parent

    def _add_run(self, run_id: str, run: bytes) -> None:
        self._runs.pop(run_id, None)  # the order of the last save, not of the first
        self._runs[run_id] = run
        self._run_seqs.setdefault(run_id, self._seq)

    def change(self) -> ThreadChange:
        return ThreadChange(
            thread_id=self._thread_id,
            keep=self._keep,
            messages=self._messages,
            whole=(whole := self._whole and self._keep == 0),
            appends=self._keep == self._version and not whole and not self._deleted,
            runs=self._runs,
            saves=self._saves,
            thread_seq=self._seq,
            run_seqs=self._run_seqs,
            metadata=self._metadata,
            state=self._state,
            parent=self._parent,
            deleted=self._deleted,
            gone=self._gone,
        )


def decoded(stored: StoredEntry) -> AnyPayload:
    """The entry's payload. Raises Inapplicable."""
    entry = stored.entry
    try:
        payload = decode_payload(entry.payload)
    except ValueError as e:
        raise Inapplicable(entry.id, str(e)) from e
    if payload.keep + len(payload.messages) != entry.version:
        raise Inapplicable(entry.id, "its messages do not add up to its version")
    return payload
