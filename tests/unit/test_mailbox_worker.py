"""A worker of the mailbox in memory: lost or interrupted work ends in its own time, and delays nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from bufstore.errors import Closed, InvalidId, MalformedEntry, StoreMisconfigured, StoreUnavailable, TooLarge
from bufstore.jetstream.messages import AppendUnknown, Conflict
from bufstore.mailbox import Dispatch, MailboxConfig, MemoryMailbox, Status, StepUnknown, Sweeper, Worker
from bufstore.mailbox.decisions import Step
from bufstore.mailbox.memory import MemoryBackend, MemoryMailboxStore
from bufstore.mailbox.model import MailboxThread
from bufstore.mailbox.store import MailboxStore
from helpers import eventually


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bufstore.mailbox.worker._WATCH_S", 0.02)


async def test_a_claim_that_is_lost_and_still_ends_takes_nothing_from_the_next_of_its_thread() -> None:
    """Regression: the next claim was not acknowledged, and its lease was renewed for ever, even after `aclose`."""
    began = {name: asyncio.Event() for name in (b"first", b"second")}
    ends = {name: asyncio.Event() for name in (b"first", b"second")}

    async def handle(dispatch: Dispatch) -> None:
        began[dispatch.payload].set()
        try:
            await ends[dispatch.payload].wait()
        except asyncio.CancelledError:
            await ends[dispatch.payload].wait()  # it takes its time
            raise

    async with MemoryMailboxStore() as mailbox:
        async with Worker(mailbox, "w", handle):
            first, second = [await mailbox.enqueue("t", payload) for payload in began]
            await began[b"first"].wait()
            assert await mailbox.supersede_claimed("t") is not None
            await began[b"second"].wait()
            ends[b"first"].set()
            await asyncio.sleep(0.1)
            ends[b"second"].set()

            async def done() -> bool:
                found = await mailbox.load_dispatch("t", second.dispatch_id)
                return found is not None and found.status is Status.ACKED

            await eventually(done)
            found = await mailbox.load_dispatch("t", first.dispatch_id)
            assert found is not None
            assert found.status is Status.SUPERSEDED
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "bufstore-renew"]


@pytest.mark.parametrize("error", [KeyError("unforeseen"), asyncio.CancelledError()], ids=lambda e: type(e).__name__)
async def test_nothing_unforeseen_ends_a_worker(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    done = asyncio.Event()

    async def handle(_: Dispatch) -> None:
        await asyncio.sleep(0.1)
        done.set()

    def once(instead_of: Any) -> Any:
        raised = False

        async def call(*arguments: Any) -> Any:
            nonlocal raised
            if not raised:
                raised = True
                raise error
            return await instead_of(*arguments)

        return call

    async with MemoryMailboxStore() as mailbox:
        monkeypatch.setattr(mailbox, "pull_signals", once(mailbox.pull_signals))
        monkeypatch.setattr(mailbox.backend, "held", once(mailbox.backend.held))
        async with Worker(mailbox, "w", handle) as worker:
            await mailbox.enqueue("t", b"")
            await asyncio.wait_for(done.wait(), 10)
            assert worker.trouble is None
            assert worker._watching is not None
            assert not worker._watching._task.done()


async def test_a_claim_that_cannot_be_taken_back_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryMailboxStore(config=MailboxConfig(sweep_interval_s=0.01, keep_finished_s=0.001)) as mailbox:

        async def fails(**_: Any) -> list[Dispatch]:
            raise TooLarge(1 << 17, 1 << 16)

        done = await mailbox.enqueue("done")
        claim = await mailbox.claim("done", "w")
        assert claim is not None
        await mailbox.ack(claim)
        monkeypatch.setattr(mailbox, "reclaim_expired", fails)
        due_ms = mailbox.backend.now_ms() + 60_000
        await mailbox.enqueue("due", available_at_ms=due_ms)
        monkeypatch.setattr(mailbox.backend, "now_ms", lambda: due_ms + 1)
        sweeper = Sweeper(mailbox)
        assert await sweeper.sweep()
        assert sweeper.trouble is not None
        assert sweeper.trouble.startswith("TooLarge")
        assert "due" in {signal.thread_id for signal in await mailbox.pull_signals(10, 1.0)}
        assert await mailbox.load_dispatch("done", done.dispatch_id) is None


async def test_nothing_unforeseen_ends_a_sweeper(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryMailboxStore(config=MailboxConfig(sweep_interval_s=0.05)) as mailbox:
        sweeps, errors = mailbox.backend.sweeps, [KeyError("unforeseen"), asyncio.CancelledError()]

        async def fails_at_first(interval_s: float) -> bool:
            if errors:
                raise errors.pop()
            return await sweeps(interval_s)

        monkeypatch.setattr(mailbox.backend, "sweeps", fails_at_first)
        async with Sweeper(mailbox) as sweeper:

            async def passed() -> bool:
                return sweeper.last_pass is not None

            await eventually(passed)


async def test_the_line_of_a_handler_that_failed_has_its_thread_and_where_it_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: of an app's own error nothing but its type and text was to be had anywhere."""

    async def handle(_: Dispatch) -> None:
        raise ValueError("no such bag")

    async with MemoryMailboxStore() as mailbox, Worker(mailbox, "w", handle):
        await mailbox.enqueue("thread-7", max_attempts=1)
        await eventually(lambda: _logged(caplog, "mailbox_handler_failed"))
    (line,) = [r for r in caplog.records if getattr(r, "action", "") == "mailbox_handler_failed"]
    assert "'thread-7'" in line.getMessage()
    assert "raise ValueError" in caplog.text


