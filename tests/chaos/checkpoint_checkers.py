"""The rules that a history of LangGraph's checkpoints must keep, besides those of `chaos.checkers`.

Threads that do not fork record their history in one channel (`chaos.graphs`), so the rules for threads of messages
apply to them. The rules here look at rows, which forked threads have too: every checkpoint and every write, by key.
`lost_edits` and `wrong_copies` check the rows of `edited` threads, which are also deleted from, and of their copies.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from langgraph.checkpoint.base import WRITES_IDX_MAP

from chaos import checkers
from chaos.checkers import FRESH, Checker, Violation
from chaos.graphs import FIRST, LAST
from chaos.history import COPIED, EDITED, LANE, Final, History, Op, Saved, Saving, Shown, ThreadHistory

#: Namespace and id of a checkpoint, and task and channel of a write on it.
WriteKey = tuple[str, str, str, str]
#: Operations that remove some of a thread's checkpoints: `_goes` says which.
_TAKES = ("prune", "runs")


@dataclass
class _Rows:
    """The rows that a thread's writers tried to save."""

    puts: dict[tuple[str, str], Op]
    writes: dict[WriteKey, list[Op]]

    @classmethod
    def of(cls, thread: ThreadHistory) -> _Rows:
        rows = cls({}, {})
        for op in thread.ops:
            saving = op.saving
            if saving is None:
                continue
            if saving.task:
                for channel in saving.channels:
                    rows.writes.setdefault((saving.ns, saving.id, saving.task, channel), []).append(op)
            else:
                rows.puts[saving.ns, saving.id] = op
        return rows


def _parked(thread: str, history: History, final: Final) -> list[Op]:
    """Return the acknowledged writes that are in quarantine behind poison, in order.

    While Postgres is away, writers do not learn of the poison and go on behind it.
    """
    # A thread has one lane, and its writers record positions in that lane.
    parked = {seq % LANE for seq, entry in final.quarantined.items() if entry.thread == thread}
    if not parked:
        return []
    since = min((p.seq % LANE for p in history.poisons if p.thread == thread), default=math.inf)
    ops = (op for op in history.threads[thread].ops if op.ok and op.seq in parked and op.seq > since)
    return sorted(ops, key=lambda op: op.seq)


def _or_parked(check: Checker) -> Checker:
    """Apply a rule for threads that do not fork, with the thread's quarantined names appended to those in Postgres."""

    def checked(history: History, final: Final) -> list[Violation]:
        parked = {thread: _parked(thread, history, final) for thread in history.threads}
        names = {
            t: [*final.messages.get(t, ()), *(n for op in ops for n in op.names)] for t, ops in parked.items() if ops
        }
        return check(history, replace(final, messages=final.messages | names))

    return checked


def _source(thread: ThreadHistory) -> Op | None:
    """Return the operation that made the thread, if it is a copy."""
    return next((op for op in thread.ops if op.kind == "copy"), None)


def _tried(history: History, thread: ThreadHistory) -> tuple[_Rows, ThreadHistory]:
    """Return the rows that a thread may have, and the thread they were written to: for a copy, its source."""
    copied = _source(thread)
    of = history.threads[copied.saving.id] if copied is not None and copied.saving is not None else thread
    return _Rows.of(of), of


def _bereft(thread: ThreadHistory, until: float = math.inf) -> set[tuple[str, str]]:
    """Return the checkpoints that may have lost their parents by this time, to a prune or a run's deletion.

    After that they must name no parent, which `orphans` checks.
    """
    tried = [op.saving for op in thread.ops if op.kind in _TAKES and op.outcome != "rejected" and op.began <= until]
    bereft = set()
    for (ns, id_), op in _Rows.of(thread).puts.items():
        parent = op.saving.parent if op.saving is not None else None
        if parent is not None and any(gone is not None and _goes((ns, parent), gone, thread) for gone in tried):
            bereft.add((ns, id_))
    return bereft


def _kept(history: History) -> Iterator[tuple[str, ThreadHistory, _Rows]]:
    return ((t, h, _Rows.of(h)) for t, h in history.threads.items() if not t.startswith((EDITED, COPIED)))


