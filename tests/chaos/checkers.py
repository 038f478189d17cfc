"""The rules that a history and its final state must keep, each as a function that returns violations.

In a *growing* thread writers only append new messages. So its final list shows the order of all writes, every state
that a read may show is a prefix of that list, and two reads compare by length. An *edited* thread has one writer, which
waits for each outcome: `edits` follows the states that the thread can be in.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from chaos.history import EDITED, FORKED, Final, History, Op, ThreadHistory

FRESH = ("read-your-writes", "strong")
#: Errors that a call may raise in a chaos run.
DOCUMENTED = {
    "OutcomeUnknown", "LogUnavailable", "StoreUnavailable", "StoreMisconfigured", "LogFull", "ReadNotFresh",
    "FlushTimeout", "ThreadQuarantined", "Closed", "ConcurrentWriter",
}  # fmt: skip
#: Calls that may take longer, by this many seconds: an erasure waits for twice the failover window.
LONGER_S = {"erase": 30.0}


@dataclass(frozen=True)
class Violation:
    """A broken rule and its evidence."""

    rule: str
    thread: str | None
    evidence: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.thread or ''} {self.evidence}"


def _growing(history: History) -> Iterator[tuple[str, ThreadHistory]]:
    return ((t, h) for t, h in history.threads.items() if not t.startswith((EDITED, FORKED)))


def lost(history: History, final: Final) -> list[Violation]:
    """I1: every acknowledged message is in Postgres at the end."""
    found = []
    for thread, h in _growing(history):
        there = set(final.messages.get(thread, ()))
        for op in h.ops:
            gone = [n for n in op.names if n not in there] if op.ok else []
            if gone:
                found.append(Violation("lost", thread, f"{gone} acknowledged at {op.seq} by {op.process}"))
    return found


def duplicated(history: History, final: Final) -> list[Violation]:
    """I6: no message appears twice, at the end or in any read."""
    found = []
    for thread, h in _growing(history):
        shown = [("at the end", final.messages.get(thread, []))]
        shown += [(f"in a read of {r.process} at {r.began:.3f}", r.names) for r in h.reads if r.names]
        for where, names in shown:
            if len(set(names)) < len(names):
                twice = [n for n, count in Counter(names).items() if count > 1]
                found.append(Violation("duplicated", thread, f"{twice[:5]} {where}"))
    return found


def phantom(history: History, final: Final) -> list[Violation]:
    """I2: no message appears that was never tried, was rejected, or had not begun."""
    found = []
    for thread, names in final.messages.items():
        if thread not in history.threads:
            found.append(Violation("phantom", thread, f"nobody wrote to it, it has {names[:5]}"))
    for thread, h in _growing(history):
        began: dict[str, float] = {}
        for op in h.ops:
            if op.outcome != "rejected":
                for n in op.names:
                    began[n] = min(op.began, began.get(n, math.inf))
        never = [n for n in final.messages.get(thread, ()) if n not in began]
        if never:
            found.append(Violation("phantom", thread, f"{never[:5]} at the end"))
        for r in h.reads:
            early = [n for n in r.names or () if began.get(n, math.inf) > r.ended]
            if early:
                found.append(Violation("phantom", thread, f"{early[:5]} in a read of {r.process} at {r.began:.3f}"))
    return found


def reordered(history: History, final: Final) -> list[Violation]:
    """I3: messages are ordered by position, positions by time, and each writer's messages as it wrote them."""
    found = []
    for thread, h in _growing(history):
        at = {n: i for i, n in enumerate(final.messages.get(thread, ()))}
        acked = sorted((o for o in h.ops if o.ok and o.kind != "retry"), key=lambda o: o.seq)
        for a, b in pairwise(acked):
            if a.seq == b.seq:
                found.append(Violation("reordered", thread, f"{a.names} and {b.names} both at {a.seq}"))
            elif _last(a, at) > _first(b, at):
                found.append(Violation("reordered", thread, f"{a.names} at {a.seq} stands behind {b.names} at {b.seq}"))
        newest = -math.inf
        for op in acked:
            if op.ended < newest:
                found.append(
                    Violation("reordered", thread, f"{op.names} at {op.seq} ended before what stands below began")
                )
            newest = max(newest, op.began)
        last: dict[str, int] = {}
        for op in h.ops:
            for n in op.names if op.kind != "retry" else ():
                if n in at:
                    if at[n] < last.get(op.process, -1):
                        found.append(Violation("reordered", thread, f"{n} stands before an older one of {op.process}"))
                    last[op.process] = at[n]
    return found


def _first(op: Op, at: dict[str, int]) -> float:
    return min((at[n] for n in op.names if n in at), default=math.inf)


def _last(op: Op, at: dict[str, int]) -> float:
    return max((at[n] for n in op.names if n in at), default=-math.inf)


