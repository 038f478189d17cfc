"""The records of the ThreadRunStore domain, and the one description of a change: `ThreadChange`.

A *checkpoint* saves the messages and one run of a thread together. A thread's *version* is its number of messages.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import msgspec

from bufstore.errors import InvalidRecord
from bufstore.types import Message, check_id

R = TypeVar("R", bound=msgspec.Struct)


class RunStatus(enum.StrEnum):
    """Where a run stands."""

    CREATED = "created"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One activation of an agent on a thread.

    Times are Unix seconds, as floats; the store sets none of them. An int, which a type checker accepts as a float,
    would come back as a float: it is refused, like every value that would not come back as given.
    """

    run_id: str
    thread_id: str
    agent_id: str = ""
    status: RunStatus = RunStatus.RUNNING
    parent_run_id: str | None = None
    #: The thread this thread descends from; the first run that names one decides (a parent is sticky).
    parent_thread_id: str | None = None
    termination_reason: str | None = None
    input: Any = None
    output: Any = None
    error: Any = None
    #: What the run waits for, while it is WAITING.
    waiting: Any = None
    created_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    updated_at: float | None = None
    steps: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    #: Whatever else the runtime keeps with a run.
    extensions: dict[str, Any] = {}

    def check(self, thread_id: str) -> None:
        """Raise InvalidId or InvalidRecord unless this run can be saved with `thread_id`."""
        check_id(self.run_id, "run_id")
        if self.thread_id != thread_id:
            raise InvalidRecord(f"run {self.run_id!r} belongs to thread {self.thread_id!r}, not {thread_id!r}")
        if self.parent_run_id is not None:
            check_id(self.parent_run_id, "parent_run_id")
        if self.parent_thread_id is not None:
            check_id(self.parent_thread_id, "parent_thread_id")
        if not isinstance(self.status, RunStatus):
            raise InvalidRecord(f"run {self.run_id!r}: status must be a RunStatus, not {self.status!r}")
        if self.agent_id != "":
            self._check_text("agent_id", self.agent_id)
        if self.termination_reason is not None:
            self._check_text("termination_reason", self.termination_reason)

    def _check_text(self, name: str, text: object) -> None:
        if not isinstance(text, str) or "\0" in text or not _is_unicode(text):
            raise InvalidRecord(f"run {self.run_id!r}: {name} must be a str without NUL and lone surrogates")


def check_run(run: object, thread_id: str | None = None) -> None:
    """Raise InvalidId or InvalidRecord unless `run` is a Run that can be saved with the thread (None: the run's)."""
    if not isinstance(run, Run):
        raise InvalidRecord(f"run must be a Run, not {type(run).__name__}")
    run.check(check_id(run.thread_id, "thread_id") if thread_id is None else thread_id)


def check_version(expected: object) -> None:
    """Raise InvalidRecord unless `expected` is an int, or None for any version."""
    if expected is not None and type(expected) is not int:
        raise InvalidRecord(f"expected_version must be an int, not {expected!r}")


class ThreadMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an app keeps with a thread, to find and show it."""

    title: str | None = None
    #: The owner of the thread: `ThreadQuery` finds threads by it.
    resource_id: str | None = None
    custom: dict[str, Any] = {}


NO_METADATA = ThreadMetadata()


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """A thread as the store knows it, without its messages and its state."""

    thread_id: str
    #: Number of messages.
    version: int = 0
    parent_thread_id: str | None = None
    #: The run of the newest checkpoint.
    latest_run_id: str | None = None
    #: The run that is RUNNING, if one is.
    active_run_id: str | None = None
    #: The run that is not DONE yet, if one is.
    open_run_id: str | None = None
    metadata: ThreadMetadata = ThreadMetadata()

    def with_run(self, run: Run) -> Thread:
        """This thread after a checkpoint with `run` (the projection that a checkpoint makes)."""
        active: str | None
        opened: str | None
        if run.status is RunStatus.RUNNING:
            active, opened = run.run_id, run.run_id
        elif run.status is RunStatus.DONE:
            active = None if self.active_run_id == run.run_id else self.active_run_id
            opened = None if self.open_run_id == run.run_id else self.open_run_id
        else:
            active, opened = None, run.run_id
        return msgspec.structs.replace(
            self,
            latest_run_id=run.run_id,
            active_run_id=active,
            open_run_id=opened,
            parent_thread_id=self.parent_thread_id or run.parent_thread_id,
        )


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent view of one thread."""

    thread: Thread
    messages: list[Message]
    latest_run: Run | None
    #: What `save_thread_state` saved last.
    state: Any = None
    #: True while Postgres is away and the log does not have the whole thread: messages and latest run are all there;
    #: parent, metadata, open run and state are only what the log tells of them.
    partial: bool = False

    @property
    def version(self) -> int:
        """Number of messages; pass it to ``checkpoint_append`` as ``expected_version``."""
        return len(self.messages)


class ThreadChange(msgspec.Struct, frozen=True, kw_only=True):
    """What one flush changes in one thread: many entries, folded into one.

    The thread's first `keep` messages stay, everything after them is replaced by `messages`, so that afterwards
    it has ``keep + len(messages)``; `runs` are upserted. Messages and runs come encoded, as msgpack, because
    a store that keeps them as bytes need not look inside; `decode_message` and `decode_run` give the values.
    """

    thread_id: str
    keep: int
    messages: Sequence[bytes]
    #: True when the writer gave the whole list without knowing the thread: `keep` is 0 and many of the
    #: messages may be there already. Writing only those that differ gives the same result.
    whole: bool
    #: True when `messages` follow everything that the thread has: as far as the buffer knows, all of them are new.
    appends: bool = False
    #: The newest record of every run that was saved, encoded, in the order of their last save.
    runs: Mapping[str, bytes]
    #: Every (run, status, parent) saved, oldest first, to be folded over the thread's row: see `Thread.with_run`.
    saves: Sequence[RunSave]
    #: The position in the log of the last entry folded in; a change with a larger one was written later.
    thread_seq: int = 0
    #: For each run of `runs`, the position of the first entry folded in that saved it.
    run_seqs: Mapping[str, int] = {}
    #: The thread's metadata, encoded (`decode_metadata`), and its state (`decode_message`); None: unchanged.
    metadata: bytes | None = None
    state: bytes | None = None
    #: The parent that was set on its own (or no parent), in a tuple; None: `saves` decide.
    parent: tuple[str | None] | None = None
    #: True when the thread was deleted: first remove its earlier content, runs, metadata and state included.
    deleted: bool = False
    #: True when nothing came after the deletion: the thread does not exist any more.
    gone: bool = False

    @property
    def version(self) -> int:
        """Number of messages after the change."""
        return self.keep + len(self.messages)

    def project(self, thread: Thread) -> Thread:
        """Return `thread`, as it was before this change, with the change made; not for a change that is `gone`."""
        if self.deleted:
            thread = Thread(thread_id=self.thread_id)
        for save, _ in groupby(self.saves):  # the same save once more changes nothing
            run = Run(
                run_id=save.run_id,
                thread_id=self.thread_id,
                status=save.status,
                parent_thread_id=save.parent_thread_id,
            )
            thread = thread.with_run(run)
        return msgspec.structs.replace(
            thread,
            version=self.version,
            parent_thread_id=thread.parent_thread_id if self.parent is None else self.parent[0],
            metadata=thread.metadata if self.metadata is None else decode_metadata(self.metadata),
        )