async def _logged(caplog: pytest.LogCaptureFixture, action: str) -> bool:
    return any(getattr(record, "action", "") == action for record in caplog.records)


async def test_a_handler_that_is_interrupted_is_told_once_and_cleans_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ended = asyncio.Event()

    async def handle(dispatch: Dispatch) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)  # as a rollback does, while the worker looks for interrupted work
            ended.set()

    began = asyncio.Event()
    async with MemoryMailboxStore() as mailbox, Worker(mailbox, "w", handle):
        await mailbox.enqueue("t", b"x")
        await began.wait()
        await mailbox.interrupt("t")
        async with asyncio.timeout(5):
            await ended.wait()
        assert mailbox.statistics().counts["work_interrupted"] == 1
    assert await _logged(caplog, "mailbox_interrupted")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]  # nothing has failed


async def test_a_handler_that_an_apps_own_code_cancels_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(_: Dispatch) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async with MemoryMailboxStore() as mailbox, Worker(mailbox, "w", handle):
        await mailbox.enqueue("t", max_attempts=1)
        await eventually(lambda: _logged(caplog, "mailbox_handler_failed"))


async def test_a_handler_that_an_apps_own_code_has_cancelled_is_still_interrupted() -> None:
    """Regression: a worker took any cancellation of the handler's task for its own, and cancelled it no more."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def handle(_: Dispatch) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with suppress(asyncio.CancelledError):  # and does not call `uncancel`
            await asyncio.sleep(0)
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with MemoryMailboxStore() as mailbox, Worker(mailbox, "w", handle) as worker:
        await mailbox.enqueue("t", b"x")
        await began.wait()
        await mailbox.interrupt("t")
        await asyncio.wait_for(ended.wait(), 10)
        assert mailbox.statistics().counts["work_interrupted"] == 1
        await worker.aclose(0)


async def test_a_handler_that_fails_before_it_gives_its_awaitable_is_handed_back_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: the thread's task ended, the claim stayed until its lease was over, and nothing was logged."""

    async def work(_: Any) -> None: ...

    async with MemoryMailboxStore() as mailbox, Worker(mailbox, "w", lambda d: work(json.loads(d.payload))):
        put = await mailbox.enqueue("t", b"no json", max_attempts=1)

        async def dead() -> bool:
            found = await mailbox.load_dispatch("t", put.dispatch_id)
            return found is not None and found.status is Status.DEAD and "JSONDecodeError" in str(found.last_error)

        await eventually(dead)
    assert "failed: JSONDecodeError" in caplog.text


def test_a_worker_without_a_name_is_refused() -> None:
    """Regression: it began, could claim nothing, and reported no trouble."""

    async def handle(_: Dispatch) -> None: ...

    with pytest.raises(InvalidId):
        Worker(MemoryMailboxStore(), "", handle)


