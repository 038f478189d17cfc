"""Each rule for LangGraph's checkpoints finds a history that breaks it; clean histories pass all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos import checkpoint_checkers
from chaos.graphs import FIRST, LAST
from chaos.history import (
    LANE,
    Begin,
    End,
    Event,
    Final,
    History,
    Listed,
    ParkedEntry,
    Poison,
    Read,
    Remains,
    Saved,
    Saving,
    Shown,
)

T = "forked-1"
Key = tuple[str, str, str]


class Tale:
    """Builds a history and the final contents of Postgres, event by event; each event takes one second."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.final: dict[Key, Saved] = {}
        self.quarantined: dict[int, ParkedEntry] = {}
        self.now = 0.0
        self._ops = 0

    def begin(self, saving: Saving, *names: str, by: str = "w") -> int:
        self._ops += 1
        self.now += 1
        self.events.append(msgspec.structs.replace(saving, process=by, op=self._ops))
        self.events.append(Begin(self.now, by, self._ops, T, "put", names))
        return self._ops

    def end(self, op: int, seq: int = 0, outcome: str = "ok", *, tried: bool = False, by: str = "w") -> Tale:
        self.now += 1
        self.events.append(End(self.now, by, op, outcome, seq, tried))
        return self

    def put(self, id_: str, parent: str | None = None, *, seq: int = 0, outcome: str = "ok", kept: bool = True) -> Tale:
        self.end(self.begin(Saving("w", 0, "", id_, parent, f"of {id_}"), id_), seq, outcome)
        if kept and outcome == "ok":
            self.final[T, "", id_] = Saved(parent, f"of {id_}", ())
        return self

    def writes(
        self, id_: str, name: str, task: str = "t", *, channels: tuple[str, ...] = FIRST, seq: int = 0, **end: Any
    ) -> Tale:
        self.end(self.begin(Saving("w", 0, "", id_, task=task, channels=channels), name), seq, **end)
        before = self.final[T, "", id_]
        there = {(w[0], w[1]): w for w in before.writes}
        for channel in channels:
            if channel in LAST or (task, channel) not in there:
                there[task, channel] = (task, channel, name)
        order = sorted(there.values(), key=lambda w: (w[0], (*LAST, *FIRST).index(w[1])))
        self.final[T, "", id_] = Saved(before.parent, before.content, tuple(order))
        return self

    def read(
        self, id_: str | None, saved: Saved | None = None, *, level: str = "strong", asked: str | None = None
    ) -> Tale:
        """Add a read; without `saved`, it shows the checkpoint as it is now."""
        self.now += 1
        shown = saved or (self.final[T, "", id_] if id_ is not None else None)
        self.events.append(Shown("r", T, level, self.now, self.now + 0.5, "", asked, id_, shown))
        self.now += 1
        return self

    def list(self, *ids: str) -> Tale:
        self.now += 1
        self.events.append(Listed("r", T, self.now, self.now + 0.5, tuple(("", id_) for id_ in ids)))
        self.now += 1
        return self

    def ends_with(self, id_: str, saved: Saved | None) -> Tale:
        """Replace a checkpoint in the final contents by `saved`."""
        if saved is None:
            del self.final[T, "", id_]
        else:
            self.final[T, "", id_] = saved
        return self

    def broken(self) -> set[str]:
        """Return the rules that the history breaks."""
        final = Final({}, self.quarantined, self.final)
        history = History.of(self.events)
        return {v.rule for check in checkpoint_checkers.CHECKERS for v in check(history, final)}


def clean() -> Tale:
    return (
        Tale()
        .put("1", seq=1)
        .writes("1", "a", seq=2)
        .read("1")
        .put("2", "1", seq=3)
        .read("2")
        .read("1", asked="1")
        .read("1", level="eventual")
        .put("3", "1", seq=4)  # a sibling of 2
        .writes("1", "b", "contested", seq=5)
        .writes("1", "c", "contested", seq=6)
        .writes("1", "d", "asked", channels=LAST, seq=7)
        .writes("1", "e", "asked", channels=LAST, seq=8)
        .list("3", "2", "1")
    )


