"""The outcome of a step whose answer was lost, or that rests on what this process remembers of the thread."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from bufstore import BufstoreError, LogFull, LogUnavailable, TooLarge
from bufstore.jetstream.messages import AppendUnknown, Conflict
from bufstore.mailbox import Dispatch, MailboxConfig, MemoryMailbox, Status, StepUnknown
from bufstore.mailbox.memory import MemoryBackend
from bufstore.mailbox.model import MailboxThread
from bufstore.mailbox.store import MailboxStore


class _Failing(MemoryBackend):
    """A backend that stores nothing, and fails with these reasons, one after the other."""

    reasons: list[Exception]

    async def add(self, draft: Dispatch, *, own_id: bool, now_ms: int) -> Dispatch:
        raise self.reasons.pop(0) if len(self.reasons) > 1 else self.reasons[0]


@pytest.mark.parametrize("last", [LogFull("full"), TooLarge(2, 1), LogUnavailable("away")])
async def test_a_refusal_after_a_lost_answer_does_not_say_that_nothing_was_done(last: BufstoreError) -> None:
    backend = _Failing(MemoryMailbox(), time.time, 1.0)
    store = MailboxStore(backend, MailboxConfig(timeout_s=0.05))
    backend.reasons = [AppendUnknown("no answer"), last]  # the first try may still arrive
    with pytest.raises(StepUnknown, match=re.escape(str(last))):
        await store.enqueue("t")
    backend.reasons = [last]
    with pytest.raises(type(last)):
        await store.enqueue("t")


def _instances() -> tuple[MailboxStore, MailboxStore]:
    shared = MemoryMailbox()
    a, b = (MailboxStore(MemoryBackend(shared, time.time, 1.0), MailboxConfig()) for _ in range(2))
    return a, b


async def _claimed(store: MailboxStore, **options: Any) -> Dispatch:
    claim = await store.claim("t", "w", **options)
    assert claim is not None
    return claim


def _lose_an_answer(store: MailboxStore, meanwhile: Callable[[], Awaitable[object]]) -> None:
    """Have the next write be done and get no answer; `meanwhile` comes before the next attempt."""
    backend: Any = store.backend
    write = backend.write

    async def lost(*args: Any) -> MailboxThread:
        backend.write = write
        await write(*args)
        await meanwhile()
        raise AppendUnknown("lost on its way back")

    backend.write = lost


def _lose_an_answer_to_a_claim(store: MailboxStore, other: MailboxStore) -> list[Dispatch]:
    """Do `_lose_an_answer`, where another instance claims meanwhile. Return where that claim will be."""
    later: list[Dispatch] = []

    async def claim() -> None:
        later.append(await _claimed(other))

    _lose_an_answer(store, claim)
    return later


async def test_a_claim_of_another_instance_ends_here_whatever_was_claimed_here_before() -> None:
    a, b = _instances()
    await a.enqueue("t")
    now_ms = a.backend.now_ms()
    first = await _claimed(a, lease_s=1.0, now_ms=now_ms)
    await b.reclaim_expired(now_ms=now_ms + 2000)
    second = await _claimed(b, now_ms=now_ms + 2000)
    assert second.token != first.token
    assert (await a.ack(second)).status is Status.ACKED


async def test_an_interrupt_without_an_answer_supersedes_nothing_that_came_since() -> None:
    a, b = _instances()
    await a.enqueue("t", b"before")
    later: list[Dispatch] = []

    async def enqueue() -> None:
        later.append(await b.enqueue("t", b"since"))

    _lose_an_answer(a, enqueue)
    done = await a.interrupt("t")
    assert [d.payload for d in done.superseded] == [b"before"]
    found = await b.load_dispatch("t", later[0].dispatch_id)
    assert found is not None and found.status is Status.QUEUED
    assert await a.current_epoch("t") == done.epoch


async def test_superseding_without_an_answer_ends_no_claim_that_came_since() -> None:
    a, b = _instances()
    for _ in range(2):
        await a.enqueue("t")
    first = await _claimed(a)
    later = _lose_an_answer_to_a_claim(a, b)
    with pytest.raises(StepUnknown, match="another claim"):
        await a.supersede_claimed("t")
    assert (await b.ack(later[0])).status is Status.ACKED
    ended = await b.load_dispatch("t", first.dispatch_id)
    assert ended is not None and ended.status is Status.SUPERSEDED


async def test_a_nack_without_an_answer_is_not_said_to_have_come_too_late() -> None:
    a, b = _instances()
    await a.enqueue("t")
    claim = await _claimed(a)
    later = _lose_an_answer_to_a_claim(a, b)
    with pytest.raises(StepUnknown, match="the retry was refused"):
        await a.nack(claim)
    assert later[0].attempts == 1


@pytest.mark.parametrize(("count", "size"), [(1, 1), (100, 1), (101, 1), (250, 1), (7, 100 << 10)])
async def test_an_interrupt_lists_all_that_it_supersedes(count: int, size: int) -> None:
    """However many there are, and in however many parts they are taken out of the queue."""
    a, _ = _instances()
    put = {(await a.enqueue("t", b"x" * size)).dispatch_id for _ in range(count)}
    done = await a.interrupt("t")
    assert done.complete
    assert [d.status for d in done.superseded] == [Status.SUPERSEDED] * count
    assert {d.dispatch_id for d in done.superseded} == put
    assert (await a.count_by_status("t"))[Status.SUPERSEDED] == count
    assert await a.claim("t", "w") is None


async def test_an_interrupt_lists_all_also_if_the_thread_moves_meanwhile() -> None:
    a, b = _instances()
    await b.enqueue("t")
    claim = await _claimed(b)
    put = {(await a.enqueue("t")).dispatch_id for _ in range(3)}
    backend: Any = a.backend
    queued = backend.queued

    async def moved(*args: Any) -> list[Dispatch]:
        backend.queued = queued
        found: list[Dispatch] = await queued(*args)
        await b.record_result(claim, "done")
        return found

    backend.queued = moved
    done = await a.interrupt("t")
    assert done.complete and {d.dispatch_id for d in done.superseded} == put
    assert done.active is not None and done.active.dispatch_id == claim.dispatch_id


async def test_an_interrupt_does_not_list_what_a_claim_has_taken_out_meanwhile() -> None:
    a, b = _instances()
    put = {(await a.enqueue("t")).dispatch_id for _ in range(3)}
    backend: Any = a.backend
    queued = backend.queued

    async def claimed(*args: Any) -> list[Dispatch]:
        backend.queued = queued
        assert await b.claim("t", "w") is None
        found: list[Dispatch] = await queued(*args)
        return found

    backend.queued = claimed
    done = await a.interrupt("t")
    assert (done.superseded, done.complete) == ([], True)
    assert {d.dispatch_id for d in await a.list_dispatches("t", [Status.SUPERSEDED])} == put


async def test_a_step_without_an_answer_that_others_overtake_is_not_said_to_be_undone() -> None:
    store = MailboxStore(MemoryBackend(MemoryMailbox(), time.time, 1.0), MailboxConfig(timeout_s=0.05))
    await store.enqueue("t")
    claim, backend = await _claimed(store), cast(Any, store.backend)
    lost = [AppendUnknown("lost on its way there")]

    async def overtaken(*_: Any) -> MailboxThread:
        raise lost.pop() if lost else Conflict("the thread has moved")

    backend.write = overtaken
    with pytest.raises(StepUnknown, match="keep changing"):
        await store.extend_lease(claim)
    with pytest.raises(LogUnavailable, match="nothing was done"):
        await store.extend_lease(claim)
