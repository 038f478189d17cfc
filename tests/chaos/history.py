"""What happened in a chaos run: one JSON line per event, each process its own file, and the whole read back.

A line is written with one system call before (`Begin`) and after (`End`) what it tells of, so a SIGKILL loses none.
Times are of the monotonic clock, which all processes of a machine share. The workload is made to be checked: each name
is written once in the whole run, a message is a name, and a thread's messages show the order in which writes took
effect.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

#: The first word of a thread's id says what is done with it.
SHARED, OWN, WHOLE, EDITED, FORKED, COPIED = "shared", "own", "whole", "edited", "forked", "copied"


class _Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all lines."""


class Started(_Event, tag="started"):
    """A process is ready."""

    t: float
    process: str
    pid: int
    #: The names of its flushers, one for each lane, as Postgres knows them; empty without a flusher.
    members: tuple[str, ...]


class Begin(_Event, tag="begin"):
    """A write begins: `names` are the new ones that it adds (or those that it removes)."""

    t: float
    process: str
    op: int
    thread: str
    #: append, whole, retry; add, remove, drop, erase, saw, prune, runs in threads that are edited; copy in one that is
    #: one.
    kind: str
    names: tuple[str, ...]


class End(_Event, tag="end"):
    """A write has ended: ok, rejected (not stored) or unknown."""

    t: float
    process: str
    op: int
    outcome: str
    seq: int = 0
    #: An earlier try of the same may have taken effect, too.
    tried: bool = False


class Read(_Event, tag="read"):
    """A read and what it showed; `names` None: no such thread."""

    process: str
    thread: str
    level: str
    at_least: int
    began: float
    ended: float
    names: tuple[str, ...] | None


class Saving(_Event, tag="saving"):
    """What a write saves of a graph, told before it begins: a checkpoint, or what a task has written on top of one.

    Also which checkpoint a prune leaves, which thread is copied (`id`), and which run is deleted (`run`): that has no
    channels.
    """

    process: str
    op: int
    ns: str
    id: str
    #: Of a checkpoint.
    parent: str | None = None
    content: str = ""
    #: The one that a checkpoint is of, or of which all checkpoints are deleted.
    run: str = ""
    #: Of a task's writes; they have one name, on all of these channels.
    task: str = ""
    channels: tuple[str, ...] = ()


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint as it is read."""

    parent: str | None
    content: str
    #: What tasks have written: task, channel, name.
    writes: tuple[tuple[str, str, str], ...]


class Shown(_Event, tag="shown"):
    """A read of a checkpoint: of the newest of its namespace, or of the one that was asked for."""

    process: str
    thread: str
    level: str
    began: float
    ended: float
    ns: str
    asked: str | None
    #: None: there is none.
    id: str | None = None
    saved: Saved | None = None


class Listed(_Event, tag="listed"):
    """A list of a thread's checkpoints: namespaces and ids."""

    process: str
    thread: str
    began: float
    ended: float
    keys: tuple[tuple[str, str], ...]


class Remains(_Event, tag="remains"):
    """An entry of an erased thread that the log still has at the end."""

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
    """A fault is about to begin ("begin"), has begun ("inject"), or is over ("heal")."""

    t: float
    kind: str
    what: str
    detail: str = ""


class Poison(_Event, tag="poison"):
    """Something was published that is no entry."""

    t: float
    thread: str | None
    seq: int
    body: bytes


class Sample(_Event, tag="sample"):
    """Seen from outside, in this order: what is settled, the cursors and watermarks, the log's end."""

    t: float
    #: Per partition, below which position nothing is needed any more.
    settled: dict[int, int]
    #: Per partition, term and position.
    cursors: dict[int, tuple[int, int]]
    watermarks: dict[str, int]
    end: int
    log_bytes: int
    #: Memory of the processes.
    rss: dict[str, int]
    #: Whose log it is; partitions are numbered on over the lanes.
    lane: int = 0


class Recovery(_Event, tag="recovery"):
    """How long after the heal of a phase things went on; None: not within the time that was waited."""

    t: float
    kinds: tuple[str, ...]
    #: Until every partition with a backlog had moved.
    flushing_s: float | None
    #: Until everything that was in the log at the heal was flushed.
    caught_up_s: float | None


Event = Started | Begin | End | Read | Saving | Shown | Listed | Remains | Failed | Fault | Poison | Sample | Recovery

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class Recorder:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def write(self, event: Event) -> None:
        """Append; what is returned from is not lost with the process."""
        os.write(self._file, _encoder.encode(event) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def load(paths: Iterable[Path]) -> History:
    """The history that these files tell."""

    def events() -> Iterable[Event]:
        for path in paths:
            with path.open("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):  # else cut off by a SIGKILL
                        yield _decoder.decode(line)

    return History.of(events())


@dataclass
class Op:
    """A write, from its beginning to its end, if it had one."""

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
    #: Of a graph's thread.
    saving: Saving | None = None

    @property
    def ok(self) -> bool:
        """Whether it was acknowledged."""
        return self.outcome == "ok"


@dataclass
class ThreadHistory:
    """What was done with a thread, and what was seen of it."""

    ops: list[Op] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    listed: list[Listed] = field(default_factory=list)


@dataclass
class History:
    """A whole run."""

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
        """The history of these events; those of one process in their order."""
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
        """How many writes were acknowledged; a read in between and a retry of an old one are none."""
        return sum(o.ok and o.kind not in ("saw", "retry") for t in self.threads.values() for o in t.ops)


class ParkedEntry(msgspec.Struct, frozen=True):
    """An entry in quarantine at the end."""

    thread: str | None
    body: bytes


@dataclass
class Final:
    """What Postgres holds when everything is flushed."""

    messages: dict[str, list[str]]
    quarantined: dict[int, ParkedEntry] = field(default_factory=dict)
    #: Of graphs: by thread, namespace and id.
    checkpoints: dict[tuple[str, str, str], Saved] = field(default_factory=dict)