def test_a_clean_history_passes() -> None:
    assert clean().broken() == set()


def _writes(*writes: tuple[str, str, str]) -> Saved:
    return Saved(None, "of 1", writes)


A = (("t", "log", "a"), ("t", "extra", "a"))

BAD: dict[str, tuple[Callable[[], Tale], str]] = {
    "an acknowledged checkpoint is gone": (lambda: clean().ends_with("2", None), "lost row"),
    "an acknowledged write is gone": (lambda: clean().ends_with("1", _writes()), "lost row"),
    "nobody saved it": (lambda: clean().ends_with("9", Saved(None, "", ())), "phantom row"),
    "it was rejected": (
        lambda: clean().put("4", outcome="rejected").ends_with("4", Saved(None, "of 4", ())), "phantom row",
    ),
    "a read shows what was not tried yet": (
        lambda: clean().read("4", Saved(None, "of 4", ())).put("4"), "phantom row",
    ),
    "a write that nobody did": (
        lambda: clean().ends_with("1", _writes(("t", "log", "z"), ("t", "extra", "z"))), "phantom row",
    ),
    "a write of another task": (
        lambda: Tale().put("1", seq=1).writes("1", "a", seq=2).ends_with("1", _writes(*A, ("u", "log", "a"))),
        "phantom row",
    ),
    "other content": (lambda: clean().ends_with("2", Saved("1", "of 3", ())), "wrong content"),
    "a read shows other content": (lambda: clean().read("3", Saved("1", "of 2", ())), "wrong content"),
    "another parent": (lambda: clean().ends_with("3", Saved("2", "of 3", ())), "wrong parent"),
    "no parent": (lambda: clean().ends_with("3", Saved(None, "of 3", ())), "wrong parent"),
    "a write is there twice": (
        lambda: Tale().put("1", seq=1).writes("1", "a", seq=2).read("1", _writes(A[0], *A)), "duplicated row",
    ),
    "half of a task's writes": (
        lambda: Tale().put("1", seq=1).writes("1", "a", seq=2).ends_with("1", _writes(A[0])), "torn row",
    ),
    "a task's writes in another order": (
        lambda: Tale().put("1", seq=1).writes("1", "a", seq=2).read("1", _writes(A[1], A[0])), "disorder",
    ),
    "its parent is not there": (lambda: clean().ends_with("1", None), "orphan"),
    "a fresh read misses the newest": (lambda: clean().read("2"), "stale row"),
    "a read of its own writes misses another's": (lambda: clean().read("2", level="read-your-writes"), "stale row"),
    "a fresh read shows nothing": (lambda: clean().read(None), "stale row"),
    "a read does not find the one asked for": (lambda: clean().read(None, asked="2"), "stale row"),
    "a fresh read misses a write": (
        lambda: Tale().put("1", seq=1).writes("1", "a", seq=2).read("1", _writes()), "stale row",
    ),
    "seen, then unseen": (
        lambda: clean().put("4", outcome="unknown").read("4", Saved(None, "of 4", ())).read("3"), "flicker",
    ),
    "a list misses one": (lambda: clean().list("3", "1"), "stale row"),
    "a list shows one that nobody saved": (lambda: clean().list("9", "3", "2", "1"), "phantom row"),
    "a list shows one twice": (lambda: clean().list("3", "2", "2", "1"), "disorder"),
    "a list in another order": (lambda: clean().list("3", "1", "2"), "disorder"),
    "the second write of a key stands": (
        lambda: Tale().put("1", seq=1).writes("1", "a", seq=3).writes("1", "b", seq=2), "wrong winner",
    ),
    "a read shows the second write of a key": (
        lambda: Tale().put("1").writes("1", "a", seq=2).writes("1", "b", seq=3).read(
            "1", _writes(("t", "log", "b"), ("t", "extra", "b"))
        ),
        "wrong winner",
    ),
    "the last write of a key does not stand": (
        lambda: Tale().put("1").writes("1", "a", channels=LAST, seq=3).writes("1", "b", channels=LAST, seq=2),
        "wrong winner",
    ),
    "a read shows a write that was replaced": (
        lambda: Tale().put("1").writes("1", "a", channels=LAST, seq=2).writes("1", "b", channels=LAST, seq=3).read(
            "1", _writes(("t", LAST[0], "a"))
        ),
        "wrong winner",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_history_of_checkpoints_is_found(what: str) -> None:
    tale, rule = BAD[what]
    assert rule in tale().broken()


def _pruned_and_copied(source: dict[str, Saved], copy: dict[str, Saved], *listed: str) -> set[str]:
    """Return the rules broken when a thread of 1, 2 (with a write on it) and 3 is pruned to 2 and copied before 3.

    `source` and `copy` are their final rows; `listed` is what a later list shows.
    """
    edited, copied = "edited-1", "copied-edited-1"
    savings = [
        (edited, "add", ("a",), Saving("w", 1, "", "1", None, "of 1")),
        (edited, "add", ("b",), Saving("w", 2, "", "2", "1", "of 2")),
        (edited, "prune", (), Saving("w", 3, "", "2", task="prune")),
        (edited, "add", ("c",), Saving("w", 4, "", "2", task="t", channels=FIRST)),
        (copied, "copy", ("a", "b", "c"), Saving("w", 5, "", edited, task="copy")),
        (edited, "add", ("d",), Saving("w", 6, "", "3", "2", "of 3")),
    ]
    told: list[Event] = []
    for n, (thread, kind, names, saving) in enumerate(savings, 1):
        told += [saving, Begin(float(n), "w", n, thread, kind, names), End(n + 0.5, "w", n, "ok", n)]
    if listed:
        told.append(Listed("r", edited, 9.0, 9.5, tuple(("", id_) for id_ in listed)))
        told.append(Listed("r", copied, 9.0, 9.5, (("", "2"),)))
    rows = {(edited, "", id_): saved for id_, saved in source.items()}
    rows |= {(copied, "", id_): saved for id_, saved in copy.items()}
    final = Final({edited: ["a", "b", "c", "d"], copied: ["a", "b", "c"]}, {}, rows)
    history = History.of(told)
    return {v.rule for check in checkpoint_checkers.CHECKERS for v in check(history, final)}


def _run_deleted(ends: dict[str, Saved], *listed: str, outcome: str = "ok") -> set[str]:
    """Return the rules broken when run "gone" (1 and 2, with a write on 2) is deleted; 3 and 4 are of another run."""
    thread = "edited-1"
    savings = [
        ("add", ("a",), Saving("w", 1, "", "1", None, "of 1", run="gone")),
        ("add", ("b",), Saving("w", 2, "", "2", "1", "of 2", run="gone")),
        ("add", ("c",), Saving("w", 3, "", "2", task="t", channels=FIRST)),
        ("add", ("d",), Saving("w", 4, "", "3", "2", "of 3", run="stays")),
        ("add", ("e",), Saving("w", 5, "", "4", "3", "of 4", run="stays")),
        ("runs", (), Saving("w", 6, "", "", run="gone", task="runs")),
    ]
    told: list[Event] = []
    for n, (kind, names, saving) in enumerate(savings, 1):
        told += [saving, Begin(float(n), "w", n, thread, kind, names)]
        told.append(End(n + 0.5, "w", n, outcome if kind == "runs" else "ok", n))
    if listed:
        told.append(Listed("r", thread, 9.0, 9.5, tuple(("", id_) for id_ in listed)))
    final = Final({thread: list("abcde")}, {}, {(thread, "", id_): saved for id_, saved in ends.items()})
    history = History.of(told)
    return {v.rule for check in checkpoint_checkers.CHECKERS for v in check(history, final)}


def test_a_deleted_run_stays_gone_and_the_others_stay() -> None:
    one, three, four = Saved(None, "of 1", ()), Saved(None, "of 3", ()), Saved("3", "of 4", ())
    two = Saved("1", "of 2", (("t", "log", "c"), ("t", "extra", "c")))
    left = {"3": three, "4": four}
    before = {"1": one, "2": two, "3": Saved("2", "of 3", ()), "4": four}
    assert _run_deleted(left, "4", "3") == set()
    assert _run_deleted(left, "4", "3", "1") == {"revived row"}
    assert _run_deleted(left | {"1": one}) == {"revived row"}
    assert _run_deleted({"3": three}) == {"lost row"}
    assert _run_deleted(left | {"3": Saved("2", "of 3", ())}) == {"orphan"}
    assert _run_deleted(left | {"4": Saved(None, "of 4", ())}) == {"wrong parent"}
    assert _run_deleted(left | {"3": Saved(None, "of 4", ())}) == {"wrong content"}
    for unknown in (left, before):
        assert _run_deleted(unknown, outcome="unknown") == set()
    assert _run_deleted({"3": three}, outcome="unknown") == {"lost row"}
    assert _run_deleted(before, outcome="rejected") == set()
    assert _run_deleted(left, outcome="rejected") == {"lost row", "wrong parent"}


def test_what_is_pruned_stays_gone_and_a_copy_is_what_its_source_was() -> None:
    two = Saved(None, "of 2", (("t", "log", "c"), ("t", "extra", "c")))
    one, three = Saved(None, "of 1", ()), Saved("2", "of 3", ())
    ends = {"2": two, "3": three}
    assert _pruned_and_copied(ends, {"2": two}, "3", "2") == set()
    assert _pruned_and_copied({"1": one, **ends}, {"2": two}) == {"revived row"}
    assert _pruned_and_copied(ends, {"2": two}, "3", "2", "1") == {"revived row"}
    assert _pruned_and_copied(ends | {"3": Saved(None, "of 3", ())}, {"2": two}) == {"wrong parent"}
    assert _pruned_and_copied(ends, {}) == {"lost row"}
    assert _pruned_and_copied(ends, {"2": Saved(None, "of 2", ())}) == {"lost row"}
    assert _pruned_and_copied(ends, {"2": Saved(None, "of 1", two.writes)}) == {"wrong content"}
    assert _pruned_and_copied(ends, ends) == {"phantom row"}
    assert _pruned_and_copied(ends, {"1": one, "2": two}) == {"phantom row"}


def test_what_is_left_of_an_erased_thread_is_found() -> None:
    tale = clean()
    tale.events.append(Remains(T, 3))
    assert tale.broken() == {"not erased"}


def test_of_a_thread_that_nobody_wrote_to_nothing_is_there() -> None:
    tale = clean()
    tale.final["forked-2", "", "1"] = Saved(None, "of 1", ())
    assert tale.broken() == {"phantom row"}


def test_what_is_parked_behind_poison_is_not_lost_and_anything_else_is() -> None:
    tale = clean().put("4", "3", seq=12, kept=False)
    assert tale.broken() == {"lost row"}
    tale.events.append(Poison(tale.now, T, 11, b"x"))
    tale.quarantined = {11: ParkedEntry(T, b"x"), 12: ParkedEntry(T, b"y")}
    assert tale.broken() == set()
    tale.events.pop()  # without poison in the thread
    assert "quarantine" in tale.broken()


def test_what_is_parked_in_the_second_lane_is_not_lost_and_anything_else_is() -> None:
    """Poison and quarantine have positions across all lanes, writers positions in one."""
    tale = clean().put("4", "3", seq=12, kept=False)
    tale.events.append(Poison(tale.now, T, LANE + 11, b"x"))
    tale.quarantined = {LANE + 11: ParkedEntry(T, b"x"), LANE + 12: ParkedEntry(T, b"y")}
    assert tale.broken() == set()
    # An entry of another thread at this position of another lane is not the lost one.
    tale.events.append(Poison(tale.now, "other", 12, b"z"))
    tale.quarantined = {LANE + 11: ParkedEntry(T, b"x"), 12: ParkedEntry("other", b"z")}
    assert tale.broken() == {"lost row"}


def test_what_is_parked_behind_poison_stands_behind_what_is_there() -> None:
    own, parked = "own-1", {2: ParkedEntry("own-1", b"x"), 3: ParkedEntry("own-1", b"y")}
    told: list[Event] = [Poison(2.5, own, 2, b"x")]
    for n, name in ((1, "a"), (3, "b")):
        told += [Begin(float(n), "w", n, own, "append", (name,)), End(n + 0.5, "w", n, "ok", n)]

    def broken(names: list[str], quarantined: dict[int, ParkedEntry], *reads: Event) -> set[str]:
        history, final = History.of([*told, *reads]), Final({own: names}, quarantined)
        return {v.rule for check in checkpoint_checkers.CHECKERS for v in check(history, final)}

    assert broken(["a"], parked) == set()
    assert broken(["a"], parked, Read("r", own, "strong", 0, 4.0, 4.5, ("a", "b"))) == set()
    assert broken(["a"], parked, Read("r", own, "strong", 0, 4.0, 4.5, ("a",))) == {"stale"}
    assert broken([], parked) == {"lost"}
    assert broken(["a"], {2: parked[2]}) == {"lost"}


def test_what_had_no_answer_may_have_taken_effect_at_any_time() -> None:
    unknown = Tale().put("1", seq=1)
    op = unknown.begin(Saving("w", 0, "", "1", task="t", channels=LAST), "a")
    unknown.end(op, outcome="unknown").writes("1", "b", channels=LAST, seq=3)
    assert unknown.broken() == set()
    assert unknown.ends_with("1", _writes(("t", LAST[0], "a"))).broken() == set()
    # The first try of a repeated write may have been the key's first write.
    tried = Tale().put("1", seq=1)
    op = tried.begin(Saving("w", 0, "", "1", task="t", channels=FIRST), "a")
    other = tried.begin(Saving("v", 0, "", "1", task="t", channels=FIRST), "b", by="v")
    tried.end(other, 2, by="v").end(op, 3, tried=True)
    for name in "ab":
        assert tried.ends_with("1", _writes(("t", "log", name), ("t", "extra", name))).broken() == set()


@given(st.randoms(use_true_random=False))
def test_what_a_correct_saver_does_passes_and_its_damage_does_not(chance: random.Random) -> None:
    """Checkpoints and writes on any existing checkpoint; then one row is damaged."""
    tale = Tale().put("00", seq=1)
    for n in range(1, chance.randint(2, 25)):
        saved = sorted(id_ for _, _, id_ in tale.final)
        if chance.random() < 0.4:
            tale.put(f"{n:02}", chance.choice(saved), seq=n + 1)
        elif chance.random() < 0.6:
            tale.writes(
                chance.choice(saved), f"n{n}", chance.choice("tu"), channels=chance.choice((FIRST, LAST)), seq=n + 1
            )
        elif chance.random() < 0.5:
            tale.read(max(saved))
        else:
            tale.list(*reversed(saved))
    assert tale.broken() == set()
    key = chance.choice(sorted(tale.final))
    before = tale.final[key]
    damage = [None, Saved("99", before.content, before.writes), Saved(before.parent, "of 99", before.writes)]
    damage += [Saved(before.parent, before.content, before.writes[:-1])] if before.writes else []
    tale.ends_with(key[2], chance.choice(damage))
    assert tale.broken()


def test_an_erasure_that_failed_may_have_deleted_the_thread() -> None:
    edited = "edited-1"
    told: list[Event] = []
    for n, (kind, names, outcome) in enumerate((("add", ("a",), "ok"), ("erase", (), "rejected")), 1):
        told += [Begin(float(n), "w", n, edited, kind, names), End(n + 0.5, "w", n, outcome, n)]
    for names, broken in (([], set()), (["a"], set()), (["b"], {"edits"})):
        history, final = History.of(told), Final({edited: names})
        assert {v.rule for check in checkpoint_checkers.CHECKERS for v in check(history, final)} == broken