def lost_rows(history: History, final: Final) -> list[Violation]:
    """I1: every acknowledged checkpoint and write is in Postgres at the end, or in quarantine behind poison."""
    found = []
    for thread, _, rows in _kept(history):
        parked = _parked(thread, history, final)
        for (ns, id_), op in rows.puts.items():
            if op.ok and (thread, ns, id_) not in final.checkpoints and op not in parked:
                found.append(Violation("lost row", thread, f"checkpoint {ns!r} {id_} acknowledged at {op.seq}"))
        for (ns, id_, task, channel), ops in rows.writes.items():
            saved = final.checkpoints.get((thread, ns, id_))
            there = saved is not None and any((task, channel) == write[:2] for write in saved.writes)
            acked = [op for op in ops if op.ok and op not in parked]
            # Writes on a missing checkpoint cannot be read; the checkpoint is reported already.
            if acked and saved is not None and not there:
                found.append(Violation("lost row", thread, f"{channel} of {task!r} on {id_} at {acked[0].seq}"))
    return found


def wrong_rows(history: History, final: Final) -> list[Violation]:
    """I2, I6: every read shows only what was tried by then: contents, parents, and each write once and in order."""
    found = []
    for thread, h in history.threads.items():
        rows, of = _tried(history, h)
        for where, until, ns, id_, saved in _seen(thread, h, final):
            op = rows.puts.get((ns, id_))
            if op is None or op.saving is None or op.began > until or op.outcome == "rejected":
                found.append(Violation("phantom row", thread, f"checkpoint {ns!r} {id_} {where}"))
            elif saved.content != op.saving.content:
                found.append(Violation("wrong content", thread, f"checkpoint {ns!r} {id_} {where}"))
            elif saved.parent != op.saving.parent and not (saved.parent is None and (ns, id_) in _bereft(of, until)):
                what = f"checkpoint {ns!r} {id_} {where}: {saved.parent}, it was saved behind {op.saving.parent}"
                found.append(Violation("wrong parent", thread, what))
            found += [Violation(rule, thread, f"{what} on {id_} {where}") for rule, what in _wrong_writes(saved)]
            for task, channel, name in saved.writes:
                tried = (o for o in rows.writes.get((ns, id_, task, channel), ()) if o.began <= until)
                if name not in {o.names[0] for o in tried if o.outcome != "rejected"}:
                    found.append(Violation("phantom row", thread, f"{name} of {task!r} on {id_} {where}"))
    return found


def _seen(thread: str, h: ThreadHistory, final: Final) -> Iterator[tuple[str, float, str, str, Saved]]:
    for (of, ns, id_), saved in final.checkpoints.items():
        if of == thread:
            yield "at the end", math.inf, ns, id_, saved
    for shown in h.shown:
        if shown.id is not None and shown.saved is not None:
            yield _where(shown), shown.ended, shown.ns, shown.id, shown.saved


def _where(shown: Shown) -> str:
    return f"in a read ({shown.level}) of {shown.process} at {shown.began:.3f}"


def _wrong_writes(saved: Saved) -> Iterator[tuple[str, str]]:
    keys = [(task, channel) for task, channel, _ in saved.writes]
    if len(set(keys)) < len(keys):
        yield "duplicated row", f"writes {keys}"
    names: dict[str, dict[str, str]] = {}
    for task, channel, name in saved.writes:
        names.setdefault(task, {})[channel] = name
    for task, by_channel in names.items():
        if len({by_channel.get(channel) for channel in FIRST}) > 1:
            yield "torn row", f"writes of {task!r}: {by_channel}"
    order = [(task, WRITES_IDX_MAP.get(channel, _index(channel))) for task, channel in keys]
    if order != sorted(order):
        yield "disorder", f"writes {keys}"


def _index(channel: str) -> int:
    return FIRST.index(channel) if channel in FIRST else len(FIRST)


def unknown_threads(history: History, final: Final) -> list[Violation]:
    """I2: no thread has rows that nobody wrote to."""
    threads = {thread for thread, _, _ in final.checkpoints} - history.threads.keys()
    return [Violation("phantom row", thread, "nobody wrote to it") for thread in sorted(threads)]


def orphans(history: History, final: Final) -> list[Violation]:
    """I3: every checkpoint's parent exists, because it was acknowledged or read before."""
    return [
        Violation("orphan", thread, f"checkpoint {ns!r} {id_}: its parent {saved.parent} is not there")
        for (thread, ns, id_), saved in final.checkpoints.items()
        if saved.parent is not None and (thread, ns, saved.parent) not in final.checkpoints
    ]


