"""While a synchronous standby is away, no commit counts as replicated, so nothing is acknowledged."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from bufstore import OutcomeUnknown, PostgresThreadStore, StoreUnavailable
from bufstore.embedded import Servers
from bufstore.mailbox import MailboxConfig, PostgresMailboxStore, StepUnknown
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said


async def cut_off(dsn: str) -> None:
    """Make commits wait for a standby that is away."""
    await set_standby(dsn, "away")

    async def waits() -> bool:
        commit = asyncio.create_task(query(dsn, "SELECT pg_logical_emit_message(true, '', '')"))
        ended, _ = await asyncio.wait([commit], timeout=0.5)
        # A commit that stands still for another reason does not wait for a standby.
        waiting = await query(dsn, "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        commit.cancel()
        await asyncio.gather(commit, return_exceptions=True)
        return bool(waiting) and not ended

    await eventually(waits)


async def set_standby(dsn: str, name: str) -> None:
    await query(dsn, f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    await query(dsn, "SELECT pg_reload_conf()")


async def test_what_a_standby_has_not_got_is_not_acknowledged(own_servers: Servers) -> None:
    dsn, thread_id = own_servers.postgres.dsn, fresh()
    async with PostgresThreadStore(dsn) as store:  # the others have little time
        await store.setup()
    mailbox = PostgresMailboxStore(dsn, config=MailboxConfig(timeout_s=5.0))
    async with PostgresThreadStore(dsn, timeout_s=5.0) as store, mailbox:
        await cut_off(dsn)
        with pytest.raises(OutcomeUnknown) as unknown:
            await store.checkpoint(thread_id, [said(1)], run_of(thread_id))
        key = unknown.value.token
        with pytest.raises(OutcomeUnknown):  # although this server has it
            await store.checkpoint(thread_id, [said(1)], run_of(thread_id), idempotency_key=key)
        with pytest.raises(StepUnknown):
            await mailbox.enqueue(thread_id, b"x")
        await set_standby(dsn, "")

        async def again() -> Any:
            with suppress(OutcomeUnknown, StoreUnavailable):  # the checkpointer has not read the setting yet
                return await store.checkpoint(thread_id, [said(1)], run_of(thread_id), idempotency_key=key)
            return None

        assert (await eventually(again)).repeated


@pytest.mark.long
async def test_a_flush_that_a_standby_has_not_got_is_made_again(
    own_servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, dsn, thread_id = Deployment(own_servers), own_servers.postgres.dsn, fresh()
    async with deployment.store() as store:
        await store.checkpoint(thread_id, [said(1)], run_of(thread_id))
        await store.force_flush_all()
        monkeypatch.setattr(store.buffer.ledger._tables, "timeout_s", 1.0)  # type: ignore[attr-defined]
        partition = store.buffer.subjects.partition(thread_id)

        async def row() -> Any:
            where = f"FROM {deployment.name}.buffer_partitions WHERE partition = %s"
            return (await query(dsn, f"SELECT cursor_seq, term {where}", partition))[0]

        seq, term = await row()
        await cut_off(dsn)
        receipt = await store.checkpoint_append(thread_id, [said(2)], run_of(thread_id))

        async def taken_again() -> bool:
            found_seq, found_term = await row()
            return bool(found_seq >= receipt.thread_seq > seq and found_term > term)

        # This server has the flush, but the flusher takes the partition again, with a write that waits too.
        await eventually(taken_again)
        await set_standby(dsn, "")
        await store.force_flush_all()
        assert [m["id"] for m in await store.load_messages(thread_id)] == ["m1", "m2"]