def not_a_past_state(history: History, final: Final) -> list[Violation]:
    """I3, I7: every read, at any level, shows a prefix of the thread."""
    found = []
    for thread, h in _growing(history):
        whole = final.messages.get(thread, [])
        for r in h.reads:
            names = list(r.names or ())
            if names != whole[: len(names)]:
                differs = next((i for i, (a, b) in enumerate(zip(names, whole, strict=False)) if a != b), len(whole))
                where = f"{r.process} read {r.level} at {r.began:.3f}: from {differs} on {names[differs:][:3]}"
                found.append(Violation("not a past state", thread, f"{where}, the thread has {whole[differs:][:3]}"))
    return found


def stale(history: History, final: Final) -> list[Violation]:
    """I7: a fresh read shows all that was acknowledged before it began; any read shows the receipt it was given."""
    found = []
    for thread, h in _growing(history):
        at = {n: i + 1 for i, n in enumerate(final.messages.get(thread, ()))}
        acked = [o for o in h.ops if o.ok and o.kind != "retry"]
        in_time, need_by_time = _needed(acked, [o.ended for o in acked], at)
        in_log, need_by_seq = _needed(acked, [o.seq for o in acked], at)
        for r in h.reads:
            need = need_by_seq[bisect_right(in_log, r.at_least)] if r.at_least else 0
            if r.level in FRESH:
                need = max(need, need_by_time[bisect_left(in_time, r.began)])
            if len(r.names or ()) < need:
                what = f"{r.process} read {r.level} at {r.began:.3f} (receipt {r.at_least})"
                found.append(
                    Violation("stale", thread, f"{what}: {len(r.names or ())} messages, {need} were acknowledged")
                )
    return found


def _needed(ops: Sequence[Op], keys: Sequence[float], at: dict[str, int]) -> tuple[list[float], list[int]]:
    """Return the keys in order, and how many messages a read needs to show the first n ops."""
    ordered = sorted(zip(keys, (max((at.get(n, 0) for n in o.names), default=0) for o in ops), strict=True))
    return [key for key, _ in ordered], [0, *accumulate((need for _, need in ordered), max)]


def flicker(history: History, final: Final) -> list[Violation]:
    """I2, I7: no read lacks what an earlier read showed; eventual reads are compared with eventual reads."""
    found = []
    for thread, h in _growing(history):
        for levels, of in ((FRESH, (*FRESH, "eventual")), (("eventual",), ("eventual",))):
            before = sorted((r.ended, len(r.names or ())) for r in h.reads if r.level in of)
            ends = [ended for ended, _ in before]
            most = [0, *accumulate((count for _, count in before), max)]
            for r in h.reads:
                if r.level in levels and len(r.names or ()) < (seen := most[bisect_left(ends, r.began)]):
                    what = f"{r.process} read {r.level} at {r.began:.3f} and saw {len(r.names or ())} messages"
                    found.append(Violation("flicker", thread, f"{what}, {seen} had been seen before"))
    return found


def edits(history: History, final: Final) -> list[Violation]:
    """I1, I2, I3, I6, I7 for edited threads: reads and the final state are states that the edits can have made."""
    found = []
    for thread, h in history.threads.items():
        if thread.startswith(EDITED):
            found += _edited(thread, h, final.messages.get(thread))
    return found


def _edited(thread: str, h: ThreadHistory, final: list[str] | None) -> list[Violation]:
    found = []
    states: list[set[tuple[str, ...] | None]] = [{None}]
    for op in h.ops:
        before = states[-1]
        if op.kind == "saw":
            shown = tuple(op.names) if op.names else None
            after = {s for s in before if (s or None) == shown}
            if not after:
                found.append(
                    Violation("edits", thread, f"its writer saw {shown} at {op.began:.3f}, possible: {before}")
                )
                after = {shown}
        else:
            # An erasure begins with a deletion, which may have happened even if the erasure was rejected.
            after = {_edit(s, op) for s in before} if op.outcome != "rejected" or op.kind == "erase" else set()
            after |= before if not op.ok else set()
        states.append(after)
    begins, ends = [o.began for o in h.ops], [o.ended for o in h.ops]
    for r in h.reads:
        low = bisect_left(ends, r.began) if r.level in FRESH else 0
        allowed = set().union(*states[low : bisect_right(begins, r.ended) + 1])
        names = tuple(r.names) if r.names is not None else None
        # A thread without messages reads like a deleted thread.
        if (names or None) not in {s or None for s in allowed}:
            what = f"{r.process} read {r.level} at {r.began:.3f}: {names}"
            found.append(Violation("edits", thread, f"{what}, possible: {sorted(map(str, allowed))[:4]}"))
    if (tuple(final) if final else None) not in {s or None for s in states[-1]}:
        found.append(Violation("edits", thread, f"at the end: {final}, possible: {sorted(map(str, states[-1]))[:4]}"))
    return found