def stale_rows(history: History, final: Final) -> list[Violation]:
    """I7: a fresh read shows the newest checkpoint, or the requested one, and all writes acknowledged on it by then."""
    found = []
    for thread, h, rows in _kept(history):
        newest: dict[str, tuple[list[float], list[str]]] = {}
        for ns in {ns for ns, _ in rows.puts}:
            acked = sorted((op.ended, id_) for (of, id_), op in rows.puts.items() if of == ns and op.ok)
            newest[ns] = [ended for ended, _ in acked], ["", *accumulate((id_ for _, id_ in acked), max)]
        by_checkpoint: dict[tuple[str, str], list[tuple[str, str, Op]]] = {}
        for (ns, id_, task, channel), ops in rows.writes.items():
            by_checkpoint.setdefault((ns, id_), []).extend((task, channel, op) for op in ops if op.ok)
        for shown in h.shown:
            if shown.level not in FRESH:
                continue
            ends, ids = newest.get(shown.ns, ([], [""]))
            needed = ids[bisect_left(ends, shown.began)]
            asked = rows.puts.get((shown.ns, shown.asked)) if shown.asked is not None else None
            if asked is not None:
                needed = shown.asked or "" if asked.ended < shown.began else ""
            if (shown.id or "") < needed:
                found.append(Violation("stale row", thread, f"{_where(shown)}: {shown.id}, {needed} was acknowledged"))
            if shown.id is None or shown.saved is None:
                continue
            there = {write[:2] for write in shown.saved.writes}
            for task, channel, op in by_checkpoint.get((shown.ns, shown.id), ()):
                if op.ended < shown.began and (task, channel) not in there:
                    what = f"{_where(shown)}: {op.names[0]} of {task!r} on {shown.id} was acknowledged"
                    found.append(Violation("stale row", thread, what))
    return found


def flickering_rows(history: History, final: Final) -> list[Violation]:
    """I2, I7: no fresh read shows an older newest checkpoint than an earlier one did."""
    found = []
    for thread, h, _ in _kept(history):
        for ns in {shown.ns for shown in h.shown}:
            reads = [s for s in h.shown if s.ns == ns and s.asked is None and s.level in FRESH]
            before = sorted((s.ended, s.id or "") for s in reads)
            ends, most = [ended for ended, _ in before], ["", *accumulate((id_ for _, id_ in before), max)]
            found += [
                Violation("flicker", thread, f"{_where(shown)}: {shown.id}, {seen} had been seen")
                for shown in reads
                if (shown.id or "") < (seen := most[bisect_left(ends, shown.began)])
            ]
    return found


def wrong_lists(history: History, final: Final) -> list[Violation]:
    """I2, I6, I7: a list shows once and newest first all that was acknowledged before it began, and nothing untried."""
    found = []
    for thread, h, rows in _kept(history):
        for listed in h.listed:
            where = f"in a list of {listed.process} at {listed.began:.3f}"
            keys = set(listed.keys)
            gone = [key for key, op in rows.puts.items() if op.ok and op.ended < listed.began and key not in keys]
            if gone:
                found.append(Violation("stale row", thread, f"{gone[:3]} are not {where}"))
            never = [key for key in keys if key not in rows.puts or rows.puts[key].began > listed.ended]
            if never:
                found.append(Violation("phantom row", thread, f"{never[:3]} {where}"))
            ids = [id_ for _, id_ in listed.keys]
            if len(keys) < len(ids) or ids != sorted(ids, reverse=True):
                found.append(Violation("disorder", thread, f"{ids[:5]} {where}"))
    return found


def contested(history: History, final: Final) -> list[Violation]:
    """I3: of several writes with one key the first wins, or the last, as LangGraph defines for the channel."""
    found = []
    for thread, h, rows in _kept(history):
        for (ns, id_, task, channel), ops in rows.writes.items():
            if len(ops) < 2:
                continue
            first = channel not in LAST
            saved = final.checkpoints.get((thread, ns, id_))
            for name in [w[2] for w in saved.writes if w[:2] == (task, channel)] if saved is not None else ():
                found += _wrong_winner(thread, "at the end", ops, name, math.inf, first=first)
            for shown in h.shown:
                if (shown.ns, shown.id) == (ns, id_) and shown.saved is not None and shown.level in FRESH:
                    for name in [w[2] for w in shown.saved.writes if w[:2] == (task, channel)]:
                        found += _wrong_winner(thread, _where(shown), ops, name, shown.began, first=first)
    return found


def _wrong_winner(
    thread: str, where: str, ops: Sequence[Op], name: str, at: float, *, first: bool
) -> Iterator[Violation]:
    """Yield a violation if another write had to win. `at`: only writes acknowledged before count."""
    winner = next((op for op in ops if op.names[0] == name), None)
    if winner is None:
        return  # reported as a phantom
    for op in ops:
        if op is winner or not op.ok or op.ended >= at:
            continue
        # A try without an answer may have taken effect earlier; a write that was never answered, at any time.
        if first:
            beaten = op.ended < winner.began or (winner.ok and not winner.tried and op.seq < winner.seq)
        else:
            beaten = winner.ended < op.began or (winner.ok and op.seq > winner.seq)
            beaten = beaten and winner.ok
        if beaten:
            yield Violation("wrong winner", thread, f"{name} {where}, {op.names[0]} was {'first' if first else 'last'}")
            return


