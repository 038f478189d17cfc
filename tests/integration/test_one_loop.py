"""A call from another event loop than the store's own neither hangs nor breaks the store for its rightful callers."""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import nats
import pytest

from bufstore import ConfigError, Consistency, PostgresThreadStore, ThreadMetadata
from bufstore.embedded import Servers
from bufstore.notify import NatsNotifier, PostgresNotifier, RedisNotifier
from bufstore.tokens import ExclusiveWork, Locks, TokensConfig
from conftest import Deployment
from helpers import elsewhere, healthy, run_of
from mailboxes import Mailboxes
from token_instances import took

_VALUES: dict[str, Any] = {
    "thread_id": "t",
    "parent_thread_id": None,
    "run_id": "r",
    "run": run_of("t"),
    "message_id": "m",
    "messages": [1],
    "delta": [1],
    "message_ids": None,
    "first": 1,
    "last": 2,
    "state": {},
    "metadata": ThreadMetadata(),
    "thread_ids": ["t"],
    "dispatch_id": "d",
    "holder": "h",
    "payload": b"",
    "finished_before_ms": 1,
    "run_status": "done",
    "instance_id": "i",
}
#: `open` makes a store, `apply` is for the buffer, and the others contact no server.
_OTHERS = {"open", "apply", "deliver_live", "listen_live", "wake"}


async def test_each_call_is_refused_and_the_store_goes_on(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await store.checkpoint("t", [1], run_of("t"))
        await store.force_flush("t")
        calls = [store.query_threads, *_calls(store)]
        assert len(calls) > 25
        calls += _calls(store, consistency=Consistency.EVENTUAL)
        calls += [partial(store.bulk.learn_new, ["new", "newer"]), store.quarantine.count]
        for call in calls:
            await elsewhere(call)
        await store.checkpoint_append("t", [2], run_of("t"))
        assert await store.load_messages("t") == [1, 2]
        await store.delete_messages("t")
        await store.force_flush_all()
        assert await store.load_messages("t", consistency=Consistency.EVENTUAL) == []
        await healthy(store)


async def test_the_same_without_a_log(deployment: Deployment) -> None:
    async with deployment.inner() as store:
        await store.setup()
        await store.checkpoint("t", [1], run_of("t"))
        for call in _calls(store):
            await elsewhere(call)
        assert await store.load_messages("t") == [1]
        assert (await store.load_run("run-0-of-t")) is not None


async def test_the_same_of_a_mailbox(on_postgres: Mailboxes) -> None:
    async with on_postgres.store() as store:
        await store.enqueue("t", b"1")
        claim = await store.claim("t", "w")
        for call in _calls(store, _VALUES | {"claim": claim}):
            await elsewhere(call)
        assert claim is not None
        await store.ack(claim)


@pytest.mark.parametrize("kind", ["postgres", "nats"])
async def test_the_same_of_a_notifier(deployment: Deployment, kind: str) -> None:
    servers, prefix = deployment.servers, f"t{secrets.token_hex(4)}"
    async with (
        await PostgresNotifier.open(servers.postgres.dsn, prefix=prefix, timeout_s=10)
        if kind == "postgres"
        else await NatsNotifier.open(servers.nats.url, prefix=prefix, timeout_s=10)
    ) as notifier:
        await elsewhere(lambda: notifier.listen_scheduled("k", lambda _: None))
        await elsewhere(notifier.aclose)
        heard = asyncio.Event()
        await notifier.listen_scheduled("k", lambda _: heard.set())
        await notifier.notify_scheduled("k")
        await asyncio.wait_for(heard.wait(), 10)
        await elsewhere(notifier.aclose)
    await asyncio.to_thread(asyncio.run, notifier.aclose())


@pytest.mark.parametrize("kind", ["redis", "client"])
async def test_a_notifier_that_keeps_no_connection_of_its_own_closes_on_its_loop_only(
    deployment: Deployment, request: pytest.FixtureRequest, kind: str
) -> None:
    url = request.getfixturevalue("redis_server").url if kind == "redis" else ""
    client, prefix = await nats.connect(deployment.servers.nats.url), f"t{secrets.token_hex(4)}"
    async with (
        await RedisNotifier.open(url, prefix=prefix, timeout_s=10)
        if url
        else await NatsNotifier.open(client, prefix=prefix, timeout_s=10)
    ) as notifier:
        heard = asyncio.Event()
        await notifier.listen_scheduled("k", lambda _: heard.set())
        await elsewhere(notifier.aclose)
        await notifier.notify_scheduled("k")
        await asyncio.wait_for(heard.wait(), 10)
    await asyncio.to_thread(asyncio.run, notifier.aclose())
    assert not [sub.subject for sub in client._subs.values() if not sub.subject.startswith("_INBOX.")]
    await client.close()


async def test_closing_elsewhere_is_refused_and_changes_nothing(servers: Servers, on_nats: Mailboxes) -> None:
    name = f"t{secrets.token_hex(4)}"
    async with (
        on_nats.store() as mailbox,
        await ExclusiveWork.open(servers.nats.url, TokensConfig(name=name)) as work,
        await Locks.open(servers.nats.url, name=f"{name}-locks") as locks,
    ):
        for each in (mailbox, work, locks):
            await elsewhere(each.aclose)
        await mailbox.enqueue("t", b"1")
        assert await mailbox.claim("t", "w") is not None
        await work.submit("k")
        async with await took(work) as task:
            await task.done()
        async with await locks.acquire("k"):
            pass
    for closed in (mailbox, work, locks):
        await asyncio.to_thread(asyncio.run, closed.aclose())


def test_a_store_whose_loop_has_ended_says_so(deployment: Deployment) -> None:
    store: PostgresThreadStore = deployment.inner()

    async def begin() -> None:
        await store.open()
        await store.setup()

    asyncio.run(begin())
    calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [lambda: store.load_messages("t"), store.open, store.aclose]
    for call in calls:
        with pytest.raises(ConfigError, match="another event loop"):
            asyncio.run(call())


def _calls(store: Any, values: Mapping[str, Any] = _VALUES, **options: Any) -> list[Callable[[], Awaitable[Any]]]:
    """Return a call of every method; with `options`, of each method that takes them."""
    calls: list[Callable[[], Awaitable[Any]]] = []
    for name, method in inspect.getmembers(type(store), inspect.iscoroutinefunction):
        parameters = inspect.signature(method).parameters
        if not name.startswith("_") and name not in _OTHERS and options.keys() <= parameters.keys():
            given = [values[p.name] for p in list(parameters.values())[1:] if _given(p)]
            calls.append(partial(getattr(store, name), *given, **options))
    return calls


def _given(parameter: inspect.Parameter) -> bool:
    required = parameter.default is inspect.Parameter.empty
    return parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and required
