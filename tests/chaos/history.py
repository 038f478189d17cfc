"""The events of a chaos run: one JSON line per event, a file per process, and the code that reads them all back.

A line is written with one system call before (`Begin`) and after (`End`) the event, so a SIGKILL loses none. Times come
from the monotonic clock, which all processes of a machine share. The workload is made to be checked: each name is
written once in the whole run, a message is a name, and a thread's messages show the order in which writes took effect.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

#: The first word of a thread's id says how it is used.
SHARED, OWN, WHOLE, EDITED, FORKED, COPIED = "shared", "own", "whole", "edited", "forked", "copied"
#: The first position of the second lane, in the numbers of poison and quarantine, which go across all lanes.
LANE = 1 << 52


class _Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all events."""


class Started(_Event, tag="started"):
    """A process is ready."""

    t: float
    process: str
    pid: int
    #: The names of its flushers in Postgres, one for each lane; empty without a flusher.
    members: tuple[str, ...]


class Begin(_Event, tag="begin"):
    """A write begins. `names`: the new names that it adds, or those that it removes."""

    t: float
    process: str
    op: int
    thread: str
    #: append, whole, retry; in edited threads add, remove, drop, erase, saw, prune, runs; in copies copy.
    kind: str
    names: tuple[str, ...]


class End(_Event, tag="end"):
    """A write has ended: ok, rejected (not stored) or unknown."""

    t: float
    process: str
    op: int
    outcome: str
    seq: int = 0
    #: True when an earlier try of the same write may have taken effect too.
    tried: bool = False


class Read(_Event, tag="read"):
    """A read and its result; `names` is None when the thread does not exist."""

    process: str
    thread: str
    level: str
    at_least: int
    began: float
    ended: float
    names: tuple[str, ...] | None


class Saving(_Event, tag="saving"):
    """What a write saves of a graph, recorded before it begins: a checkpoint, or a task's writes on one.

    Also the checkpoint that a prune keeps, the thread that is copied (`id`), or the run that is deleted (`run`); these
    have no channels.
    """

    process: str
    op: int
    ns: str
    id: str
    #: For a checkpoint: its parent and a digest of its contents.
    parent: str | None = None
    content: str = ""
    #: The run of a checkpoint, or the run whose checkpoints are deleted.
    run: str = ""
    #: For a task's writes: the task, and the channels, which all get the same name.
    task: str = ""
    channels: tuple[str, ...] = ()


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint as it is read."""

    parent: str | None
    content: str
    #: Tasks' writes: task, channel, name.
    writes: tuple[tuple[str, str, str], ...]


class Shown(_Event, tag="shown"):
    """A read of a namespace's newest checkpoint, or of the requested one."""

    process: str
    thread: str
    level: str
    began: float
    ended: float
    ns: str
    asked: str | None
    #: None when there is no checkpoint.
    id: str | None = None
    saved: Saved | None = None


class Listed(_Event, tag="listed"):
    """A list of a thread's checkpoints, as namespaces and ids."""

    process: str
    thread: str
    began: float
    ended: float
    keys: tuple[tuple[str, str], ...]


class Remains(_Event, tag="remains"):
    """An entry of an erased thread that is still in the log at the end."""

    thread: str
    seq: int


class Failed(_Event, tag="failed"):
    """A call that raised."""

    process: str
    call: str
    began: float
    ended: float
    error: str
    text: str


class Fault(_Event, tag="fault"):
    """A fault is about to begin ("begin"), is in effect ("inject"), or is over ("heal")."""

    t: float
    kind: str
    what: str
    detail: str = ""


class Poison(_Event, tag="poison"):
    """Poison was published."""

    t: float
    thread: str | None
    #: Its position across all lanes; what writers record is the position in their thread's lane.
    seq: int
    body: bytes


class Sample(_Event, tag="sample"):
    """An outside view, taken in this order: settled floors, cursors and watermarks, the log's end."""

    t: float
    #: By partition, the position below which no entry is needed.
    settled: dict[int, int]
    #: By partition, term and position.
    cursors: dict[int, tuple[int, int]]
    watermarks: dict[str, int]
    end: int
    log_bytes: int
    #: Resident memory in bytes, by process.
    rss: dict[str, int]
    #: The lane of the log; partitions are numbered across all lanes.
    lane: int = 0


