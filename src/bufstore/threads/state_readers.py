"""Reads what a store holds of a thread, together with the watermark that says how fresh it is."""

from __future__ import annotations

import asyncio

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.ports.ledger import Ledger
from bufstore.errors import InvalidRecord, ReadNotFresh, StoreMisconfigured
from bufstore.tasks import own_cancels_only
from bufstore.threads.model import Checkpoint, encode_messages, encode_run, encode_value
from bufstore.threads.protocol import WrappableStore
from bufstore.threads.state import ThreadState

_TRIES = 5

#: The id of a run that does not exist: asking for it costs the store little.
PROBE = "bufstore-probe"


class ComparingReader:
    """Reads any store: the watermark before and after the state; if both are equal, no flush came between."""

    def __init__(self, store: WrappableStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger

    async def state(self, thread_id: str) -> ThreadState:
        watermark = await self._ledger.watermark(thread_id)
        for attempt in range(_TRIES):
            with own_cancels_only():
                found = await self._store.load_checkpoint(thread_id)
            after = await self._ledger.watermark(thread_id)
            same, watermark = after == watermark, after
            if same and not _is_another(found, watermark):
                return _state(thread_id, found, watermark)
            await asyncio.sleep(0.01 * attempt)  # the thread was flushed during this try: let a window pass
        if same and _is_another(found, watermark):
            count = len(found.messages) if found is not None else 0
            raise ReadNotFresh(
                f"thread {thread_id!r}: the store shows {count} messages where {watermark.version} are flushed; it "
                "must read where it is written, not from a replica, and nothing else may change the rows"
            )
        raise ReadNotFresh(
            f"thread {thread_id!r} could not be read: a flush interrupted each of {_TRIES} attempts; read again"
        )

    async def answers(self) -> None:
        with own_cancels_only():
            await self._store.load_run(PROBE)


def _is_another(found: Checkpoint | None, watermark: Watermark) -> bool:
    """Whether a store shows another state than the flushed one; of a thread without rows nobody can tell."""
    return found is not None and watermark.applied_id > 0 and len(found.messages) != watermark.version


def _state(thread_id: str, found: Checkpoint | None, watermark: Watermark) -> ThreadState:
    if found is None:
        return ThreadState(watermark=watermark)
    if not watermark.applied_id:  # its messages are from before the buffer
        watermark = msgspec.structs.replace(watermark, version=len(found.messages))
    try:
        return ThreadState(
            watermark=watermark,
            thread=found.thread,
            messages=encode_messages(found.messages),
            latest_run=encode_run(found.latest_run) if found.latest_run is not None else None,
            state=encode_value(found.state, "thread state") if found.state is not None else None,
        )
    except InvalidRecord as e:
        if not watermark.applied_id:
            raise
        # It was checked when it was written, so the store's columns have changed it (a jsonb number, say).
        raise StoreMisconfigured(f"thread {thread_id!r}: the store returns what was not written to it: {e}") from e