async def test_a_handler_whose_error_has_no_text_is_handed_back() -> None:
    """Regression: the claim was neither handed back nor renewed: its thread stood until its lease was over."""

    class Wordless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    async def handle(_: Dispatch) -> None:
        raise Wordless

    async with MemoryMailboxStore() as mailbox, Worker(mailbox, "w", handle):
        put = await mailbox.enqueue("t", max_attempts=1)

        async def dead() -> bool:
            found = await mailbox.load_dispatch("t", put.dispatch_id)
            return found is not None and found.status is Status.DEAD and "Wordless" in str(found.last_error)

        await eventually(dead)


class Lossy(MemoryBackend):
    """A backend that loses the answer to the next write, after `then` is called."""

    then: Callable[[], Awaitable[object]] | None = None

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        after = await super().write(before, step, now_ms)
        then, self.then = self.then, None
        if then is not None:
            await then()
            raise AppendUnknown("the answer was lost")
        return after


async def test_that_there_is_nothing_to_do_is_not_said_of_a_step_that_may_be_done() -> None:
    shared = MemoryMailbox()
    other, backend = await MemoryMailboxStore(shared).__aenter__(), Lossy(shared, time.time, 30.0)
    mailbox = MailboxStore(backend, MailboxConfig())
    first = await mailbox.enqueue("t", b"x")
    await mailbox.enqueue("t", b"y")
    backend.then = lambda: other.claim("t", "another")
    with pytest.raises(StepUnknown):
        await mailbox.cancel("t", first.dispatch_id)
    found = await mailbox.load_dispatch("t", first.dispatch_id)
    assert found is not None
    assert found.status is Status.CANCELLED
    backend.then = lambda: other.interrupt("t")
    with pytest.raises(StepUnknown):
        await mailbox.supersede_claimed("t")


async def test_that_nothing_was_claimed_is_not_said_of_a_claim_that_may_be_held() -> None:
    """Regression: the caller was told that there was no work, and the thread stood until the end of the lease."""
    shared = MemoryMailbox()
    other, backend = await MemoryMailboxStore(shared).__aenter__(), Lossy(shared, time.time, 30.0)
    mailbox = MailboxStore(backend, MailboxConfig())
    await mailbox.enqueue("t")
    backend.then = lambda: other.interrupt("t")
    claim = await mailbox.claim("t", "w", lease_s=3600)
    assert claim is not None
    assert (await mailbox.ack(claim)).status is Status.ACKED


class Slow(MemoryBackend):
    """A backend whose next write takes `takes_s` by its clock. `fails`: it is then refused."""

    def __init__(self, shared: MemoryMailbox) -> None:
        super().__init__(shared, lambda: self.at_s, 30.0)
        self.at_s, self.takes_s, self.fails = time.time(), 0.0, False

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        takes_s, self.takes_s = self.takes_s, 0.0
        if takes_s and self.fails:
            self.at_s += takes_s
            raise Conflict("the thread has moved")
        after = await super().write(before, step, now_ms)
        self.at_s += takes_s
        return after


async def test_a_claim_holds_for_its_whole_lease_however_often_it_was_tried() -> None:
    """Regression: the lease began with the first try, so a claim could be over when it was there, and be taken back."""
    backend = Slow(MemoryMailbox())
    mailbox = MailboxStore(backend, MailboxConfig())
    await mailbox.enqueue("t")
    backend.takes_s, backend.fails = 60.0, True
    claim = await mailbox.claim("t", "w", lease_s=3)
    assert claim is not None
    assert claim.lease_until_ms == backend.now_ms() + 3000


