"""A shared-state bucket that takes no runs: full up to its `max_bytes`, or stopped by a full disk."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest

from bufstore import AlreadyExists, Consistency, LogFull, LogUnavailable, Run
from bufstore.embedded import Servers
from bufstore.jetstream.messages import AppendUnknown
from bufstore.jetstream.subject_tokens import token
from bufstore.nats.setup import bucket_stream
from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import eventually, fresh, healthy, run_of, said

LIMIT = 256 << 10


class Bucket:
    """An operator's view of a deployment's bucket."""

    def __init__(self, client: Any, deployment: Deployment) -> None:
        self._client = client
        self._name = bucket_stream(deployment.log)
        self._keys = f"$KV.{deployment.log.bucket}.run."

    async def ask(self, verb: str, body: Any = None) -> Any:
        """Send a request to the JetStream API."""
        subject = f"$JS.API.STREAM.{verb}.{self._name}"
        answer = await self._client.request(subject, json.dumps(body).encode(), timeout=10)
        return json.loads(answer.data)

    async def held(self) -> int:
        """Return the number of bytes in the bucket."""
        return int((await self.ask("INFO"))["state"]["bytes"])

    async def limit(self, max_bytes: int) -> None:
        """Change the bucket's `max_bytes`."""
        config = (await self.ask("INFO"))["config"]
        assert "error" not in await self.ask("UPDATE", config | {"max_bytes": max_bytes})

    async def put(self, size: int) -> bool:
        """Store a run of another process, of this size; False if there is no room for it."""
        answer = await self._client.request(self._keys + fresh(), b"x" * size, timeout=10)
        return b"error" not in answer.data


@asynccontextmanager
async def bucket_of(deployment: Deployment) -> AsyncIterator[Bucket]:
    async with deployment.store(flusher=False):
        pass
    client = await nats.connect(deployment.servers.nats.url)
    try:
        bucket = Bucket(client, deployment)
        await bucket.limit(LIMIT)
        yield bucket
    finally:
        await client.close()


async def test_runs_leave_room_for_flushers_and_go_on_unregistered(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    deployment.verified = False  # an entry is parked in the end
    async with bucket_of(deployment) as bucket:
        assert await bucket.put(LIMIT - LIMIT // 8 - 10_000)
        async with deployment.store(flusher=False) as writer:
            threads = [f"t{number}" for number in range(400)]
            for thread_id in threads:
                await writer.checkpoint(thread_id, [said(0)], run_of(thread_id))
            assert LIMIT * 3 // 4 < await bucket.held() < LIMIT * 15 // 16
            assert [getattr(r, "action", "") for r in caplog.records].count("runs_unregistered") == 1
            health = await writer.health()
            assert health.can_write, health
            assert not health.ok
            assert re.search("runs are not registered: .* is full", health.log)
            with pytest.raises(AlreadyExists, match="belongs to another thread"):
                await writer.checkpoint("another", [said(0)], Run(run_id=run_of("t0").run_id, thread_id="another"))
            async with deployment.store() as flusher:
                last = await flusher.load_run(run_of("t399").run_id, consistency=Consistency.READ_YOUR_WRITES)
                assert last is not None
                assert last.thread_id == "t399"
                await flusher.force_flush_all()
                for thread_id in threads:
                    assert await flusher.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0)]
                await flusher.delete_thread("t1")
                await healthy(flusher)
                # A run that is not registered is known only to Postgres, so the conflict is found at the flush.
                await writer.checkpoint("another", [said(0)], Run(run_id=run_of("t398").run_id, thread_id="another"))
                await flusher.force_flush_all()
                assert await flusher.quarantined() == 1


