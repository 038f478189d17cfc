"""A stream whose settings somebody changes beside the processes that use it: of a log, a mailbox, exclusive work."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from bufstore import BufferedThreadStore, ConfigDrift, ConfigError, Health, LogUnavailable, OutcomeUnknown
from bufstore.embedded import Servers
from bufstore.jetstream.stream import NatsStream
from bufstore.mailbox import NatsMailboxStore
from bufstore.mailbox.sweeper import Sweeper
from bufstore.tokens import ExclusiveWork, TokensConfig
from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import eventually, fresh, healthy, query, run_of, said, writable
from mailboxes import Mailboxes


async def _changed(of: BufferedThreadStore | NatsStream, name: str, change: dict[str, Any]) -> dict[str, Any]:
    """Change settings of a stream; return those from before."""
    api = (of if isinstance(of, NatsStream) else of.buffer.session.stream).api
    before: dict[str, Any] = (await api(f"STREAM.INFO.{name}"))["config"]
    await api(f"STREAM.UPDATE.{name}", before | change)
    return before


@pytest.mark.parametrize(
    ("change", "writes", "reads", "advice"),
    [
        ({"max_age": 3600 * 10**9}, True, True, "before they are flushed"),
        ({"discard": "old"}, True, True, "before they are flushed"),
        ({"max_msgs_per_subject": 100}, True, True, "before they are flushed"),
        ({"max_msgs": 100}, True, True, "before they are flushed"),
        ({"subjects": ["elsewhere.>"]}, False, True, "nats stream edit"),
        ({"subject_transform": {"src": ">", "dest": "archive.>"}}, False, True, "nats stream edit"),
        ({"no_ack": True}, False, True, "nats stream edit"),
        ({"allow_direct": False}, False, False, "nats stream edit"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
async def test_health_says_what_was_changed_of_the_log_and_what_that_means(
    deployment: Deployment, change: dict[str, Any], writes: bool, reads: bool, advice: str
) -> None:
    ((field, value),) = change.items()
    async with deployment.store() as store, deployment.store(flusher=False) as app:
        await store.checkpoint("t", [said(0)], run_of("t"))
        before = await _changed(store, deployment.log.stream, change)
        for each in (store, app):
            found: Health = await each.health()
            assert not found.ok
            assert f"stream {deployment.log.stream}: {field} is {value!r}" in found.log
            assert advice in found.log
            assert (found.can_write, found.can_read) == (writes, reads)
            for said_there in filter(None, (found.write_trouble, found.read_trouble)):
                assert field in said_there
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{deployment.log.stream}", before)
        for each in (store, app):
            await healthy(each)
            await each.checkpoint("t", [said(0), said(1)], run_of("t", 1))
        await store.force_flush_all()


async def test_health_says_all_that_was_changed(deployment: Deployment) -> None:
    """Regression: only the first change counted; with a max_age beside it, all reads failed and could be done."""
    async with deployment.store() as store:
        change = {"max_age": 3600 * 10**9, "allow_direct": False, "allow_rollup_hdrs": False}
        before = await _changed(store, deployment.log.stream, change)
        found = await store.health()
        assert not found.can_write
        assert not found.can_read
        for field in change:
            assert f"{field} is" in found.log
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{deployment.log.stream}", before)
        await healthy(store)


@pytest.mark.parametrize("subjects", [["{}.>"], ["{}.*.0", "another.>"]])
async def test_a_log_that_hears_more_than_it_must_takes_writes(deployment: Deployment, subjects: list[str]) -> None:
    """Regression: health said that no checkpoint is accepted, which takes an app out of service."""
    wanted = [subject.format(deployment.log.subject) for subject in subjects]
    async with deployment.store() as store:
        before = await _changed(store, deployment.log.stream, {"subjects": wanted})
        await store.checkpoint("t", [said(0)], run_of("t"))
        found = await store.health()
        assert (found.can_write, found.can_read, found.flushing) == (True, True, True)
        assert "subjects is" in found.log
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{deployment.log.stream}", before)
        await healthy(store)


async def test_a_flusher_says_without_being_asked_that_the_log_may_lose_entries(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        before = await _changed(store, deployment.log.stream, {"max_age": 3600 * 10**9})

        async def told() -> bool:
            return any(getattr(r, "action", "") == "log_altered" for r in caplog.records)

        await eventually(told, 30)
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{deployment.log.stream}", before)
        await healthy(store)
        assert [getattr(r, "action", "") for r in caplog.records].count("log_altered") == 1


async def test_status_says_what_was_changed_of_the_log_and_that_postgres_answers(deployment: Deployment) -> None:
    """Regression: it said that Postgres could not be asked because of the log's max_age, nor read, nor flushed into."""
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush_all()
        before = await _changed(store, deployment.log.stream, {"max_age": 3600 * 10**9})
        told = await asyncio.to_thread(bufstore_cli, "status", "--json", **where(deployment))
        assert (told.code, told.json["ok"], told.json["postgres_trouble"]) == (1, False, "")
        assert "max_age is" in told.json["log_trouble"]
        assert [told.json[name] for name in ("can_write", "can_read", "flushing", "lag")] == [True, True, True, 0]
        shown = await asyncio.to_thread(bufstore_cli, "status", **where(deployment))
        assert "the log: stream" in shown.out
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{deployment.log.stream}", before)
        healed = await asyncio.to_thread(bufstore_cli, "status", "--json", **where(deployment))
        assert (healed.code, healed.json["log_trouble"]) == (0, "")