async def test_a_claim_that_is_over_when_it_is_there_is_not_worked_on(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a worker took its lease to begin with the answer, and worked on beside the next holder."""
    caplog.set_level("INFO")
    backend, stopped = Slow(MemoryMailbox()), asyncio.Event()

    async def handle(_: Dispatch) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    mailbox = MailboxStore(backend, MailboxConfig())
    await mailbox.enqueue("t")
    backend.takes_s = 60.0
    async with Worker(mailbox, "w", handle) as worker:
        await asyncio.wait_for(stopped.wait(), 10)
        assert mailbox.statistics().counts["work_lost"] == 1
        await eventually(lambda: _logged(caplog, "mailbox_claim_lost"))
        await worker.aclose(0)


class Gated(MemoryBackend):
    """A backend whose writes wait for the gate."""

    def __init__(self, shared: MemoryMailbox) -> None:
        super().__init__(shared, time.time, 30.0)
        self.gate, self.waits = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        if not self.gate.is_set():
            self.waits.set()
        await self.gate.wait()
        return await super().write(before, step, now_ms)


class Forbidding(MemoryBackend):
    """A backend that is not permitted to write until the event is set."""

    def __init__(self, shared: MemoryMailbox) -> None:
        super().__init__(shared, time.time, 30.0)
        self.permitted = asyncio.Event()
        self.permitted.set()

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        if not self.permitted.is_set():
            raise StoreMisconfigured("permission denied for table mailbox_threads")
        return await super().write(before, step, now_ms)


async def test_an_ack_that_is_not_permitted_for_a_moment_is_repeated() -> None:
    """The worker gave it up at once, and the work was done again when the lease was over."""
    backend, calls = Forbidding(MemoryMailbox()), 0

    async def handle(dispatch: Dispatch) -> None:
        nonlocal calls
        calls += 1
        backend.permitted.clear()

    mailbox = MailboxStore(backend, MailboxConfig())
    async with Worker(mailbox, "w", handle) as worker:
        d = await mailbox.enqueue("t", b"x")

        async def troubled() -> bool:
            return worker.trouble is not None and "permission denied" in worker.trouble

        await eventually(troubled)
        backend.permitted.set()

        async def acked() -> bool:
            found = await mailbox.load_dispatch("t", d.dispatch_id)
            return found is not None and found.status is Status.ACKED

        await eventually(acked)

        async def well() -> bool:
            return worker.trouble is None

        await eventually(well)
    await mailbox.aclose()
    assert calls == 1


async def test_a_worker_that_cannot_claim_says_why() -> None:
    """Its pulls went well, and so it reported no trouble."""
    backend = Forbidding(MemoryMailbox())
    mailbox = MailboxStore(backend, MailboxConfig())

    async def handle(dispatch: Dispatch) -> None:
        pass

    await mailbox.enqueue("t", b"x")
    backend.permitted.clear()
    async with Worker(mailbox, "w", handle) as worker:

        async def troubled() -> bool:
            return worker.trouble is not None and "permission denied" in worker.trouble

        await eventually(troubled)
        backend.permitted.set()

        async def well() -> bool:
            return worker.trouble is None

        await eventually(well)
    await mailbox.aclose()


async def test_a_failed_step_is_no_trouble_for_good_and_a_threads_own_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker may go on with the thread; and one that nobody can read would be told of time and again."""
    monkeypatch.setattr("bufstore.mailbox.worker._STEP_TROUBLE_S", 0.2)
    async with MemoryMailboxStore() as mailbox:
        worker = Worker(mailbox, "w", lambda _: asyncio.sleep(0))
        worker._note_step(MalformedEntry("of this thread"))
        assert worker.trouble is None
        worker._note_step(StoreUnavailable("a moment"))
        assert worker.trouble == "a moment"

        async def well() -> bool:
            return worker.trouble is None

        await eventually(well)


@pytest.mark.parametrize("cancels", [1, 2, 3])
async def test_who_gives_up_closing_a_worker_leaves_nothing_claimed(cancels: int) -> None:
    """Regression: the handlers went on for ever, and their claims were renewed as long as the mailbox was open."""
    backend, began, ended = Gated(shared := MemoryMailbox()), asyncio.Event(), asyncio.Event()

    async def handle(dispatch: Dispatch) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    mailbox = MailboxStore(backend, MailboxConfig())
    worker = await Worker(mailbox, "w", handle).__aenter__()
    d = await mailbox.enqueue("t", b"x")
    await began.wait()
    backend.gate.clear()
    closing = asyncio.create_task(worker.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    async with asyncio.timeout(5):
        await ended.wait()
        await backend.waits.wait()
    for _ in range(cancels - 1):
        closing.cancel()
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(backend.gate.set)
    with pytest.raises(asyncio.CancelledError):
        await closing
    await mailbox.aclose()
    async with MemoryMailboxStore(shared) as another:
        (found,) = await another.list_dispatches("t")
    assert (found.dispatch_id, found.status, found.last_error) == (
        d.dispatch_id,
        Status.QUEUED,
        "the worker was stopped",
    )
    assert not [task for task in asyncio.all_tasks() if (task.get_name() or "").startswith("bufstore-")]


async def test_a_worker_that_is_closed_as_it_acks_has_acked() -> None:
    """Regression: the ack was cancelled, the claim stayed until its lease was over, and the work was repeated."""
    backend = Gated(shared := MemoryMailbox())

    async def handle(dispatch: Dispatch) -> None:
        backend.gate.clear()

    mailbox = MailboxStore(backend, MailboxConfig())
    async with asyncio.timeout(5):
        worker = await Worker(mailbox, "w", handle).__aenter__()
        await mailbox.enqueue("t", b"x")
        await backend.waits.wait()
        closing = asyncio.create_task(worker.aclose(drain_s=0))
        for _ in range(20):  # turns of the loop
            await asyncio.sleep(0)
        backend.gate.set()
        await closing
    async with MemoryMailboxStore(shared) as another:
        (found,) = await another.list_dispatches("t")
    assert found.status is Status.ACKED


@pytest.mark.parametrize("fails", [False, True])
async def test_work_that_ends_in_an_outage_is_not_done_again(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Regression: one refused ack, and the work was dead, or done again, when its lease was over."""
    handled, refused = [], []

    async def handle(dispatch: Dispatch) -> None:
        handled.append(dispatch.payload)
        if fails:
            raise ValueError("no")

    async with MemoryMailboxStore() as mailbox:
        ends = "nack" if fails else "ack"
        end = getattr(mailbox, ends)

        async def away(*arguments: Any, **named: Any) -> Dispatch:
            if len(refused) < 2:
                refused.append(arguments)
                raise [StoreUnavailable("away"), StepUnknown("no answer")][len(refused) - 1]
            ended: Dispatch = await end(*arguments, **named)
            return ended

        monkeypatch.setattr(mailbox, ends, away)
        async with Worker(mailbox, "w", handle):
            queued = await mailbox.enqueue("t", b"x", max_attempts=1)

            async def ended() -> bool:
                found = await mailbox.load_dispatch("t", queued.dispatch_id)
                return found is not None and found.status is (Status.DEAD if fails else Status.ACKED)

            await eventually(ended)
        assert (handled, len(refused)) == ([b"x"], 2)


async def test_work_that_ends_when_the_mailbox_is_closed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    acks, acked = [], asyncio.Event()

    async def handle(_: Dispatch) -> None: ...

    async with MemoryMailboxStore() as mailbox, asyncio.timeout(5):

        async def closed(*arguments: Any) -> Dispatch:
            acks.append(arguments)
            acked.set()
            raise Closed("the mailbox is closed")

        monkeypatch.setattr(mailbox, "ack", closed)
        worker = await Worker(mailbox, "w", handle).__aenter__()
        await mailbox.enqueue("t", b"x")
        await acked.wait()
        await worker.aclose(drain_s=30)
        assert len(acks) == 1


async def test_a_handler_that_does_not_end_does_not_keep_the_mailbox_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bufstore.takes._PATIENCE_S", 0.05)
    began, ends, mailbox = asyncio.Event(), asyncio.Event(), await MemoryMailboxStore().__aenter__()

    async def handle(dispatch: Dispatch) -> None:
        began.set()
        while not ends.is_set():
            with suppress(asyncio.CancelledError):
                await ends.wait()

    worker = await Worker(mailbox, "w", handle).__aenter__()
    await mailbox.enqueue("t", b"x")
    await began.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            closing = asyncio.create_task(worker.aclose(drain_s=0))
            await asyncio.shield(closing)
    closing.cancel()
    async with asyncio.timeout(5):
        await mailbox.aclose()
        ends.set()
        await asyncio.gather(closing, *worker._running, return_exceptions=True)
