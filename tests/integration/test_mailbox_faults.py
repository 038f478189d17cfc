"""Mailboxes when processes die, clocks are wrong and servers stop: no dispatch is lost, and none has two holders."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bufstore import AlreadyExists, BufstoreError, LogUnavailable, StoreUnavailable
from bufstore.embedded import Servers
from bufstore.jetstream import subject_tokens
from bufstore.jetstream.direct_gets import Shown
from bufstore.jetstream.fresh_reads import FreshReads
from bufstore.jetstream.messages import AppendUnknown, Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.mailbox import Dispatch, StaleClaim, Status, StepUnknown, Sweeper
from bufstore.mailbox.nats import NatsBackend
from bufstore.mailbox.store import MailboxStore
from helpers import eventually, fresh
from mailboxes import Mailboxes
from thorough import seldom

DURABLE = ("nats", "postgres")
_PROCESS = Path(__file__).parent.parent / "mailbox_process.py"

Event = list[Any]


def check_exclusivity(events: list[Event], dispatches: dict[str, list[Dispatch]]) -> None:
    """Fail when a history shows two holders that both passed the fence, or an impossible order of claims.

    Events are ``[claim | ack | stale, thread, dispatch, token, …]`` as the processes saw them. The order of events of
    different processes is arbitrary.
    """
    claims = [tuple(e[1:4]) for e in events if e[0] == "claim"]
    assert len({(t, token) for t, _, token in claims}) == len(claims), "one token was given twice"
    acked: dict[tuple[str, str], set[int]] = defaultdict(set)
    for e in events:
        if e[0] == "ack":
            assert e[4] == "acked"
            acked[e[1], e[2]].add(e[3])
    assert all(len(tokens) == 1 for tokens in acked.values()), "two claims of a dispatch were acknowledged"
    latest: dict[tuple[str, str], int] = {}
    for thread_id, dispatch_id, token in claims:
        latest[thread_id, dispatch_id] = max(token, latest.get((thread_id, dispatch_id), 0))
    for thread_id, found in dispatches.items():
        for d in found:
            key = (thread_id, d.dispatch_id)
            if d.status is Status.ACKED and key in acked:
                # The store names the acknowledged token as the one that ended it, and no later claim exists.
                assert acked[key] == {d.ended_by}
                assert latest.get(key, 0) <= d.ended_by
    # Within a thread, no claim has a dispatch that an earlier token had already acknowledged.
    for thread_id in {c[0] for c in claims}:
        ordered = sorted((token, d) for t, d, token in claims if t == thread_id)
        finished: set[str] = set()
        for token, dispatch_id in ordered:
            assert dispatch_id not in finished, "a dispatch was claimed after its ack"
            if token in acked.get((thread_id, dispatch_id), set()):
                finished.add(dispatch_id)


def test_the_exclusivity_checker_finds_what_must_not_be() -> None:
    done = Dispatch(thread_id="t", dispatch_id="d", status=Status.ACKED, ended_by=5)
    good = [["claim", "t", "d", 3, "a"], ["claim", "t", "d", 5, "b"], ["ack", "t", "d", 5, "acked"]]
    check_exclusivity(good, {"t": [done]})
    for wrong in (
        [*good, ["ack", "t", "d", 3, "acked"]],
        [*good, ["claim", "t", "d", 5, "c"]],
        [*good, ["claim", "t", "d", 9, "c"]],
    ):
        with pytest.raises(AssertionError):
            check_exclusivity(wrong, {"t": [done]})
    with pytest.raises(AssertionError):
        check_exclusivity(good, {"t": [replace(done, ended_by=3)]})


class _Workers:
    """Processes that work on the threads of one deployment."""

    def __init__(self, boxes: Mailboxes, threads: list[str]) -> None:
        servers = boxes.servers
        where = (
            {"nats": servers.nats.url, "bucket": boxes.name}
            if boxes.kind == "nats"
            else {"postgres": servers.postgres.dsn, "schema": boxes.name}
        )
        self._options = where | {"threads": threads}
        self.events: list[Event] = []
        self._running: list[tuple[asyncio.subprocess.Process, asyncio.Task[None]]] = []

    async def start(self, name: str, **options: Any) -> asyncio.subprocess.Process:
        arguments = json.dumps(self._options | {"name": name} | options)
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(_PROCESS), arguments, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        reader = asyncio.create_task(self._read(process.stdout))
        self._running.append((process, reader))
        return process

    async def _read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            with suppress(json.JSONDecodeError):  # the last line may be cut by the kill
                self.events.append(json.loads(line))

    async def stop(self) -> None:
        for process, reader in self._running:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()
            await reader


@pytest.mark.long
@pytest.mark.parametrize("kind", DURABLE)
async def test_processes_killed_paused_and_with_wrong_clocks_lose_and_double_nothing(
    kind: str, servers: Servers
) -> None:
    boxes = Mailboxes(kind, servers)
    threads = [fresh() for _ in range(4)]
    workers = _Workers(boxes, threads)
    async with boxes.open(1) as (store,):
        for thread_id in threads:
            await asyncio.gather(*(store.enqueue(thread_id, max_attempts=100) for _ in range(60)))
        try:
            first = await workers.start("first")
            await workers.start("ahead", skew_ms=700)
            paused = await workers.start("behind", skew_ms=-700)

            async def acked(n: int) -> bool:
                return sum(e[0] == "ack" for e in workers.events) >= n

            await eventually(lambda: acked(20), 60)
            # One worker is killed during its claims; another is paused past its lease and continued.
            first.kill()
            paused.send_signal(signal.SIGSTOP)
            await workers.start("second")
            before = sum(e[0] == "ack" for e in workers.events)
            await eventually(lambda: acked(min(before + 40, 200)), 60)
            paused.send_signal(signal.SIGCONT)

            async def all_done() -> bool:
                counts = Counter()
                for thread_id in threads:
                    counts.update(await store.count_by_status(thread_id))
                return counts[Status.ACKED] == 240

            await eventually(all_done, 90)
        finally:
            await workers.stop()
        dispatches = {t: await store.list_dispatches(t, limit=1000) for t in threads}
        check_exclusivity(workers.events, dispatches)
        assert sum(e[0] == "claim" for e in workers.events) >= 240 - 1


@pytest.mark.parametrize("kind", ["nats", *seldom("postgres")])
async def test_a_server_that_restarts_loses_no_dispatch_and_keeps_the_fence(kind: str, own_servers: Servers) -> None:
    boxes = Mailboxes(kind, own_servers)
    server = own_servers.nats if kind == "nats" else own_servers.postgres
    thread_id = fresh()
    put: list[str] = []
    acked: list[tuple[str, int]] = []
    stop = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def produce(store: MailboxStore) -> None:
        for n in range(10**6):
            if stop.is_set():
                return
            key, unsure = f"d{n}", False
            while True:
                try:
                    await store.enqueue(thread_id, dispatch_id=key, max_attempts=100)
                except AlreadyExists:
                    assert unsure
                except (StepUnknown, LogUnavailable, StoreUnavailable) as e:
                    unsure |= isinstance(e, StepUnknown)
                    found = None
                    with suppress(BufstoreError):
                        found = await store.load_dispatch(thread_id, key)
                    if found is None:
                        await asyncio.sleep(0.05)
                        continue
                put.append(key)
                break
            await asyncio.sleep(0.005)

    async def consume(store: MailboxStore, name: str) -> None:
        while not tasks[0].done() or len({d for d, _ in acked}) < len(put):  # what is still being enqueued counts too
            try:
                claim = await store.claim(thread_id, name, lease_s=3)
                if claim is None:
                    await store.reclaim_expired()
                    await asyncio.sleep(0.01)
                    continue
                while True:
                    try:
                        await store.ack(claim)
                        acked.append((claim.dispatch_id, claim.token))
                        break
                    except (StepUnknown, LogUnavailable, StoreUnavailable):
                        await asyncio.sleep(0.05)  # an ack may be repeated
            except StaleClaim:
                continue
            except BufstoreError:
                await asyncio.sleep(0.05)

    async with boxes.open(3, timeout_s=2.0) as stores:
        tasks += [
            asyncio.create_task(produce(stores[0])),
            asyncio.create_task(consume(stores[1], "a")),
            asyncio.create_task(consume(stores[2], "b")),
        ]
        try:
            for kill in (False, True):
                await asyncio.sleep(0.5)
                await asyncio.to_thread(server.kill if kill else server.stop)
                await asyncio.sleep(0.3)
                await asyncio.to_thread(server.start)
                goal = len(acked) + 10

                async def goes_on(goal: int = goal) -> bool:
                    return len(acked) >= goal or all(t.done() for t in tasks)

                await eventually(goes_on, 60)
            stop.set()
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert len(put) > 10
        assert Counter(d for d, _ in acked) == Counter(put)
        found = await stores[0].list_dispatches(thread_id, limit=1 << 20)
        assert {d.dispatch_id: d.ended_by for d in found} == dict(acked)


@pytest.mark.long
@pytest.mark.parametrize("kind", DURABLE)
async def test_what_has_ended_does_not_come_back_when_the_server_is_killed(kind: str, own_servers: Servers) -> None:
    """A killed nats-server brings back removed messages whose tombstones have expired; the mailbox must ignore them."""
    boxes = Mailboxes(kind, own_servers)
    server = own_servers.nats if kind == "nats" else own_servers.postgres
    async with boxes.open(2) as (store, other):
        done, back, stopped, forgotten = fresh(), fresh(), fresh(), fresh()
        for thread_id in (done, stopped, forgotten):
            for n in range(5):
                await store.enqueue(thread_id, priority=(128, 3)[n % 2])
            while (claim := await store.claim(thread_id, "w")) is not None:
                await store.ack(claim)
        await store.enqueue(back)
        claim = await store.claim(back, "w")
        assert claim is not None
        await store.nack(claim)
        held = await store.enqueue(stopped)
        claim = await store.claim(stopped, "w")
        assert claim is not None
        await asyncio.sleep(2.5)  # a removal's tombstone expires after a second or two
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

        async def answers() -> bool:
            with suppress(BufstoreError):
                return await other.current_epoch(done) == 0
            return False

        await eventually(answers, 30)
        for instance in (store, other):
            assert await instance.claim(done, "w") is None
            assert {d.status for d in await instance.list_dispatches(done)} == {Status.ACKED}
        again = await other.claim(back, "w")
        assert again is not None
        assert again.attempts == 1
        await other.ack(again)
        assert await store.claim(back, "w") is None
        # An interrupt supersedes neither ended nor claimed dispatches.
        assert (await other.interrupt(stopped)).superseded == []
        assert (await store.ack(claim)).dispatch_id == held.dispatch_id
        assert Counter(d.status for d in await other.list_dispatches(stopped)) == {Status.ACKED: 6}
        assert (await other.interrupt(forgotten)).superseded == []
        after = await store.enqueue(forgotten)
        claim = await other.claim(forgotten, "w")
        assert claim is not None
        assert claim.dispatch_id == after.dispatch_id


@pytest.mark.long
async def test_what_a_killed_server_brought_back_is_removed_for_good(own_servers: Servers) -> None:
    """If they were kept, each kill would bring all of them back, to be removed one by one again."""
    boxes, thread_id = Mailboxes("nats", own_servers), fresh()
    async with boxes.open(1) as (store,):
        backend = store.backend
        assert isinstance(backend, NatsBackend)

        async def queued() -> list[int]:
            with suppress(BufstoreError):
                places = backend._keys.places(subject_tokens.token(thread_id))[:2]
                return [sum([len(await backend._bucket.all(place)) for place in places])]
            return []  # the server does not answer yet

        async def no_tombstones() -> bool:
            """A removal leaves one for a second or two; a server killed meanwhile brings nothing back."""
            with suppress(BufstoreError):
                places = backend._keys.places(subject_tokens.token(thread_id))[:2]
                return not any([await backend._stream.read(place, 0, 5.0) for place in places])
            return False

        for n in range(6):
            await store.enqueue(thread_id, priority=(128, 3)[n % 2])
        while (claim := await store.claim(thread_id, "w")) is not None:
            await (store.nack(claim) if claim.attempts == 1 else store.ack(claim))
        came_back = []
        for _ in range(2):
            await eventually(no_tombstones)
            await asyncio.to_thread(own_servers.nats.kill)
            await asyncio.to_thread(own_servers.nats.start)
            came_back += await eventually(queued, 30)
            async with boxes.open(1) as (anew,):  # a new instance, which does not know how far the queue was read
                assert await anew.claim(thread_id, "w") is None
        assert came_back == [6, 0]


@pytest.mark.parametrize("kind", ("memory", *DURABLE))
async def test_a_step_whose_answer_is_lost_is_done_once(kind: str, servers: Servers) -> None:
    boxes = Mailboxes(kind, servers)
    rng = random.Random(7)
    async with boxes.open(1) as (store,):
        write, add = store.backend.write, store.backend.add
        lost = Counter()

        def losing(call: Any, name: str) -> Any:
            async def maybe(*args: Any, **options: Any) -> Any:
                before = rng.random()
                if before < 0.3:
                    lost["before " + name] += 1
                    raise AppendUnknown("lost on its way there")
                result = await call(*args, **options)
                if before < 0.6:
                    lost["after " + name] += 1
                    raise AppendUnknown("lost on its way back")
                return result

            return maybe

        store.backend.write = losing(write, "write")  # type: ignore[method-assign]
        store.backend.add = losing(add, "add")  # type: ignore[method-assign]
        for n in range(20):
            thread_id = fresh()
            put = await store.enqueue(thread_id, dispatch_id=f"own {n}" if n % 2 else None, dedupe_key="k")
            claim = await store.claim(thread_id, "w")
            assert claim is not None
            assert (await store.record_start(claim, "i")).instance_id == "i"
            assert (await store.extend_lease(claim)).token == claim.token
            ended = await store.ack(claim)
            assert await store.list_dispatches(thread_id) == [ended]
            assert (ended.dispatch_id, ended.attempts, ended.status) == (put.dispatch_id, 0, Status.ACKED)
        assert len(lost) == 4


async def test_an_unknown_step_is_called_unknown(servers: Servers) -> None:
    async with Mailboxes("memory", servers).open(1, timeout_s=0.2) as (store,):
        await store.enqueue("t")
        claim = await store.claim("t", "w")
        assert claim is not None

        async def write(*_: Any) -> Any:
            raise AppendUnknown("lost")

        store.backend.write = write  # type: ignore[method-assign]
        with pytest.raises(StepUnknown):
            await store.nack(claim)


async def test_an_ack_that_was_done_is_done_although_its_answer_is_lost_and_another_has_the_thread(
    servers: Servers,
) -> None:
    async with Mailboxes("memory", servers).open(2) as (store, other):
        put = [await store.enqueue("t") for _ in range(2)]
        claim = await store.claim("t", "w")
        assert claim is not None
        write, find = store.backend.write, store.backend.find

        async def lost(*args: Any) -> Any:
            store.backend.write = write  # type: ignore[method-assign]
            await write(*args)
            assert await other.claim("t", "another")
            raise AppendUnknown("lost on its way back")

        store.backend.write = lost  # type: ignore[method-assign]
        assert (await store.ack(claim)).status is Status.ACKED
        claim = await other.load_dispatch("t", put[1].dispatch_id)
        assert claim is not None
        # While the store cannot be read, the call must not say that nothing was done.
        await other.enqueue("t")

        async def away(*_: Any) -> Any:
            raise LogUnavailable("away")

        store.backend.write, store.backend.find = lost, away  # type: ignore[method-assign]
        with pytest.raises(StepUnknown):
            await store.ack(claim)
        store.backend.find = find  # type: ignore[method-assign]
        assert (await store.ack(claim)).ended_by == claim.token


@pytest.mark.parametrize("kind", ("memory", *DURABLE))
async def test_a_nack_without_an_answer_is_done_behind_an_interrupt(kind: str, servers: Servers) -> None:
    async with Mailboxes(kind, servers).open(2) as (store, other):
        thread_id = fresh()
        await store.enqueue(thread_id)
        claim = await store.claim(thread_id, "w")
        assert claim is not None
        write = store.backend.write

        async def lost(*_: Any) -> Any:
            store.backend.write = write  # type: ignore[method-assign]
            await other.interrupt(thread_id)
            raise AppendUnknown("lost on its way there")

        store.backend.write = lost  # type: ignore[method-assign]
        assert (await store.nack(claim)).status is Status.SUPERSEDED


@pytest.mark.parametrize("kind", ("memory", *DURABLE))
async def test_a_superseded_claim_whose_answer_is_lost_costs_no_later_one(kind: str, servers: Servers) -> None:
    """Regression: the second try ended whatever was claimed by then."""
    async with Mailboxes(kind, servers).open(2) as (store, other):
        thread_id = fresh()
        for _ in range(2):
            await store.enqueue(thread_id)
        assert await other.claim(thread_id, "hangs") is not None
        write, claims = store.backend.write, []

        async def lost(*args: Any) -> Any:
            store.backend.write = write  # type: ignore[method-assign]
            await write(*args)
            claims.append(await other.claim(thread_id, "another"))
            raise AppendUnknown("lost on its way back")

        store.backend.write = lost  # type: ignore[method-assign]
        with pytest.raises(StepUnknown):
            await store.supersede_claimed(thread_id)
        (claim,) = claims
        assert claim is not None
        assert (await other.ack(claim)).status is Status.ACKED


async def three_lapsed_claims(store: MailboxStore) -> None:
    for n in range(3):
        await store.enqueue(f"t{n}")
        assert await store.claim(f"t{n}", "w", lease_s=1, now_ms=0)


async def test_claims_are_taken_back_once_although_answers_are_lost(servers: Servers) -> None:
    async with Mailboxes("memory", servers).open(1) as (store,):
        await three_lapsed_claims(store)
        write, writes = store.backend.write, 0

        async def lossy(*args: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == 1:
                raise LogUnavailable("no leader")
            after = await write(*args)
            if writes == 2:
                raise AppendUnknown("lost on its way back")
            return after

        store.backend.write = lossy  # type: ignore[method-assign]
        assert sorted(d.thread_id for d in await store.reclaim_expired()) == ["t0", "t1", "t2"]
        assert store.statistics().counts["reclaimed"] == 3


async def test_when_the_store_goes_away_what_was_taken_back_is_told(servers: Servers) -> None:
    async with Mailboxes("memory", servers).open(1, timeout_s=0.05) as (store,):
        await three_lapsed_claims(store)
        write, left = store.backend.write, 2

        async def away(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise LogUnavailable("away")
            return await write(*args)

        store.backend.write = away  # type: ignore[method-assign]
        assert len(await store.reclaim_expired()) == 2
        with pytest.raises(LogUnavailable):
            await store.reclaim_expired()


async def test_what_cannot_be_asked_is_unavailable_and_no_inner_error() -> None:
    """The connection may be lost while a leader proves that it leads: the error is LogUnavailable."""

    class Lost:
        def on_connect(self, hook: object) -> None:
            pass

        async def write(self, *_: Any, **__: Any) -> bytes:
            raise AppendUnknown("the connection was lost")

    class Stream(NatsStream):
        async def last(self, *_: Any, **__: Any) -> dict[str, StoredMessage]:
            return {}

    reads = FreshReads(Stream(Lost(), "$JS.API", "KV_bucket", 3), 1.0, "unused")  # type: ignore[arg-type]
    written = Outgoing("$KV.bucket.t.t", b"state")
    reads.wrote([written], 7)
    with pytest.raises(LogUnavailable):
        await reads.last([written.subject])


@pytest.mark.parametrize("gone_after", [1, 3])
async def test_nobody_waits_for_a_copy_to_show_what_is_gone(gone_after: int) -> None:
    """The leader shows that a message is removed or expired, before a copy is asked for it."""
    asked = 0

    class Stream:
        replicated = True

        async def last(self, subjects: list[str], _: float) -> dict[str, Any]:
            return {}

        async def ends(self, filters: list[str], _: float) -> list[int]:
            nonlocal asked
            asked += 1
            return [7 if asked <= gone_after else 0 for _ in filters]

        def portions(self, subjects: list[str]) -> list[list[str]]:
            return [subjects]

        async def shown(self, *_: Any) -> Shown:
            return Shown([], 0, 0)

        async def read(self, *_: Any) -> list[Any]:
            return []

    reads = FreshReads(Stream(), 30.0, "unused")  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        assert await reads.last(["$KV.bucket.r.t.*"]) == {}
        asked = 0
        assert await reads.all("$KV.bucket.x.*.*") == []


@pytest.mark.parametrize("kind", ["postgres", *seldom("nats")])
async def test_a_sweeper_goes_on_after_an_outage(kind: str, own_servers: Servers) -> None:
    boxes = Mailboxes(kind, own_servers)
    server = own_servers.nats if kind == "nats" else own_servers.postgres
    async with boxes.open(1, sweep_interval_s=1.0, timeout_s=4.0) as (store,), Sweeper(store) as sweeper:
        await asyncio.to_thread(server.stop)

        async def troubled() -> bool:
            return sweeper.trouble is not None

        await eventually(troubled, 30)
        await asyncio.to_thread(server.start)

        async def claimed() -> bool:
            with suppress(BufstoreError):
                await store.enqueue("t")
                return await store.claim("t", "w", lease_s=0.1) is not None
            return False

        await eventually(claimed, 30)

        async def taken_back() -> bool:
            with suppress(BufstoreError):
                return not await store.list_dispatches("t", {Status.CLAIMED})
            return False

        await eventually(taken_back, 40)

        async def well() -> bool:
            return sweeper.trouble is None

        await eventually(well, 30)


@pytest.mark.parametrize("kind", ["nats", "postgres"])
async def test_a_process_that_stands_still_as_it_asks_for_the_time_makes_no_expired_claims(
    kind: str, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its clock was behind by as long, and others took back at once what it claimed."""
    async with Mailboxes(kind, servers).open() as (blocked, other):
        backend = blocked.backend
        owner, name = (backend._bucket.stream, "info") if isinstance(backend, NatsBackend) else (backend, "_run")
        ask = getattr(owner, name)

        async def read_late(*arguments: Any) -> Any:
            answer = await ask(*arguments)
            time.sleep(1.0)  # noqa: ASYNC251 - as an app's code does, or a debugger
            return answer

        with monkeypatch.context() as standing_still:
            standing_still.setattr(owner, name, read_late)
            await backend.sweeps(60)
        await blocked.enqueue("t")
        claim = await blocked.claim("t", "w", lease_s=30)
        assert claim is not None
        assert claim.claimed_at_ms is not None
        assert other.backend.now_ms() - claim.claimed_at_ms < 500