@pytest.mark.parametrize("change", [{"subjects": ["elsewhere.>"]}, {"allow_direct": False}], ids=["subjects", "direct"])
async def test_a_write_that_an_altered_log_does_not_take_says_why(
    deployment: Deployment, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with deployment.store(flusher=False, append_timeout_s=5.0) as app:
        before = await _changed(app, deployment.log.stream, change)
        with pytest.raises((LogUnavailable, OutcomeUnknown)) as caught:
            await app.checkpoint("t", [said(0)], run_of("t"))
        advice = f"nats stream edit {deployment.log.stream}"
        if isinstance(caught.value, LogUnavailable):  # else the last try was on its way when the connection was left
            assert advice in str(caught.value)
        assert advice in next(r for r in caplog.records if getattr(r, "action", "") == "log_altered").getMessage()
        await app.buffer.session.stream.api(f"STREAM.UPDATE.{deployment.log.stream}", before)
        await app.checkpoint("t", [said(0)], run_of("t"))


async def test_nobody_is_told_of_a_change_by_who_only_expects_other_settings(
    made: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: `bufstore log set`, which knows no subject, said that the log's was changed, and to change it."""
    await made.change(failover_window_s=90.0)
    made.log = dataclasses.replace(made.log, replicas=3)
    with pytest.raises(ConfigDrift, match="num_replicas"):
        async with made.store():
            pass
    assert "log_altered" not in [getattr(r, "action", "") for r in caplog.records]


async def test_another_log_of_the_same_name_is_compared_again(deployment: Deployment) -> None:
    """Regression: a process that ran while all was removed and begun anew took it with another number of partitions."""
    deployment.verified = False  # the one that is left refuses the log, sooner or later
    async with deployment.store() as left:
        for stream in (deployment.log.stream, f"KV_{deployment.log.bucket}"):
            await left.buffer.session.stream.api(f"STREAM.DELETE.{stream}")
        await query(deployment.servers.postgres.dsn, f"DROP SCHEMA {deployment.name} CASCADE")
        deployment.log = dataclasses.replace(deployment.log, partitions=16)
        async with deployment.store():
            with pytest.raises(ConfigDrift, match="partitions is '16'"):
                await left.buffer.log.epoch()


@pytest.mark.parametrize(
    "change", [{"max_msg_size": 10}, {"subjects": ["elsewhere.>"]}], ids=["max_msg_size", "subjects"]
)
async def test_a_bucket_that_refuses_new_runs_shows_in_health_by_name_until_it_takes_them(
    deployment: Deployment, change: dict[str, Any]
) -> None:
    async with deployment.store() as store, deployment.store(flusher=False) as app:
        await app.checkpoint("t", [said(0)], run_of("t"))
        await app.force_flush_all()
        bucket = f"KV_{deployment.log.bucket}"
        before = await _changed(store, bucket, change)
        with pytest.raises(ConfigError, match=bucket) as caught:
            await app.checkpoint("t", [said(0), said(1)], run_of("t", 1))
        found = await app.health()
        assert (found.can_write, found.write_trouble) == (False, str(caught.value))
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{bucket}", before)
        await app.checkpoint("t", [said(0), said(1)], run_of("t", 1))
        await writable(app)
        await healthy(store)


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "stream_altered"]


async def test_a_sweeper_says_once_that_its_mailbox_may_lose_dispatches(
    on_nats: Mailboxes, caplog: pytest.LogCaptureFixture
) -> None:
    async with on_nats.open(1) as (mailbox,):
        assert isinstance(mailbox, NatsMailboxStore)
        bucket, stream = f"KV_{on_nats.name}", mailbox.backend._stream
        before = await _changed(stream, bucket, {"max_age": 3600 * 10**9})
        sweeper = Sweeper(mailbox)
        await sweeper.sweep()
        await sweeper.sweep()
        (told,) = _told(caplog)
        assert f"stream {bucket}: max_age is 3600000000000" in told
        assert f"nats stream edit {bucket}" in told
        await _changed(stream, bucket, {"max_age": before["max_age"], "max_bytes": 2 * before["max_bytes"]})
        await sweeper.sweep()
        assert len(_told(caplog)) == 1


async def test_a_worker_says_once_that_its_items_may_be_lost(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    config = TokensConfig(name=fresh("work"))
    async with await ExclusiveWork.open(servers.nats.url, config) as work:
        await _changed(work._items, f"{config.name}-items", {"max_age": 3600 * 10**9})
        await work.statistics()
        await work.statistics()
        (told,) = _told(caplog)
        assert f"stream {config.name}-items: max_age is 3600000000000" in told


async def test_streams_that_answer_no_write_are_refused(servers: Servers, on_nats: Mailboxes) -> None:
    config = TokensConfig(name=fresh("work"))
    async with await ExclusiveWork.open(servers.nats.url, config) as work, on_nats.open(1) as (mailbox,):
        assert isinstance(mailbox, NatsMailboxStore)
        for stream, name in (
            (work._items, f"{config.name}-items"),
            (work._fences, f"{config.name}-fence"),
            (mailbox.backend._stream, f"KV_{on_nats.name}"),
        ):
            before = await _changed(stream, name, {"no_ack": True})
            with pytest.raises(ConfigDrift, match="no_ack"):
                if name.startswith("KV_"):
                    async with on_nats.open(1):
                        pass
                else:
                    await ExclusiveWork.open(servers.nats.url, config)
            await stream.api(f"STREAM.UPDATE.{name}", before)
        await (await ExclusiveWork.open(servers.nats.url, config)).aclose()