class RunSave(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a saved run that the thread's row depends on."""

    run_id: str
    status: RunStatus
    parent_thread_id: str | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_decode_run = msgspec.msgpack.Decoder(Run).decode
_decode_metadata = msgspec.msgpack.Decoder(ThreadMetadata).decode


def free_fields(record: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields whose value may come back changed without decoding noticing: all that have no plain type."""
    return tuple(f.name for f in msgspec.structs.fields(record) if not _is_plain(msgspec.inspect.type_info(f.type)))


def _is_plain(info: msgspec.inspect.Type) -> bool:
    if isinstance(info, msgspec.inspect.UnionType):
        return all(_is_plain(choice) for choice in info.types)
    return isinstance(info, _PLAIN_TYPES)


_PLAIN_TYPES = (
    msgspec.inspect.StrType,
    msgspec.inspect.IntType,
    msgspec.inspect.FloatType,
    msgspec.inspect.BoolType,
    msgspec.inspect.NoneType,
    msgspec.inspect.EnumType,
)


def free_checker(record: type[R], called: Callable[[R], str]) -> Callable[[R], object]:
    """Make the function that raises InvalidRecord unless the free fields of a record come back as they are.

    `called` names the record in the error. The function is made from source, as the methods of dataclasses are: most
    records have nothing in these fields, and a loop to find that out takes a third of the time of encoding a run.
    """
    checks = (
        f"r.{n} is not None and (type(r.{n}) is not dict or r.{n}) and check(r.{n}, called(r) + ': {n}')"
        for n in free_fields(record)
    )
    return eval(f"lambda r: {' or '.join(checks)}", {"check": check_value, "called": called})  # type: ignore[no-any-return]  # noqa: S307


def encode_run(run: Run) -> bytes:
    """The run as msgpack. Raises InvalidRecord when a value in it would not come back exactly."""
    _check_run(run)
    try:
        encoded = _encode(run)
        # Nothing enforces the declared types of a run's fields, and what cannot be read again must not be
        # acknowledged.
        same = _encode(_decode_run(encoded)) == encoded
    except _NOT_ENCODABLE as e:
        raise InvalidRecord(f"run {run.run_id!r}: {_why(e)}") from None
    if not same:
        raise InvalidRecord(
            f"run {run.run_id!r}: {_changed_field(run, encoded)}: use the fields and types that Run declares"
        )
    return encoded


def _changed_field(run: Run, encoded: bytes) -> str:
    """Say which field would not come back as it was, and what it would be."""
    back = _decode_run(encoded)
    for name in run.__struct_fields__:
        value, other = getattr(run, name), getattr(back, name, None)
        if _encode(value) != _encode(other):
            return f"{name} is {value!r} and would come back as {other!r}"
    return "a field would come back changed"


def decode_run(data: bytes) -> Run:
    """The run that `encode_run` encoded."""
    return _decode_run(data)


def encode_metadata(metadata: ThreadMetadata) -> bytes:
    """The metadata as msgpack. Raises InvalidId or InvalidRecord when they would not come back exactly."""
    if not isinstance(metadata, ThreadMetadata):
        raise InvalidRecord(f"metadata must be a ThreadMetadata, not {type(metadata).__name__}")
    if metadata.resource_id is not None:
        check_id(metadata.resource_id, "resource_id")
    if metadata.title is not None and type(metadata.title) is not str:
        raise InvalidRecord(f"metadata: title must be a str, not {type(metadata.title).__name__}")
    _check_metadata(metadata)
    try:
        encoded = _encode(metadata)
        same = _encode(_decode_metadata(encoded)) == encoded
    except _NOT_ENCODABLE as e:
        raise InvalidRecord(f"metadata: {_why(e)}") from None
    if not same:
        raise InvalidRecord("metadata: custom must be a dict with str keys")
    return encoded


def decode_metadata(data: bytes) -> ThreadMetadata:
    """The metadata that `encode_metadata` encoded."""
    return _decode_metadata(data)


def encode_value(value: Any, where: str) -> bytes:
    """A caller's value as msgpack (`decode_message` gives it back). Raises InvalidRecord like `encode_messages`."""
    check_value(value, where)
    try:
        return _encode(value)
    except _NOT_ENCODABLE as e:
        raise InvalidRecord(f"{where}: {_why(e)}") from None


def encode_messages(messages: Sequence[Message]) -> list[bytes]:
    """Each message as msgpack. Raises InvalidRecord, naming the index, when a message would not come back exactly."""
    if type(messages) is not list and (
        isinstance(messages, (str, bytes, bytearray, memoryview)) or not isinstance(messages, Sequence)
    ):
        raise InvalidRecord(f"messages must be a list, not {type(messages).__name__}")
    encoded = []
    encode = _encode
    for i, message in enumerate(messages):
        check_value(message, i)
        try:
            encoded.append(encode(message))
        except _NOT_ENCODABLE as e:
            raise InvalidRecord(f"messages[{i}]: {_why(e)}") from None
    return encoded


def decode_message(data: bytes) -> Message:
    """The message that `encode_messages` encoded."""
    return _decode(data)


def id_of(message: Message) -> str | None:
    """The message's ``id``; None when it is not a dict or has no ``id`` that is a str."""
    found = message.get("id") if type(message) is dict else None
    return found if type(found) is str else None


class _WithId(msgspec.Struct, gc=False):
    id: Any = None


_with_id = msgspec.msgpack.Decoder(_WithId).decode
#: The bytes that a dict can begin with in msgpack.
_DICTS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))


