"""A signal's handler raises in whatever the loop runs just then, and the app runs the loop again, as IPython does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest

from bufstore import (
    BufferConfig,
    BufferedThreadStore,
    Closed,
    Consistency,
    LogUnavailable,
    MemoryThreadStore,
    OutcomeUnknown,
    Receipt,
    StoreUnavailable,
)
from bufstore.buffer.flush.owned_partition import OwnedPartition
from bufstore.buffer.groups.forgetting import Forgetting
from bufstore.buffer.groups.group import Group, Record
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.places import first_place
from bufstore.buffer.read.store_watch import StoreWatch
from bufstore.config import NatsConfig
from bufstore.errors import LogRolledBack
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.group_commit import GroupCommit
from bufstore.jetstream.messages import AppendUnknown, Outgoing
from bufstore.mailbox import Dispatch, Sweeper, Worker
from bufstore.mailbox.memory import MemoryMailboxStore
from bufstore.memory import MemoryNats
from bufstore.nats.same_log import SameLog
from bufstore.notify.notifier import Notifier
from bufstore.notify.protocol import Event
from bufstore.notify.subscription import HealingBroker, Heard, Source
from helpers import run_of
from unit.fake_log import FakeLog, JumpingLoop
from unit.test_client import Recorder

T = TypeVar("T")


class Interrupted:
    """A loop that is run again after each interrupt."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.complaints: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: self.complaints.append(context))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def task(self, name: str) -> Any:
        return next(task for task in asyncio.all_tasks(self.loop) if task.get_name() == name)

    def interrupt(self, name: str) -> None:
        """Raise in the task of this name, where it waits."""
        self.loop.call_soon(lambda: self.task(name)._fut_waiter.set_exception(KeyboardInterrupt()))
        self.expect_interrupt()

    def end_task(self, name: str, how: str) -> None:
        """End the task of this name: "interrupted" or "cancelled"."""
        if how == "interrupted":
            self.interrupt(name)
        else:
            self.task(name).cancel()

    def expect_interrupt(self) -> None:
        """Run the loop until it is interrupted."""
        sleeping = self.loop.create_task(asyncio.sleep(1))
        with pytest.raises(KeyboardInterrupt):
            self.loop.run_until_complete(sleeping)
        sleeping.cancel()

    def end(self) -> None:
        """Check that nothing is left."""
        for _ in range(5):
            self.run(asyncio.sleep(0))
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()
        # asyncio complains of tasks that were interrupted, when they are collected.
        others = [each for each in self.complaints if not isinstance(each.get("exception"), KeyboardInterrupt)]
        assert not others


@pytest.mark.parametrize("name", ["lease", "takeover", "flush", "overdue", "retention", "feeds"])
@pytest.mark.parametrize("how", ["interrupted", "cancelled"])
def test_a_flusher_goes_on_whatever_ends_its_tasks(name: str, how: str) -> None:
    """Regression: it kept its partitions, flushed nothing more, and its health was good."""
    it = Interrupted(JumpingLoop())
    config = BufferConfig(flush_interval_s=0.05, lease_s=4)
    opening = BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats(), config=config)
    store: BufferedThreadStore = it.run(opening)
    it.run(store.checkpoint("t", [1], run_of("t")))
    it.run(store.force_flush_all())
    flusher = store.buffer.flusher
    assert flusher is not None
    task = "bufstore-feeds" if name == "feeds" else f"bufstore-flusher-{name}"
    for number in range(2, 5):
        taken = flusher.state.takeovers
        it.end_task(task, how)
        it.run(store.checkpoint("t", list(range(number)), run_of("t", number)))
        it.run(store.force_flush_all())
        it.run(asyncio.sleep(10))
        assert it.run(store.health()).ok
        assert flusher.state.takeovers >= taken + len(flusher.state.partitions)  # what was in memory is in doubt
        assert not it.task(task).done()
    it.run(store.aclose())
    it.end()