def _edit(state: tuple[str, ...] | None, op: Op) -> tuple[str, ...] | None:
    if op.kind in ("drop", "erase"):
        return None
    if op.kind == "remove":
        return tuple(n for n in state if n not in op.names) if state is not None else None
    return (*(state or ()), *op.names)


def watermarks(history: History, final: Final) -> list[Violation]:
    """I4: terms, cursors, watermarks and the log's end never go back, and no cursor is beyond the log's end."""
    found = []
    most: dict[str, tuple[int, ...]] = {}
    for s in sorted(history.samples, key=lambda s: s.t):
        now: dict[str, tuple[int, ...]] = {f"watermark of {t}": (seq,) for t, seq in s.watermarks.items()}
        for p, (term, seq) in s.cursors.items():
            now |= {f"term of {p}": (term,), f"cursor of {p}": (seq,)}
            if seq > s.end:
                found.append(Violation("watermark", None, f"cursor of {p} is {seq}, the log ends at {s.end}"))
        now[f"end of log {s.lane}"] = (s.end,)
        for what, value in now.items():
            if value < most.get(what, value):
                found.append(Violation("watermark", None, f"the {what} went from {most[what]} to {value} at {s.t:.3f}"))
            most[what] = max(value, most.get(what, value))
    return found


def settled_before_commit(history: History, final: Final) -> list[Violation]:
    """I5: positions below the settled floor are committed."""
    return [
        Violation("settled before commit", None, f"partition {p} is settled to {seq}, committed to {s.cursors[p][1]}")
        for s in history.samples
        for p, seq in s.settled.items()
        if p in s.cursors and seq > s.cursors[p][1]
    ]


def quarantine(history: History, final: Final) -> list[Violation]:
    """I8: all poison is in quarantine byte for byte, and no entry of threads without poison."""
    found = []
    for p in history.poisons:
        parked = final.quarantined.get(p.seq)
        if parked is None or parked.body != p.body:
            what = "is not in quarantine" if parked is None else "is changed in quarantine"
            found.append(Violation("quarantine", p.thread, f"what was published at {p.seq} {what}"))
    poisoned = {p.thread for p in history.poisons}
    for seq, parked in final.quarantined.items():
        if parked.thread not in poisoned:
            found.append(
                Violation("quarantine", parked.thread, f"{seq} is in quarantine, nothing is wrong with its thread")
            )
    return found


def slow_recovery(history: History, final: Final, *, limit_s: float = 10.0) -> list[Violation]:
    """I10: flushing resumes by itself after each heal."""
    return [
        Violation("slow recovery", None, f"after {', '.join(r.kinds)} flushing went on after {r.flushing_s} s")
        for r in history.recoveries
        if r.flushing_s is None or r.flushing_s > limit_s
    ]


def unbounded(history: History, final: Final, *, log_bytes: int, rss_bytes: int) -> list[Violation]:
    """I10: the log and the processes stay below their limits."""
    found = []
    for s in history.samples:
        if s.log_bytes > log_bytes:
            found.append(Violation("unbounded", None, f"the log has {s.log_bytes} bytes"))
        found += [Violation("unbounded", None, f"{p} has {n} bytes") for p, n in s.rss.items() if n > rss_bytes]
    return found


def dishonest(history: History, final: Final, *, deadline_s: float) -> list[Violation]:
    """I11: a failing call raises a documented error, and in time unless its process was stopped meanwhile."""
    found = []
    stops: list[tuple[str, float, float]] = []
    begun: dict[tuple[str, str], float] = {}
    for f in sorted(history.faults, key=lambda f: f.t):
        if f.kind.startswith("stop "):
            if f.what == "inject":
                begun[f.kind, f.detail] = f.t
            elif (f.kind, f.detail) in begun:
                stops.append((f.detail, begun[f.kind, f.detail], f.t))
    for f in history.failures:
        what = f"{f.call} of {f.process} raised {f.error} ({f.text[:150]})"
        if f.error not in DOCUMENTED:
            found.append(Violation("undocumented error", None, what))
        stopped = sum(max(0.0, min(f.ended, b) - max(f.began, a)) for who, a, b in stops if f.process in who.split())
        if f.ended - f.began - stopped > deadline_s + LONGER_S.get(f.call, 0.0):
            found.append(Violation("deadline", None, f"{what} after {f.ended - f.began:.1f} s"))
    return found


Checker = Callable[[History, Final], list[Violation]]

#: The checkers that need only the history and the final state.
CHECKERS: tuple[Checker, ...] = (
    lost, duplicated, phantom, reordered, not_a_past_state, stale, flicker, edits, watermarks, settled_before_commit,
    quarantine,
)  # fmt: skip
