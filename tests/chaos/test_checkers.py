"""Each checker finds the violation in a history that breaks its rule; clean histories pass all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos import checkers
from chaos.history import (
    Begin,
    End,
    Event,
    Failed,
    Fault,
    Final,
    History,
    ParkedEntry,
    Poison,
    Read,
    Recorder,
    Recovery,
    Sample,
    load,
)

T = "own-1"
E = "edited-1"


class Tale:
    """Builds a history, event by event; an event takes one second unless given otherwise."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 0.0
        self._ops = 0

    def write(self, *names: str, seq: int = 0, outcome: str = "ok", kind: str = "append", thread: str = T) -> Tale:
        """Add a write by process w."""
        op = self.begin(*names, kind=kind, thread=thread)
        return self.end(op, seq, outcome)

    def begin(self, *names: str, kind: str = "append", thread: str = T, by: str = "w") -> int:
        self._ops += 1
        self.now += 1
        self.events.append(Begin(self.now, by, self._ops, thread, kind, names))
        return self._ops

    def end(self, op: int, seq: int = 0, outcome: str = "ok", by: str = "w") -> Tale:
        self.now += 1
        self.events.append(End(self.now, by, op, outcome, seq))
        return self

    def read(self, names: Sequence[str] | None, level: str = "strong", at_least: int = 0, thread: str = T) -> Tale:
        self.now += 1
        self.events.append(Read("r", thread, level, at_least, self.now, self.now + 0.5, _tuple(names)))
        self.now += 1
        return self

    def add(self, *events: Event) -> Tale:
        self.events += events
        return self