def encoded_id(data: bytes) -> str | None:
    """`id_of` an encoded message, without decoding most of it."""
    if data and data[0] not in _DICTS:
        return id_of(_decode(data))  # not a dict, so it has no id; decode it once, not twice
    try:
        found = _with_id(data).id
    except msgspec.ValidationError:  # not all keys are str
        return id_of(_decode(data))
    return found if type(found) is str else None


def encoded_ids(encoded: Iterable[bytes]) -> list[str]:
    """The ids of those encoded messages that have one."""
    return [found for found in map(encoded_id, encoded) if found is not None]


#: Deepest nesting of lists and dicts in a message: decoding must not depend on how deep the caller's stack is.
MAX_DEPTH = 100
_PLAIN = frozenset((str, int, float, bool, type(None), bytes))
# The encoder raises more than MsgspecError: for lone surrogates, integers past 64 bits, foreign types.
_NOT_ENCODABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError, UnicodeError)


def check_value(value: Any, where: str | int, depth: int = 0) -> None:
    """Raise InvalidRecord unless `value` is built only of types that msgpack gives back as they were.

    A tuple would come back as a list, a UUID as a str, a dataclass as a dict: such values are refused rather
    than silently changed.
    """
    kind = type(value)
    if kind in _PLAIN:
        return
    if depth >= MAX_DEPTH:
        raise InvalidRecord(f"{_place(where)}: nested deeper than {MAX_DEPTH}")
    if kind is dict:
        for key, item in value.items():
            if type(key) not in _PLAIN:
                raise InvalidRecord(f"{_place(where)}: a key of type {_named(type(key))} would not come back")
            if type(item) not in _PLAIN:
                check_value(item, where, depth + 1)
    elif kind is list:
        for item in value:
            if type(item) not in _PLAIN:
                check_value(item, where, depth + 1)
    else:
        raise InvalidRecord(
            f"{_place(where)}: a value of type {_named(kind)} would not come back as it is; "
            "use None, bool, int, float, str, bytes, list and dict"
        )


_check_run = free_checker(Run, lambda run: f"run {run.run_id!r}")
_check_metadata = free_checker(ThreadMetadata, lambda _: "metadata")


def _place(where: str | int) -> str:
    return f"messages[{where}]" if isinstance(where, int) else where


def _named(kind: type) -> str:
    """The type's name, with its module unless it is a builtin: numpy has a bool, too."""
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _why(error: BaseException) -> str:
    if isinstance(error, UnicodeError):
        return "a str with a lone surrogate cannot be stored"
    if isinstance(error, OverflowError):
        return "an integer of more than 64 bits cannot be stored"
    return str(error)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
