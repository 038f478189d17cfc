"""Arguments of a wrong type are refused by name, before anything is sent."""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64encode
from collections.abc import Awaitable
from typing import Any, cast

import pytest

from bufstore import (
    BufferedThreadStore,
    BufstoreError,
    ConfigError,
    InvalidId,
    InvalidQuery,
    InvalidRecord,
    MemoryThreadStore,
    NatsConfig,
    PostgresThreadStore,
    Receipt,
    Run,
    RunQuery,
    ThreadQuery,
    ThreadRunStore,
    TooLarge,
)
from bufstore.jetstream.stream import NatsStream
from bufstore.mailbox import MemoryMailboxStore, Status
from bufstore.memory import MemoryNats
from bufstore.notify import MemoryNotifier, PostgresNotifier
from bufstore.threads.model import encode_messages, encode_run
from bufstore.tokens import ExclusiveWork
from helpers import run_of
from unit.fake_log import run


async def refused(call: Awaitable[object], kind: type[BufstoreError], said: str) -> None:
    with pytest.raises(kind, match=said):
        await call


def test_a_field_of_a_run_is_named() -> None:
    with pytest.raises(InvalidRecord, match=r"created_at is 5 and would come back as 5\.0"):
        encode_run(Run(run_id="r", thread_id="t", agent_id="a", steps=1, created_at=5))
    with pytest.raises(InvalidRecord, match="steps"):
        encode_run(Run(run_id="r", thread_id="t", steps=cast(Any, 1.0)))


def test_a_type_that_is_called_as_one_of_python_is_named_with_its_module() -> None:
    like_numpys = type("bool", (), {"__module__": "numpy"})()
    with pytest.raises(InvalidRecord, match=r"a value of type numpy\.bool"):
        encode_messages([{"a": like_numpys}])
    with pytest.raises(InvalidRecord, match=r"a key of type numpy\.bool"):
        encode_messages([{like_numpys: 1}])
    with pytest.raises(InvalidRecord, match="a value of type tuple"):
        encode_messages([(1,)])


def test_reads_and_writes_name_the_argument() -> None:
    async def main() -> None:
        wrong: Any
        query: Any
        memory = MemoryThreadStore()
        async with await BufferedThreadStore.open(memory, nats=MemoryNats()) as store:
            stores: list[ThreadRunStore] = [memory, store]
            for each in stores:
                for wrong in ("0", 0.0, True):
                    said = f"expected_version must be an int, not {wrong!r}"
                    append = each.checkpoint_append("t", [], run_of("t"), expected_version=wrong)
                    await refused(append, InvalidRecord, said)
                    await refused(each.append_messages("t", [], expected_version=wrong), InvalidRecord, said)
                for query in (None, {"after": 1}, RunQuery()):
                    await refused(each.query_messages("t", query), InvalidQuery, "must be a MessageQuery, not ")
                await refused(each.query_runs(cast(Any, None)), InvalidQuery, "must be a RunQuery, not NoneType")
                await refused(each.query_threads(cast(Any, {})), InvalidQuery, "must be a ThreadQuery, not dict")
            said = "at_least must be a Receipt, not int"
            await refused(store.load_messages("t", at_least=cast(Any, 5)), InvalidQuery, said)
            assert await store.load_messages("t", at_least=Receipt("t", 0, 1, 0)) is None

    run(main())