@pytest.mark.parametrize("begins", [True, False])
def test_a_flusher_goes_on_when_all_other_tasks_of_its_loop_are_cancelled(begins: bool) -> None:
    """Regression: nothing was flushed any more. Neither which task is cancelled nor how far it has come may matter."""

    async def write_and_flush(store: BufferedThreadStore) -> None:
        await store.checkpoint("t", [1], run_of("t"))
        await store.force_flush_all()

    def main(turns: int) -> bool:
        it = Interrupted(JumpingLoop())
        config = BufferConfig(flush_interval_s=0.05, lease_s=4)
        opening = BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats(), config=config)
        store: BufferedThreadStore = it.run(opening)
        if not begins:  # the flusher has its partitions
            it.run(store.force_flush_all())
        writing = it.loop.create_task(write_and_flush(store))
        for _ in range(turns):
            it.loop.call_soon(it.loop.stop)
            it.loop.run_forever()
        done = writing.done()
        for task in asyncio.all_tasks(it.loop) - {writing}:
            task.cancel()
        it.run(outcomes([writing]))
        it.run(store.checkpoint("t", [1, 2], run_of("t", 2)))
        it.run(asyncio.sleep(10))
        assert it.run(store.load_messages("t", consistency=Consistency.EVENTUAL)) == [1, 2], f"{turns} turns"
        assert store.buffer.flusher is not None
        assert len(store.buffer.flusher.state.partitions) == 8, f"{turns} turns"
        assert it.run(store.health()).ok
        it.run(store.aclose())
        it.end()
        return done

    turns = 0
    while not main(turns):
        turns += 1
    assert turns > 3


def test_an_interrupt_in_what_arrives_while_postgres_commits_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Interrupted(JumpingLoop())
    config = BufferConfig(flush_interval_s=0.05, lease_s=4)
    opening = BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats(), config=config)
    store: BufferedThreadStore = it.run(opening)
    it.run(store.checkpoint("t", [1], run_of("t")))
    it.run(store.force_flush_all())
    flusher = store.buffer.flusher
    assert flusher is not None
    ledger = store.buffer.ledger
    flush, begun, goes_on = ledger.flush, asyncio.Event(), asyncio.Event()

    async def stands_still(*arguments: Any, **options: Any) -> Any:
        begun.set()
        await goes_on.wait()
        return await flush(*arguments, **options)

    def interrupts(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ledger, "flush", stands_still)
    it.run(store.checkpoint("t", [1, 2], run_of("t", 2)))
    it.run(begun.wait())
    with monkeypatch.context() as patch:
        patch.setattr(OwnedPartition, "_item", interrupts)
        writing = it.loop.create_task(store.checkpoint("t", [1, 2, 3], run_of("t", 3)))
        it.expect_interrupt()
    goes_on.set()
    it.run(asyncio.wait_for(writing, 60))
    it.run(store.force_flush_all())
    found = it.run(store.load_messages("t", consistency=Consistency.EVENTUAL))
    assert found == [1, 2, 3]
    it.run(asyncio.sleep(10))
    assert it.run(store.health()).ok
    it.run(store.aclose())
    it.end()