def _tuple(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def sample(t: float, cursor: int = 5, floor: int = 5, **fields: Any) -> Sample:
    plain = {"watermarks": {T: 5}, "end": 9, "log_bytes": 10, "rss": {"w": 10}, "cursors": {0: (1, cursor)}}
    return Sample(t=t, settled={0: floor}, **(plain | fields))


def told(tale: Tale, final: Sequence[str] | None, thread: str = T, **rest: Any) -> list[str]:
    """Return the rules that the history breaks."""
    end = Final({} if final is None else {thread: list(final)}, **rest)
    history = History.of(tale.events)
    return [v.rule for check in checkers.CHECKERS for v in check(history, end)]


def clean() -> Tale:
    return (
        Tale()
        .write("a", seq=1)
        .read(["a"])
        .write("b", seq=2)
        .read(["a"], "eventual")
        .read(["a", "b"], "read-your-writes", at_least=2)
    )


def test_a_clean_history_passes() -> None:
    assert told(clean(), ["a", "b"]) == []


BAD: dict[str, tuple[Callable[[], Tale], Sequence[str], str]] = {
    "an acknowledged message is gone": (clean, ["a"], "lost"),
    "the thread is gone": (lambda: Tale().write("a", seq=1), [], "lost"),
    "a message is there twice": (clean, ["a", "b", "b"], "duplicated"),
    "a read shows a message twice": (lambda: clean().read(["a", "b", "a"]), ["a", "b"], "duplicated"),
    "nobody wrote it": (clean, ["a", "b", "z"], "phantom"),
    "it was rejected": (lambda: clean().write("c", outcome="rejected"), ["a", "b", "c"], "phantom"),
    "a read shows what was rejected": (
        lambda: clean().write("c", outcome="rejected").read(["a", "b", "c"]), ["a", "b"], "phantom",
    ),
    "a read shows what was not tried yet": (
        lambda: clean().read(["a", "b", "c"]).write("c", seq=3), ["a", "b", "c"], "phantom",
    ),
    "two change places": (clean, ["b", "a"], "reordered"),
    "two have one position": (lambda: Tale().write("a", seq=1).write("b", seq=1), ["a", "b"], "reordered"),
    "a later one has an earlier position": (
        lambda: Tale().write("a", seq=2).write("b", seq=1), ["b", "a"], "reordered",
    ),
    "an unknown one lands behind the writer's next": (
        lambda: Tale().write("a", outcome="unknown").write("b", seq=2), ["b", "a"], "reordered",
    ),
    "an eventual read shows a state that never was": (
        lambda: clean().read(["b"], "eventual"), ["a", "b"], "not a past state",
    ),
    "a strong read misses an acknowledged write": (lambda: clean().read(["a"]), ["a", "b"], "stale"),
    "a read of its own writes misses another's": (lambda: clean().read(["a"], "read-your-writes"), ["a", "b"], "stale"),
    "a read shows nothing of a thread that is there": (lambda: clean().read(None), ["a", "b"], "stale"),
    "an eventual read misses its receipt": (
        lambda: clean().read(["a"], "eventual", at_least=2), ["a", "b"], "stale",
    ),
    "seen, then unseen": (
        lambda: Tale().write("a", seq=1).write("b", outcome="unknown").read(["a", "b"]).read(["a"]),
        ["a", "b"],
        "flicker",
    ),
    "eventually seen, then unseen": (
        lambda: clean().read(["a", "b"], "eventual").read(["a"], "eventual"), ["a", "b"], "flicker",
    ),
    "seen, then not stored": (
        lambda: Tale().write("a", outcome="unknown").read(["a"]), [], "not a past state",
    ),
    "a cursor goes back": (lambda: clean().add(sample(1.0, 5), sample(2.0, 4, 4)), ["a", "b"], "watermark"),
    "a term goes back": (
        lambda: clean().add(sample(1.0, cursors={0: (2, 5)}), sample(2.0, cursors={0: (1, 5)})),
        ["a", "b"],
        "watermark",
    ),
    "a watermark goes back": (
        lambda: clean().add(sample(1.0), sample(2.0, watermarks={T: 4})), ["a", "b"], "watermark",
    ),
    "a cursor is beyond the log": (lambda: clean().add(sample(1.0, 10)), ["a", "b"], "watermark"),
    "the log loses its end": (lambda: clean().add(sample(1.0), sample(2.0, end=8)), ["a", "b"], "watermark"),
    "settled before it is": (lambda: clean().add(sample(1.0, cursor=4, floor=5)), ["a", "b"], "settled before commit"),
    "poison is lost": (lambda: clean().add(Poison(1.0, T, 3, b"x")), ["a", "b"], "quarantine"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_history_is_found(what: str) -> None:
    tale, final, rule = BAD[what]
    assert rule in told(tale(), final)


def test_a_thread_that_nobody_wrote_to_is_a_phantom() -> None:
    assert "phantom" in told(clean(), ["z"], "own-2")


def test_poison_must_be_kept_as_it_is_and_alone() -> None:
    tale = clean().add(Poison(1.0, T, 3, b"x"))
    assert told(tale, ["a", "b"], quarantined={3: ParkedEntry(T, b"x")}) == []
    assert told(tale, ["a", "b"], quarantined={3: ParkedEntry(T, b"y")}) == ["quarantine"]
    assert told(clean(), ["a", "b"], quarantined={3: ParkedEntry(T, b"x")}) == ["quarantine"]


def edited(*outcomes: str) -> Tale:
    tale = Tale()
    kinds = [("add", "a"), ("add", "b"), ("remove", "a")]
    for (kind, name), outcome in zip(kinds, outcomes, strict=False):
        tale.write(name, kind=kind, thread=E, outcome=outcome)
    return tale


def test_edits_that_can_have_been_pass() -> None:
    assert told(edited("ok", "ok", "ok").read(["b"], thread=E), ["b"], E) == []
    assert told(edited("ok", "unknown", "ok"), None, E) == []
    assert told(edited("ok", "unknown", "ok"), ["b"], E) == []
    assert told(edited("ok", "rejected", "ok").read(None, thread=E), [], E) == []
    assert told(edited("ok").write(kind="drop", thread=E).read(["a"], "eventual", thread=E), None, E) == []


@pytest.mark.parametrize(
    ("tale", "final"),
    [
        (edited("ok", "ok", "ok"), ["a", "b"]),
        (edited("ok", "ok"), ["a"]),
        (edited("ok", "rejected"), ["a", "b"]),
        (edited("ok", "ok").read(["a"], thread=E), ["a", "b"]),
        (edited("ok", "ok").read(["b"], "eventual", thread=E), ["a", "b"]),
        (edited("ok").write(kind="drop", thread=E), ["a"]),
        (edited("ok", "unknown").write("a", "b", kind="saw", thread=E), ["a"]),
        (edited("ok", "rejected").write("a", "b", kind="saw", thread=E), ["a"]),
    ],
)
def test_edits_that_cannot_have_been_are_found(tale: Tale, final: list[str]) -> None:
    assert "edits" in told(tale, final, E)


def test_a_slow_recovery_is_found() -> None:
    def rules(seconds: float | None) -> list[str]:
        history = History.of([Recovery(1.0, ("cut",), seconds, seconds)])
        return [v.rule for v in checkers.slow_recovery(history, Final({}))]

    assert rules(3.0) == []
    assert rules(11.0) == rules(None) == ["slow recovery"]


def test_what_grows_without_bounds_is_found() -> None:
    history = History.of([sample(1.0)])
    assert checkers.unbounded(history, Final({}), log_bytes=10, rss_bytes=10) == []
    assert len(checkers.unbounded(history, Final({}), log_bytes=9, rss_bytes=9)) == 2


def test_calls_that_end_late_or_strangely_are_found() -> None:
    def rules(*events: Event) -> list[str]:
        return [v.rule for v in checkers.dishonest(History.of(events), Final({}), deadline_s=6.0)]

    late = Failed("w", "append", 1.0, 9.0, "LogUnavailable", "")
    assert rules(Failed("w", "append", 1.0, 2.0, "LogUnavailable", "")) == []
    assert rules(Failed("w", "append", 1.0, 2.0, "KeyError", "")) == ["undocumented error"]
    assert rules(late) == ["deadline"]
    stopped = Fault(2.0, "stop writer", "inject", "w"), Fault(6.0, "stop writer", "heal", "w")
    assert rules(late, *stopped) == []
    assert rules(late, Fault(2.0, "stop writer", "inject", "v"), Fault(6.0, "stop writer", "heal", "v")) == ["deadline"]


@given(st.randoms(use_true_random=False))
def test_what_a_correct_store_does_passes_and_its_damage_does_not(chance: random.Random) -> None:
    """Two concurrent writers, and reads that show anything the promise allows; then one message is lost."""
    tale, log, stored, open_ = Tale(), list[str](), 0, dict[str, tuple[int, str]]()
    for n in range(chance.randint(2, 30)):
        by = chance.choice("vw")
        if by in open_ and chance.random() < 0.7:
            op, name = open_.pop(by)
            took_place = chance.random() < 0.9
            if took_place:
                log.append(name)
            known = chance.random() < 0.8
            tale.end(op, len(log), ("ok" if took_place else "rejected") if known else "unknown", by=by)
        elif by not in open_:
            open_[by] = tale.begin(f"{by}{n}", by=by), f"{by}{n}"
        stored = chance.randint(stored, len(log))
        if chance.random() < 0.5:
            eventual = chance.random() < 0.5
            tale.read(log[:stored] if eventual else list(log), "eventual" if eventual else "strong")
    assert told(tale, log) == []
    acknowledged = [n for o in History.of(tale.events).threads[T].ops if o.ok for n in o.names]
    if acknowledged:
        gone = chance.choice(acknowledged)
        assert "lost" in told(tale, [n for n in log if n != gone])


def test_what_was_recorded_is_read_back_without_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    recorder = Recorder(path)
    for event in clean().events:
        recorder.write(event)
    recorder.close()
    with path.open("ab") as file:
        file.write(b'["begin",1')
    assert load([path]) == History.of(clean().events)
