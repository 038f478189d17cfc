"""Which entry a call becomes: pure functions of the call and the thread's tip."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import msgspec

from bufstore.buffer.append.tip import Draft, NeedBase, NeedVersion, Prepare, Tip
from bufstore.errors import AlreadyExists, Rejected, ThreadQuarantined, TooLarge, VersionConflict
from bufstore.threads.digests import MessageMemory, digests_of, ids_of, ids_of_encoded
from bufstore.threads.model import Run, RunSave, check_run, check_version, encode_messages, encode_run
from bufstore.threads.payload import Edit, Payload, Removal, encode_payload
from bufstore.types import Message, ProducerSequence, check_id, check_producer


# Many calls are on their way to the log at a time. A struct that the collector skips is cheaper than a closure.
class Call(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One call of `checkpoint` or `checkpoint_append`, encoded once, and drafted again after each conflict."""

    thread_id: str
    encoded: Sequence[bytes]
    digests: array[int]
    ids: array[int]
    run: bytes
    save: RunSave
    #: The version that the thread must have for `appending`; None: any.
    expected_version: int | None = None

    def check_new_ids(self) -> None:
        """Raise AlreadyExists when two of the new messages have the same id."""
        present = [i for i in self.ids if i]
        if len(set(present)) < len(present):
            raise AlreadyExists(f"thread {self.thread_id!r}: two of the new messages have the same id")

    def _draft(self, keep: int, skip: int, memory: MessageMemory | None, self_contained: bool) -> Draft[MessageMemory]:
        """Draft an entry that keeps `keep` messages of the thread and adds this call's from index `skip` on."""
        encoded, digests, ids = self.encoded, self.digests, self.ids
        if skip:
            encoded, digests, ids = encoded[skip:], digests[skip:], ids[skip:]
        undo = _nothing if memory is None else Undo(memory, keep, *memory.replace(keep, digests, ids))
        payload = encode_payload(Payload(keep, encoded, self.run, self.save))
        return Draft(payload, self_contained, keep + len(digests), memory, undo)

    def whole_list(self, tip: Tip[MessageMemory]) -> Draft[MessageMemory]:
        """Draft the whole list: a delta if the predecessor's content is known and begins alike, else a snapshot."""
        if tip.memory is None or tip.broken_since:
            return self._draft(0, 0, MessageMemory(), True)
        keep = tip.memory.common(self.digests)
        return self._draft(keep, keep, tip.memory, keep == 0)

    def appending(self, tip: Tip[MessageMemory]) -> Draft[MessageMemory]:
        """Draft a delta behind whatever the thread holds, or behind exactly `expected_version` messages.

        Messages without ids can be appended without knowing the thread's content.
        """
        memory, version, expected = tip.memory, tip.version, self.expected_version
        if tip.broken_since:
            raise ThreadQuarantined(self.thread_id, tip.broken_since)
        if memory is None and any(self.ids):
            raise NeedBase
        if memory is None and not tip.judged:
            raise NeedVersion
        if expected is not None and expected != version:
            raise VersionConflict(self.thread_id, expected=expected, actual=version)
        for i, id_ in enumerate(self.ids):
            if id_ and memory is not None and memory.has_id(id_):
                raise AlreadyExists(f"thread {self.thread_id!r} already has a message with the id of new message {i}")
        return self._draft(version, 0, memory, False)


class Undo(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Gives a memory back what a draft took from it."""

    memory: MessageMemory
    keep: int
    digests: array[int]
    ids: array[int]

    def __call__(self) -> None:
        self.memory.replace(self.keep, self.digests, self.ids)


def call_of(
    thread_id: str,
    messages: Sequence[Message],
    run: Run,
    key: str | None = None,
    producer: ProducerSequence | None = None,
    expected_version: int | None = None,
) -> Call:
    """Check and encode everything before any I/O; afterwards the caller may change its objects.

    Raises InvalidId, InvalidRecord, ConfigError.
    """
    check_id(thread_id, "thread_id")
    check_run(run, thread_id)
    if key is not None:
        check_id(key, "idempotency_key")
    if producer is not None:
        check_producer(producer, key)
    check_version(expected_version)
    return _call(thread_id, messages, encode_run(run), save_of(run), expected_version)


def call_after(before: Call, messages: Sequence[Message], producer: ProducerSequence | None) -> Call:
    """Do the same for another call with the thread and the run of `before`, which are not checked again."""
    if producer is not None:
        check_producer(producer)
    return _call(before.thread_id, messages, before.run, before.save)


def _call(
    thread_id: str, messages: Sequence[Message], run: bytes, save: RunSave, expected_version: int | None = None
) -> Call:
    encoded = encode_messages(messages)
    return Call(thread_id, encoded, digests_of(encoded), ids_of(messages), run, save, expected_version)


class Acceptable(Rejected):
    """The write would be stored: it repeats no other, and nothing stands against it.

    Like what would be refused, it is told by what the log shows now: others may have written since this process looked.
    """


def judging(prepare: Prepare[MessageMemory], bytes_max: int) -> Prepare[MessageMemory]:
    """Make the draft function of a write that ends as the one of `prepare` would, but raises Acceptable at last.

    `bytes_max`: the most bytes that an entry's payload may have.
    """

    def draft(tip: Tip[MessageMemory]) -> Draft[MessageMemory]:
        drafted = prepare(tip)
        drafted.undo()
        if len(drafted.payload) > bytes_max:
            raise TooLarge(len(drafted.payload), bytes_max)
        raise Acceptable("nothing stands against the write")

    return draft


class Moved(Exception):
    """The thread is not what the edit was decided on: decide again."""

    def __init__(self, tip_seq: int) -> None:
        super().__init__()
        #: The position of the thread's last entry, as the writer knows it.
        self.tip_seq = tip_seq


def editing(
    payload: Edit | Removal, thread_id: str, decided_on: int, *, new: bool = False
) -> Callable[[Tip[MessageMemory]], Draft[MessageMemory]]:
    """Make the draft function of an entry that may only stand directly behind the entry `decided_on` (an id; 0: none).

    A removal needs no base: it also ends a broken chain. Nor does an edit that makes the thread (`new`: there was none
    when it was decided), if the log shows nothing before it: so the log alone can tell the thread in an outage.
    """
    gone = isinstance(payload, Removal)

    def draft(tip: Tip[MessageMemory]) -> Draft[MessageMemory]:
        if tip.broken_since and not gone:
            raise ThreadQuarantined(thread_id, tip.broken_since)
        if tip.id != decided_on or (not tip.seq and tip.memory is None):
            if tip.memory is None:
                raise NeedBase
            raise Moved(tip.seq)
        undo: Callable[[], object] = _nothing
        digests, ids = digests_of(payload.messages), ids_of_encoded(payload.messages)
        if tip.memory is not None:
            undo = Undo(tip.memory, payload.keep, *tip.memory.replace(payload.keep, digests, ids))
        return Draft(
            payload=encode_payload(payload),
            self_contained=gone or (new and not tip.seq),
            version=payload.keep + len(payload.messages),
            memory=tip.memory,
            undo=undo,
        )

    return draft


def _nothing() -> None:
    pass


def save_of(run: Run) -> RunSave:
    """The part of a run that the thread's row depends on."""
    return RunSave(run.run_id, run.status, run.parent_thread_id)