def revived(history: History, final: Final) -> list[Violation]:
    """I2, I6: checkpoints that were pruned or deleted with their run appear in no later list and not at the end."""
    found = []
    for thread, h in history.threads.items():
        for op in h.ops:
            if op.kind not in _TAKES or not op.ok or op.saving is None or op.seq in final.quarantined:
                continue
            gone = {key for key in _Rows.of(h).puts if _goes(key, op.saving, h)}
            shown = [("at the end", [key[1:] for key in final.checkpoints if key[0] == thread])]
            shown += [(f"in a list at {x.began:.3f}", list(x.keys)) for x in h.listed if x.began > op.ended]
            for where, keys in shown:
                if back := sorted(gone.intersection(keys)):
                    found.append(Violation("revived row", thread, f"{back[:3]} {where}, gone by {op.kind} at {op.seq}"))
    return found


def _goes(key: tuple[str, str], gone: Saving, thread: ThreadHistory) -> bool:
    """True when a prune, or the deletion of a run, removes this checkpoint."""
    if gone.task == "prune":
        return key[0] == gone.ns and key[1] < gone.id
    saved = (op.saving for op in thread.ops if op.saving is not None and not op.saving.task)
    return any((s.ns, s.id) == key and s.run == gone.run for s in saved)


def _left(thread: ThreadHistory, until: float = math.inf) -> _Rows:
    """Return the rows that an edited thread must have by this time: acknowledged, and not covered by any removal."""
    had = _Rows({}, {})
    for done in thread.ops:
        if done.began > until:
            break
        if done.outcome == "rejected":
            continue
        gone = done.saving
        if done.kind in ("drop", "erase"):
            had = _Rows({}, {})
        elif done.kind in _TAKES and gone is not None:
            stay = {key for key in had.puts if not _goes(key, gone, thread)}
            had = _Rows(
                {key: o for key, o in had.puts.items() if key in stay},
                {key: o for key, o in had.writes.items() if key[:2] in stay},
            )
        elif done.ok:
            new = _Rows.of(ThreadHistory([done]))
            had = _Rows(had.puts | new.puts, had.writes | new.writes)
    return had


def lost_edits(history: History, final: Final) -> list[Violation]:
    """I1, I6: an edited thread still has all rows that nothing removed."""
    found = []
    parked = {entry.thread for entry in final.quarantined.values()}
    for thread, h in history.threads.items():
        if not thread.startswith(EDITED) or thread in parked:
            continue
        had = _left(h)
        there = {key[1:]: saved for key, saved in final.checkpoints.items() if key[0] == thread}
        writes = {(*key, *write[:2]) for key, saved in there.items() for write in saved.writes}
        lost = [*sorted(had.puts.keys() - there.keys()), *sorted(had.writes.keys() - writes)]
        if lost:
            found.append(Violation("lost row", thread, f"{lost[:3]} were not deleted"))
    return found


def wrong_copies(history: History, final: Final) -> list[Violation]:
    """I1, I2: a copy has exactly the checkpoints and writes that its source had."""
    found = []
    for thread, h in history.threads.items():
        op = _source(h)
        if op is None or not op.ok or op.saving is None or op.seq in final.quarantined:
            continue
        had = _left(history.threads[op.saving.id], op.began)
        there = {key[1:]: saved for key, saved in final.checkpoints.items() if key[0] == thread}
        gone, more = had.puts.keys() - there.keys(), there.keys() - had.puts.keys()
        writes = {(*key, *write[:2]) for key, saved in there.items() for write in saved.writes}
        lost = [*sorted(gone), *sorted(key for key in had.writes.keys() - writes if key[:2] in there)]
        if lost:
            found.append(Violation("lost row", thread, f"{lost[:3]} of {op.saving.id} are not in its copy"))
        if more:
            found.append(Violation("phantom row", thread, f"{sorted(more)[:3]} were not in {op.saving.id}"))
    return found


def not_erased(history: History, final: Final) -> list[Violation]:
    """The log holds no entry covered by an acknowledged erasure."""
    return [Violation("not erased", found.thread, f"the log has {found.seq}") for found in history.remains]


CHECKERS: tuple[Checker, ...] = (
    *map(_or_parked, checkers.CHECKERS),
    lost_rows, wrong_rows, unknown_threads, orphans, stale_rows, flickering_rows, wrong_lists, contested,
    revived, lost_edits, wrong_copies, not_erased,
)  # fmt: skip