async def test_a_bucket_that_only_reads_on_stops_no_write_but_one(
    deployment: Deployment, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose disk was full: nats-server answers no write to it any more."""
    async with deployment.store(append_timeout_s=1.5) as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        shared = store.buffer.session.shared
        with monkeypatch.context() as patched:
            patched.setattr(shared._writes, "submit", lambda _: asyncio.get_running_loop().create_future())
            with pytest.raises(LogUnavailable, match="could not be registered in time"):
                await store.checkpoint("new", [said(0)], run_of("new"))
            for thread_id in "new", "newer":
                await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            assert [getattr(r, "action", "") for r in caplog.records].count("runs_unregistered") == 1
            assert "runs are not registered" in (await store.health()).log
            with pytest.raises(AlreadyExists, match="belongs to another thread"):
                await store.checkpoint("another", [said(0)], Run(run_id=run_of("t").run_id, thread_id="another"))

        async def stores_again() -> bool:  # as the renewal of the lease finds out
            return not shared._silent

        await eventually(stores_again)
        assert not (await store.health()).log
        await store.checkpoint("newest", [said(0)], run_of("newest"))
        owners = [await shared.thread_of_run(run_of(t).run_id, 5) for t in ("t", "new", "newer", "newest")]
        assert owners == ["t", None, None, "newest"]


async def test_a_replicated_bucket_that_elects_a_leader_gets_the_record_of_every_run(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: for half a minute after a leader was paused or cut off, runs were not registered."""
    async with deployment.store(append_timeout_s=1.5, flusher=False) as store:
        shared = store.buffer.session.shared
        monkeypatch.setattr(shared._stream, "replicated", True)
        with monkeypatch.context() as patched:
            patched.setattr(shared._writes, "submit", lambda _: asyncio.get_running_loop().create_future())
            for _ in range(2):
                with pytest.raises(LogUnavailable, match="could not be registered in time"):
                    await store.checkpoint("t", [said(0)], run_of("t"))
        await store.checkpoint("t", [said(0)], run_of("t"))
        assert await shared.thread_of_run(run_of("t").run_id, 5) == "t"


async def test_a_bucket_that_is_only_slow_registers_runs_again_after_one_of_them(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment.store(append_timeout_s=1.5, flusher=False) as store:
        shared = store.buffer.session.shared
        submit = shared._writes.submit

        async def slowly(messages: Any) -> int:
            await asyncio.sleep(2)
            return int(await submit(messages))

        monkeypatch.setattr(shared._writes, "submit", lambda messages: asyncio.ensure_future(slowly(messages)))
        with pytest.raises(LogUnavailable, match="could not be registered in time"):
            await store.checkpoint("t0", [said(0)], run_of("t0"))
        await asyncio.gather(*(store.checkpoint(t, [said(0)], run_of(t)) for t in ("t1", "t2")))

        async def stores_again() -> bool:
            return not shared._silent

        await eventually(stores_again)
        monkeypatch.undo()
        await store.checkpoint("t3", [said(0)], run_of("t3"))
        owners = [await shared.thread_of_run(run_of(t).run_id, 5) for t in ("t1", "t2", "t3")]
        assert owners == ["t1", None, "t3"], "the first of them finds out"


async def test_a_connection_that_is_lost_is_no_silent_bucket(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployment.store(flusher=False) as store:
        shared, lost = store.buffer.session.shared, iter(range(2))
        submit = shared._writes.submit

        def flapping(messages: Any) -> asyncio.Future[int]:
            if next(lost, None) is None:
                return submit(messages)
            answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            answer.set_exception(AppendUnknown("the connection was lost"))
            return answer

        monkeypatch.setattr(shared._writes, "submit", flapping)
        shared._silent = True  # as after an outage
        await asyncio.gather(*(store.checkpoint(t, [said(0)], run_of(t)) for t in ("t1", "t2")))
        assert [await shared.thread_of_run(run_of(t).run_id, 5) for t in ("t1", "t2")] == ["t1", "t2"]
        assert not shared._silent


async def test_a_second_outage_of_nats_soon_after_the_first_leaves_no_run_unregistered(
    own_servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a probe of the first outage was taken for an answer after the second one."""
    deployment = Deployment(own_servers)
    async with deployment.store(flusher=False, append_timeout_s=1.5) as store:
        for n in range(2):
            await asyncio.to_thread(own_servers.nats.kill)
            with pytest.raises(LogUnavailable):
                await store.checkpoint("away", [said(0)], run_of("away"))
            await asyncio.to_thread(own_servers.nats.start)
            await store.buffer.session.connection.wait_up(30)
            assert not store.buffer.session.shared._silent, "nobody has asked the bucket in vain"
            store.buffer.session.shared._silent = True  # as by a claim that NATS did not answer before it went away
            await store.checkpoint(f"back-{n}", [said(0)], run_of(f"back-{n}"))
        with pytest.raises(AlreadyExists, match="belongs to another thread"):
            await store.checkpoint("another", [said(0)], Run(run_id=run_of("back-1").run_id, thread_id="another"))
        assert "runs_unregistered" not in [getattr(r, "action", "") for r in caplog.records]


async def test_a_bucket_is_not_given_up_for_what_nats_did_not_answer_before_it_was_away(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with deployment.store(flusher=False, append_timeout_s=3) as store:
        shared = store.buffer.session.shared
        submit, look = shared._writes.submit, shared.thread_of_run
        asked: list[asyncio.Future[int]] = []
        looks = 0

        def lost(messages: Any) -> asyncio.Future[int]:
            asked.append(submit(messages) if asked else asyncio.get_running_loop().create_future())
            return asked[-1]

        async def hangs_once(run_id: str, timeout_s: float) -> str | None:
            nonlocal looks
            looks += 1
            if looks == 2:  # NATS is away since the first one
                asked[0].set_exception(AppendUnknown("the connection was lost"))
                raise LogUnavailable("the connection was lost")
            owner: str | None = await look(run_id, timeout_s)
            return owner

        monkeypatch.setattr(shared._writes, "submit", lost)
        monkeypatch.setattr(shared, "thread_of_run", hangs_once)
        shared._silent = True  # as after a write that NATS did not answer
        await store.checkpoint("t", [said(0)], run_of("t"))
        assert len(asked) == 2, "the bucket was asked anew"
        assert await look(run_of("t").run_id, 5) == "t"
        assert "runs_unregistered" not in [getattr(r, "action", "") for r in caplog.records]


async def test_a_record_of_a_run_that_somebody_emptied_stops_no_write(deployment: Deployment) -> None:
    """Regression: `nats kv del` leaves an empty record, and no checkpoint of the run was taken any more."""
    thread_id = fresh()
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        subject = f"$KV.{deployment.log.bucket}.run.{token(run_of(thread_id).run_id)}"
        client = await nats.connect(deployment.servers.nats.url)
        await client.jetstream(timeout=10).publish(subject, b"", headers={"KV-Operation": "DEL"})
        await client.close()
    async with deployment.store(flusher=False, append_timeout_s=5.0) as other:
        await other.checkpoint_append(thread_id, [said(1)], run_of(thread_id))
        assert await other.buffer.shared.thread_of_run(run_of(thread_id).run_id, 5) == thread_id


async def test_a_bucket_without_any_room_is_said_to_be_full(deployment: Deployment) -> None:
    async with bucket_of(deployment) as bucket, deployment.store(flusher=False) as writer:
        for size in 100_000, 10_000, 1000, 100, 1:
            while await bucket.put(size):
                pass
        await writer.checkpoint("t", [said(0)], run_of("t"))
        said_of_it = f"bucket {deployment.log.bucket} is full .*nats stream edit KV_{deployment.log.bucket} --max-bytes"
        with pytest.raises(LogFull, match=said_of_it):
            await writer.buffer.session.shared.renew_member("a-flusher", 2)
        async with deployment.store() as flusher:

            async def told() -> bool:
                return re.search(said_of_it, (await flusher.health()).flush_trouble) is not None

            await eventually(told)
            report = await asyncio.to_thread(bufstore_cli, "doctor", "--json", **where(deployment))
            (room,) = (c for c in json.loads(report.out)["checks"] if c["what"] == "bucket room")
            assert room["level"] == "warning"
            await bucket.limit(2 * LIMIT)
            await flusher.force_flush_all()
            await healthy(flusher)
