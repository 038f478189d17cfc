"""The life of a dispatch as a table: random lives of a thread, and what must hold after every step."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bufstore.errors import ClaimInterrupted, ConfigError, InvalidRecord, StaleClaim
from bufstore.mailbox import decisions
from bufstore.mailbox.config import MailboxConfig, NatsMailboxNames
from bufstore.mailbox.decisions import TRANSITIONS, Step
from bufstore.mailbox.model import OWN, Dispatch, MailboxThread, Status, check_invariants
from bufstore.mailbox.nats_keys import Keys
from bufstore.mailbox.worker import backoff_s

_DOCS = Path(__file__).parents[2] / "docs"

STEPS = (
    "enqueue",
    "claim",
    "ack",
    "nack",
    "dead_letter",
    "expire",
    "cancel",
    "supersede",
    "interrupt",
    "extend",
    "start",
)


class _Model:
    """A thread whose steps are stored one by one, as in a backend."""

    def __init__(self) -> None:
        self.number = 0
        self.thread = MailboxThread(thread_id="t")
        self.queue: list[Dispatch] = []
        self.ended: list[Dispatch] = []
        self.claims: list[Dispatch] = []
        self.now = 1000

    def apply(self, step: Step | None) -> None:
        if step is None:
            return
        self.number += 1
        active = step.thread.active
        if active is not None and active.token == OWN:
            active = replace(active, token=self.number)
            self.claims.append(active)
        epoch = self.number if step.thread.epoch == OWN else step.thread.epoch
        self.thread = replace(step.thread, active=active, epoch=epoch, version=self.number, step="step")
        for move in step.moves:
            if move.before is not None:
                self.queue.remove(move.before)
            if move.after is not None:
                (self.ended if move.after.status.finished else self.queue).append(move.after)

    def do(self, what: str, n: int) -> None:
        self.now += n
        free = self.thread.active is None
        claim = self.claims[n % len(self.claims)] if self.claims else None
        queued = [d for d in self.queue if not decisions.is_stale(d, self.thread)]
        if what == "enqueue":
            self.number += 1
            fields: dict[str, Any] = {"epoch": self.thread.epoch, "position": self.number, "max_attempts": 1 + n % 3}
            self.queue.append(Dispatch(thread_id="t", dispatch_id=str(self.number), **fields))
        elif what == "claim" and free and queued:
            head = min(queued, key=lambda d: d.order)
            self.apply(decisions.claim(self.thread, head, decisions.Claiming("w", self.now + 50, self.now)))
        elif what == "expire":
            self.apply(decisions.expire(self.thread, self.now))
        elif what == "cancel" and self.queue:
            self.apply(decisions.cancel(self.thread, self.queue[n % len(self.queue)], self.now))
        elif what == "supersede":
            self.apply(decisions.supersede_stale(self.thread, self.queue, self.now))
            if n % 2:
                self.apply(decisions.supersede_claimed(self.thread, self.now))
        elif what == "interrupt":
            self.apply(decisions.interrupt(self.thread, waits=bool(queued)))
        elif claim is not None:
            self.end(what, claim)

    def end(self, what: str, claim: Dispatch) -> None:
        active = self.thread.active
        steps = {
            "ack": lambda: decisions.ack(self.thread, claim, self.now),
            "nack": lambda: decisions.nack(self.thread, claim, self.now + 5, "error", self.now),
            "dead_letter": lambda: decisions.dead_letter(self.thread, claim, None, self.now),
            "extend": lambda: decisions.extend(self.thread, claim, self.now + 70, self.now),
            "start": lambda: decisions.start(self.thread, claim, "i", self.now),
        }
        if what not in steps:
            return
        if active is None or active.token != claim.token:
            with pytest.raises(StaleClaim):
                steps[what]()
        elif what in ("extend", "start") and decisions.is_stale(active, self.thread):
            with pytest.raises(ClaimInterrupted):
                steps[what]()
        else:
            self.apply(steps[what]())


#: Steps that lead somewhere come more often: else next to no life has a second claim.
WEIGHTED = (*STEPS, *("enqueue", "claim", "expire") * 2)


@given(st.lists(st.tuples(st.sampled_from(WEIGHTED), st.integers(0, 40)), min_size=30, max_size=60))
def test_whatever_happens_the_invariants_hold(steps: list[tuple[str, int]]) -> None:
    model = _Model()
    for what, n in steps:
        before = {d.dispatch_id: d for d in model.ended}
        enqueued = len(model.queue) + len(model.ended) + (model.thread.active is not None)
        model.do(what, n)
        active = [model.thread.active] if model.thread.active is not None else []
        everything = [*model.queue, *model.ended, *active]
        for d in everything:
            check_invariants(d)
        # None is lost or doubled, and those that have ended stay as they are.
        assert len(everything) == enqueued + (what == "enqueue")
        assert len({d.dispatch_id for d in everything}) == len(everything)
        assert before.items() <= {d.dispatch_id: d for d in model.ended}.items()
        assert {d.status for d in model.queue} <= {Status.QUEUED}
        assert {d.status for d in active} <= {Status.CLAIMED}
        # Tokens only grow.
        tokens = [c.token for c in model.claims]
        assert tokens == sorted(set(tokens))


@given(st.integers(1, 10_000), st.integers(0, 10_000), st.integers(1, 10_000))
def test_who_was_handed_back_without_a_delay_waits_for_no_clock(created_at_ms: int, delay_ms: int, now_ms: int) -> None:
    """The server's clock may have been ahead when the dispatch came. It is returned, not new, in any case."""
    fields = {"created_at_ms": created_at_ms, "available_at_ms": delay_ms and created_at_ms + delay_ms}
    queued = Dispatch(thread_id="t", dispatch_id="d", max_attempts=1, **fields)
    claim = decisions.claim(MailboxThread(thread_id="t"), queued, decisions.Claiming("w", now_ms + 50, now_ms))
    active = replace(claim.thread.active, token=1)
    (move,) = decisions.release(replace(claim.thread, active=active), active, now_ms).moves
    after = move.after
    assert after is not None
    assert (after.status, after.attempts) == (Status.QUEUED, 0)
    assert after.available_at_ms <= max(now_ms, queued.available_at_ms, queued.created_at_ms * bool(delay_ms) + 1)
    assert Keys("m").is_returned(after)