class Recovery(_Event, tag="recovery"):
    """How many seconds after a phase's heal the system recovered; None: not within the time waited."""

    t: float
    kinds: tuple[str, ...]
    #: Until every partition with a backlog had moved.
    flushing_s: float | None
    #: Until all entries in the log at the heal were flushed.
    caught_up_s: float | None


Event = Started | Begin | End | Read | Saving | Shown | Listed | Remains | Failed | Fault | Poison | Sample | Recovery

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class Recorder:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def write(self, event: Event) -> None:
        """Append an event; it survives a kill once this returns."""
        os.write(self._file, _encoder.encode(event) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def load(paths: Iterable[Path]) -> History:
    """Return the history in these files."""

    def events() -> Iterable[Event]:
        for path in paths:
            with path.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):  # else cut off by a SIGKILL
                        yield _decoder.decode(line)

    return History.of(events())


@dataclass
class Op:
    """A write, from its beginning to its end, if it has one."""

    process: str
    thread: str
    kind: str
    names: tuple[str, ...]
    began: float
    number: int = 0
    ended: float = math.inf
    outcome: str = "unknown"
    seq: int = 0
    tried: bool = False
    #: For a write of a graph's thread.
    saving: Saving | None = None

    @property
    def ok(self) -> bool:
        """True when the write was acknowledged."""
        return self.outcome == "ok"


@dataclass
class ThreadHistory:
    """The writes and reads of a thread."""

    ops: list[Op] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    listed: list[Listed] = field(default_factory=list)


@dataclass
class History:
    """The events of a whole run."""

    threads: dict[str, ThreadHistory] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    poisons: list[Poison] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    remains: list[Remains] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> History:
        """Return the history of these events, which are in order for each process."""
        self = cls()
        open_: dict[tuple[str, int], Op] = {}
        saving: dict[tuple[str, int], Saving] = {}
        plain: dict[type, list[Any]] = {
            Sample: self.samples,
            Poison: self.poisons,
            Fault: self.faults,
            Failed: self.failures,
            Recovery: self.recoveries,
            Started: self.started,
            Remains: self.remains,
        }
        for event in events:
            if isinstance(event, Begin):
                op = Op(event.process, event.thread, event.kind, event.names, event.t, event.op)
                op.saving = saving.pop((event.process, event.op), None)
                open_[event.process, event.op] = op
                self.threads.setdefault(event.thread, ThreadHistory()).ops.append(op)
            elif isinstance(event, End):
                op = open_.pop((event.process, event.op))
                op.ended, op.outcome, op.seq, op.tried = event.t, event.outcome, event.seq, event.tried
            elif isinstance(event, Read):
                self.threads.setdefault(event.thread, ThreadHistory()).reads.append(event)
            elif isinstance(event, Saving):
                saving[event.process, event.op] = event
            elif isinstance(event, Shown):
                self.threads.setdefault(event.thread, ThreadHistory()).shown.append(event)
            elif isinstance(event, Listed):
                self.threads.setdefault(event.thread, ThreadHistory()).listed.append(event)
            else:
                plain[type(event)].append(event)
        for thread in self.threads.values():
            thread.ops.sort(key=lambda o: o.began)
            thread.reads.sort(key=lambda r: r.began)
        return self

    @property
    def acknowledged(self) -> int:
        """How many new writes were acknowledged, without the reads ("saw") and retries recorded as writes."""
        return sum(o.ok and o.kind not in ("saw", "retry") for t in self.threads.values() for o in t.ops)


class ParkedEntry(msgspec.Struct, frozen=True):
    """An entry that is in quarantine at the end."""

    thread: str | None
    body: bytes


@dataclass
class Final:
    """The contents of Postgres once everything is flushed."""

    messages: dict[str, list[str]]
    #: By position across all lanes.
    quarantined: dict[int, ParkedEntry] = field(default_factory=dict)
    #: For graphs: by thread, namespace and id.
    checkpoints: dict[tuple[str, str, str], Saved] = field(default_factory=dict)