@pytest.mark.parametrize("where", ["_look", "_go_on", "_guarded", "publish"])
def test_group_commit_goes_on_after_an_interrupt(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: whatever came later waited for a group that was no longer on its way."""
    it, log = Interrupted(JumpingLoop()), FakeLog()
    writes = GroupCommit(log)  # type: ignore[arg-type]
    numbers = itertools.count()

    async def write() -> int:
        return await asyncio.wait_for(writes.submit([Outgoing(f"s{next(numbers)}", b"")]), 5)

    async def started() -> None:
        writes.start()

    it.run(started())
    assert it.run(write()) == 1
    owner: Any = log if where == "publish" else writes

    def interrupts(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    async def in_a_task(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    interrupted = it.loop.create_task(write())
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupts if where in ("_look", "_go_on") else in_a_task)
        it.expect_interrupt()
    for _ in range(3):
        assert it.run(write()) > 1
    (outcome,) = it.run(outcomes([interrupted]))
    assert isinstance(outcome, (int, AppendUnknown)), repr(outcome)
    it.run(writes.aclose())
    it.end()


async def outcomes(futures: Sequence[asyncio.Future[Any]]) -> list[Any]:
    return await asyncio.gather(*futures, return_exceptions=True)


def test_a_write_to_the_log_that_is_interrupted_ends_soon_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Interrupted(JumpingLoop())
    opening = BufferedThreadStore.open(
        MemoryThreadStore(), nats=MemoryNats(), config=BufferConfig(flusher=False, append_timeout_s=30.0)
    )
    store: BufferedThreadStore = it.run(opening)
    it.run(store.checkpoint_append("t", [1], run_of("t")))

    def interrupts(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    interrupted = it.loop.create_task(store.checkpoint_append("t", [2], run_of("t")))
    with monkeypatch.context() as patch:
        patch.setattr(store.buffer.session.log.writer, "_store", interrupts)
        it.expect_interrupt()
    began = it.loop.time()
    (outcome,) = it.run(outcomes([interrupted]))
    assert isinstance(outcome, Receipt), repr(outcome)  # nothing was sent, and its writer has found that out
    assert it.loop.time() - began < 10
    it.run(store.checkpoint_append("t", [3], run_of("t")))
    assert it.run(store.load_messages("t")) == [1, 2, 3]
    it.run(store.aclose())
    it.end()


@pytest.mark.parametrize("where", ["look_up", "_recover", "parts"])
def test_a_thread_is_written_to_after_an_interrupt_wherever_it_hits(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: who waited for a task that was ended by it waited until its deadline, and so did all later ones."""
    it = Interrupted(JumpingLoop())
    nats, config = MemoryNats(), BufferConfig(flusher=False, append_timeout_s=30.0)
    store: BufferedThreadStore = it.run(BufferedThreadStore.open(MemoryThreadStore(), nats=nats, config=config))
    message = "x" * (3 << 20) if where == "parts" else "x"

    async def in_a_task(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    def raises(error: BaseException) -> Any:
        async def fails(*_: Any, **__: Any) -> Any:
            raise error

        return fails

    log, appender = store.buffer.session.log, store.buffer.appender
    with monkeypatch.context() as patch:
        if where == "look_up":
            patch.setattr(appender._finder, "look_up", in_a_task)
        elif where == "_recover":
            patch.setattr(appender, "_recover", in_a_task)
            patch.setattr(log.writer, "_send", raises(LogUnavailable("no leader")))
        else:
            patch.setattr(store.buffer.session.stream, "fill", in_a_task)  # type: ignore[attr-defined]
        interrupted = it.loop.create_task(store.checkpoint_append("t", [message], run_of("t")))
        it.expect_interrupt()
    began = it.loop.time()
    (outcome,) = it.run(outcomes([interrupted]))
    assert isinstance(outcome, (Receipt, OutcomeUnknown, LogUnavailable)), repr(outcome)
    it.run(store.checkpoint_append("t", ["more"], run_of("t")))
    assert it.loop.time() - began < 10
    found: Any = it.run(store.load_messages("t"))
    assert found[-1] == "more"
    assert (message in found) >= isinstance(outcome, Receipt)
    it.run(store.aclose())
    it.end()


def test_a_connection_is_watched_after_an_interrupt_and_ends_with_its_loop() -> None:
    """Regression: `asyncio.run` cancels all tasks, those of nats-py too, and then nobody was told that NATS is gone."""
    it = Interrupted(asyncio.new_event_loop())
    server, connection = it.run(_connected())
    it.interrupt("bufstore-nats-connection")
    first = it.run(connection.wait_up(10))
    it.run(first.close())
    assert it.run(connection.wait_up(10)) is not first
    waiting = it.loop.create_task(connection.request("nobody.answers", b"", 600))
    it.run(asyncio.sleep(0.1))
    it.task("bufstore-nats-connection").cancel()
    (outcome,) = it.run(asyncio.wait_for(outcomes([waiting]), 10))
    assert isinstance(outcome, AppendUnknown)
    with pytest.raises(Closed, match=r"has cancelled .*open another"):
        it.run(connection.request("nobody.answers", b"", 600))
    it.run(connection.aclose())
    with pytest.raises(Closed, match="closed or not open"):
        it.run(connection.request("nobody.answers", b"", 600))
    server.close()
    it.run(server.wait_closed())
    it.end()


def test_who_waits_for_a_connection_hears_that_its_loop_has_ended() -> None:
    it = Interrupted(asyncio.new_event_loop())
    server, connection = it.run(_connected())
    server.close()
    it.run(it.run(connection.wait_up(10)).close())
    waiting = it.loop.create_task(connection.wait_up(600))
    it.run(asyncio.sleep(0))
    it.task("bufstore-nats-connection").cancel()
    (outcome,) = it.run(asyncio.wait_for(outcomes([waiting]), 10))
    assert isinstance(outcome, Closed)
    it.run(connection.aclose())
    it.run(server.wait_closed())
    it.end()


async def _connected() -> tuple[asyncio.Server, Connection]:
    server = await asyncio.start_server(Recorder().serve, "127.0.0.1", 0)
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"]), "test")
    await connection.open()
    return server, connection


@pytest.mark.parametrize("how", ["interrupted", "cancelled"])
def test_who_looks_whether_the_store_is_back_looks_on_whatever_ends_its_task(how: str) -> None:
    class Away:
        up = False

        async def state(self, thread_id: str) -> str:
            return "state"

        async def answers(self) -> None:
            if not self.up:
                raise StoreUnavailable("away")

    async def watching() -> StoreWatch[Any]:
        return StoreWatch(reader, 5.0)  # type: ignore[type-var, arg-type]

    it, reader = Interrupted(JumpingLoop()), Away()
    watch = it.run(watching())
    it.run(watch._is_down())
    it.run(asyncio.sleep(0.1))
    for _ in range(2):
        it.end_task("bufstore-store-probe", how)
        it.run(asyncio.sleep(1))
        assert watch.down == "away"
    reader.up = True
    it.run(asyncio.sleep(1))
    assert watch.down is None
    it.run(watch.aclose())
    it.end()


@pytest.mark.parametrize("how", ["interrupted", "cancelled"])
def test_a_refused_log_is_looked_at_again_whatever_ends_the_task_that_looks(how: str) -> None:
    stands = False

    async def stands_again() -> bool:
        return stands

    async def refuse() -> None:
        same.refuse(LogRolledBack("an old end"), stands_again)

    it, same = Interrupted(JumpingLoop()), SameLog("LOG", "withdrawn", True)
    it.run(refuse())
    it.run(asyncio.sleep(0.1))
    it.end_task("bufstore-log-refused", how)
    it.run(asyncio.sleep(10))
    assert same.refused
    stands = True
    it.run(asyncio.sleep(2))
    assert same.refused is None
    it.run(same.aclose())
    it.end()


@pytest.mark.parametrize("how", ["interrupted", "cancelled"])
def test_a_notifier_listens_again_whatever_ends_the_task_that_listens(how: str) -> None:
    """Regression: nobody was called any more, and the notifier was healthy."""
    it, broker = Interrupted(JumpingLoop()), _Speaking()
    notifier, heard = Notifier(broker), list[str]()
    unlisten = it.run(notifier.listen_completed("w", lambda: heard.append("w")))
    for number in range(1, 4):
        it.end_task("bufstore-speaking", how)
        it.run(asyncio.sleep(1))
        assert (len(heard), broker.open) == (2 * number - 1, 1), "it may have missed something"
        broker.said.put_nowait((Event.COMPLETED, "w"))
        it.run(asyncio.sleep(1))
        assert (len(heard), notifier.statistics().restored) == (2 * number, number)
    it.run(unlisten())
    assert broker.open == 0
    it.run(notifier.aclose())
    it.end()


class _Speaking(HealingBroker):
    """A server of notifications, and its connections."""

    def __init__(self) -> None:
        super().__init__("speaking")
        self.said: asyncio.Queue[Heard] = asyncio.Queue()
        self.open = 0

    async def _attach(self) -> Source:
        self.open += 1
        return self

    async def next(self) -> Heard:
        return await self.said.get()

    async def aclose(self) -> None:
        self.open -= 1


@pytest.mark.parametrize("how", ["interrupted", "cancelled"])
@pytest.mark.parametrize("name", ["worker", "watch", "sweeper"])
def test_a_mailbox_is_worked_on_whatever_ends_a_workers_tasks(name: str, how: str) -> None:
    """Regression: its work was done no more, and the worker and its sweeper saw no trouble."""

    async def begin() -> None:
        await mailbox.__aenter__()
        await worker.__aenter__()
        await sweeper.__aenter__()

    async def handle(dispatch: Dispatch) -> None:
        handled.append(dispatch.payload)

    it, handled = Interrupted(JumpingLoop()), list[bytes]()
    mailbox = MemoryMailboxStore()
    worker, sweeper = Worker(mailbox, "w", handle), Sweeper(mailbox)
    it.run(begin())
    it.run(asyncio.sleep(0.1))
    for number in range(1, 4):
        it.end_task(f"bufstore-mailbox-{name}", how)
        it.run(mailbox.enqueue("t", b"%d" % number))
        it.run(asyncio.sleep(60))
        assert handled == [b"%d" % n for n in range(1, number + 1)]
        assert not it.task(f"bufstore-mailbox-{name}").done()
    it.run(worker.aclose())
    it.run(sweeper.aclose())
    it.run(mailbox.aclose())
    it.end()


def test_what_a_process_may_forget_is_asked_for_again_after_an_interrupt() -> None:
    async def forgetting() -> Forgetting:
        return Forgetting(heads, lambda: None, settled, lambda: False)

    async def settled() -> int:
        return first_place(heads.seen)

    async def write(first: int) -> None:
        for seq in range(first, first + 20):
            records = [Record(seq.to_bytes(8) + bytes([i]) * 8, 0, 0, 0) for i in range(100)]
            heads.observe(Group(seq, seq, seq - 1, seq - 1, 0, 0, records))
            forgets.look_soon()

    it, heads = Interrupted(JumpingLoop()), Heads()
    heads.start(0, 0, 0)
    forgets = it.run(forgetting())
    it.run(write(1))
    it.run(asyncio.sleep(1))
    it.interrupt("bufstore-forgetting")
    for number in range(1, 20):
        it.run(write(1 + 20 * number))
        it.run(asyncio.sleep(6))
    assert heads.entries < 5000, "of 40 000"
    it.run(forgets.aclose())
    it.end()