def test_what_no_page_can_be_of_is_refused() -> None:
    nested = urlsafe_b64encode(b"\x91" * 5000 + b"\xc0").decode()

    async def main() -> None:
        memory = MemoryThreadStore()
        async with await BufferedThreadStore.open(memory, nats=MemoryNats()) as store:
            stores: list[ThreadRunStore] = [memory, store]
            for each in stores:
                await refused(each.query_threads(ThreadQuery(), cursor=nested), InvalidQuery, "not a page cursor")
                await refused(each.query_threads(ThreadQuery(roots=cast(Any, "x"))), InvalidQuery, "roots must be")
                for first, last in ((None, 2), (1, "2"), (True, 2)):
                    await refused(each.load_message_range("t", cast(Any, first), cast(Any, last)), InvalidQuery, "must")
            found: Any = store.quarantine
            for wrong in ("1", None, 1.0):
                for call in (found.show(wrong), found.replay(wrong), found.page(after=wrong), found.page(limit=wrong)):
                    await refused(call, InvalidQuery, "must be an int")
                await refused(found.discard([wrong]), InvalidQuery, "a position must be an int")
            for wrong in ("12", 5, None):
                await refused(found.discard(wrong), InvalidQuery, "seqs must be a list of positions")
            await refused(store.bulk.claim(cast(Any, ["run"])), InvalidRecord, "each run must be a Run, not str")
            for time in ("1", [1], True):
                await refused(store.force_flush_all(timeout_s=cast(Any, time)), ConfigError, "must be a number")
            await store.force_flush_all(timeout_s=10**400)

    run(main())


def test_a_mailbox_is_asked_with_limits_that_any_store_can_take() -> None:
    async def main() -> None:
        async with MemoryMailboxStore() as mailbox:
            found: Any = mailbox
            await refused(found.list_finished(limit=1 << 31), InvalidQuery, "below")
            await refused(found.list_dispatches("t", Status.QUEUED), InvalidQuery, "statuses must be a list")
            for wrong in ("1", True):
                await refused(found.pull_signals(timeout_s=wrong), ConfigError, "timeout_s must be a number")
                await refused(found.deliver_live("t", b"", timeout_s=wrong), ConfigError, "timeout_s must be a number")
            await mailbox.enqueue("t", b"")
            assert await mailbox.pull_signals(0) == []
            assert len(await mailbox.pull_signals()) == 1

    run(main())


def test_kinds_to_listen_for_are_several_texts() -> None:
    async def main() -> None:
        notifier: Any
        async with MemoryNotifier() as notifier:
            for wrong in (None, 5, b"kind", [None]):
                await refused(notifier.listen_scheduled(wrong, print), InvalidId, "kind")

    run(main())


def test_what_is_no_address_is_a_config_error() -> None:
    nowhere: Any
    for nowhere in (None, 5, [None]):
        with pytest.raises(ConfigError, match="connection string must be a str"):
            PostgresThreadStore(nowhere)
        with pytest.raises(ConfigError, match="URL"):
            asyncio.run(BufferedThreadStore.open(MemoryThreadStore(), nats=nowhere))
        with pytest.raises(ConfigError, match="URL"):
            asyncio.run(ExclusiveWork.open(nowhere))
        with pytest.raises(ConfigError, match="postgres must be a connection string or a pool, not"):
            asyncio.run(PostgresNotifier.open(nowhere))
    with pytest.raises(ConfigError, match="URLs"):
        NatsConfig(servers=cast(Any, [5]))


def test_a_connection_string_ends_where_it_ends() -> None:
    """Regression: libpq read it up to the first NUL, so a password was sent without its end."""
    with pytest.raises(ConfigError, match="NUL") as refused:
        PostgresThreadStore("host=h password=geheim\0nis")
    assert "geheim" not in str(refused.value)


def test_a_connection_string_may_be_of_a_class_below_str() -> None:
    """Settings of pydantic are such strings."""

    class Dsn(str):
        __slots__ = ()

    assert PostgresThreadStore(Dsn("postgresql://somewhere/db")).schema


def test_an_item_of_work_is_bytes_and_no_entry_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NatsStream, "message_bytes_max", 10_000)
    items: Any = NatsStream.__new__(NatsStream)
    work: Any = ExclusiveWork.__new__(ExclusiveWork)
    work._items = items
    with pytest.raises(InvalidRecord, match="payload must be bytes, not str"):
        asyncio.run(work.submit("k", "text"))
    with pytest.raises(TooLarge, match=r"20000 bytes .* max_payload") as found:
        asyncio.run(work.submit("k", b"x" * 20_000))
    assert "LogConfig" not in str(found.value)
    assert "LogConfig.max_entry_bytes" in str(TooLarge(2, 1))