def test_the_table_says_what_leads_where() -> None:
    assert set(TRANSITIONS) == {status for status in Status if not status.finished}
    assert all(after is not status for status, afters in TRANSITIONS.items() for after in afters)
    assert {after for afters in TRANSITIONS.values() for after in afters} == set(Status)


def _claimed_model(max_attempts: int, *, interrupted: bool) -> _Model:
    model = _Model()
    model.number = 1
    model.queue.append(Dispatch(thread_id="t", dispatch_id="1", position=1, max_attempts=max_attempts))
    model.do("claim", 0)
    if interrupted:
        model.do("interrupt", 0)
    return model


def test_each_step_leads_where_the_documentation_says() -> None:
    rows = re.findall(r"^\| (queued|claimed) \| (.+?) \| (.+?) \|$", (_DOCS / "MAILBOX.md").read_text(), re.MULTILINE)
    told = {
        (before, by.split(",")[0]): set(re.findall(r"\w+", to)) & {status.value for status in Status}
        for before, by, to in rows
    }
    told["claimed", "expire"] = told["claimed", "nack"]

    found = defaultdict[tuple[str, str], set[str]](set)
    for max_attempts, interrupted in product((1, 3), (False, True)):
        model = _claimed_model(max_attempts, interrupted=interrupted)
        thread, claim, now = model.thread, model.claims[0], model.now
        for by, step in {
            "ack": decisions.ack(thread, claim, now),
            "nack": decisions.nack(thread, claim, now, None, now),
            "expire": decisions.expire(thread, now + 100),
            "dead_letter": decisions.dead_letter(thread, claim, None, now),
            "supersede_claimed": decisions.supersede_claimed(thread, now),
        }.items():
            assert step is not None
            after = step.moves[0].after
            assert after is not None
            found["claimed", by].add(after.status.value)
    waiting = Dispatch(thread_id="t", dispatch_id="1", position=1)
    thread = MailboxThread(thread_id="t")
    active = decisions.claim(thread, waiting, decisions.Claiming("w", 50, 0)).thread.active
    assert active is not None
    found["queued", "claim"] = {active.status.value}
    cancelled = decisions.cancel(thread, waiting, 0)
    superseded = decisions.supersede_stale(replace(thread, epoch=1), [waiting], 0)
    for by, step in (("cancel", cancelled), ("interrupt", superseded)):
        assert step is not None
        found["queued", by] = {move.after.status.value for move in step.moves if move.after is not None}
    assert found == told


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": Status.CLAIMED},
        {"token": 5},
        {"lease_until_ms": 5},
        {"claimed_by": "w"},
        {"completed_at_ms": 5},
        {"status": Status.ACKED},
        {"status": Status.ACKED, "completed_at_ms": 5, "token": 3},
        {"attempts": 5},
        {"attempts": 6, "status": Status.DEAD, "completed_at_ms": 5},
    ],
)
def test_a_record_that_breaks_an_invariant_is_not_stored(wrong: dict[str, Any]) -> None:
    right = Dispatch(thread_id="t", dispatch_id="d")
    assert check_invariants(right) is right
    with pytest.raises(InvalidRecord):
        check_invariants(replace(right, **wrong))


def test_backoff_doubles_up_to_its_cap() -> None:
    assert [backoff_s(n, 0.5, 30) for n in (1, 2, 3, 6, 7, 8, 10_000)] == [0.5, 1, 2, 16, 30, 30, 30]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_s": 0},
        {"lease_s": 0.0001},
        {"sweep_limit": 1 << 31},
        {"signal_batch_size": 1 << 31},
        {"timeout_s": float("inf")},
        {"signal_nack_max_delay_s": 0.1},
        {"signal_fetch_expires_s": 60.0},
        {"payload_max": 1 << 20},
        {"max_concurrent_handlers": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MailboxConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"bucket": "a.b"}, {"consumer": ""}, {"live_subject": "a*"}, {"replicas": 6}, {"max_bytes": 0}, {"max_bytes": -2}],
)
def test_names_that_nats_cannot_have_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NatsMailboxNames(**wrong)
