"""Reading Postgres back, without the buffer, and comparing it with what was acknowledged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from bufstore.cli.conversations.concurrency import each
from bufstore.threads.model import decode_message
from bufstore.threads.postgres.store import PostgresThreadStore
from bufstore.threads.state import ThreadState

_AT_ONCE = 8
_PROBLEMS_SHOWN = 10


class Expected(NamedTuple):
    """A thread that was written with one checkpoint after every message (one in all, if it has no message)."""

    thread_id: str
    messages: list[Any]
    #: How many checkpoints were acknowledged: at least this many messages, from the first on, must be there.
    acknowledged: int
    #: The position of the last acknowledged one in the log.
    thread_seq: int
    #: How many earlier checkpoints were acknowledged whose messages these have replaced.
    superseded: int = 0


@dataclass
class Comparison:
    """The result of a comparison."""

    threads: int = 0
    #: Messages that were read back.
    compared: int = 0
    #: Acknowledged checkpoints that Postgres has applied, by the thread's watermark.
    flushed: int = 0
    #: Acknowledged checkpoints whose message is not in Postgres.
    lost: int = 0
    #: Messages in Postgres that differ from those written in their place.
    mismatched: int = 0
    #: The first few problems, in words.
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when everything that was acknowledged is there, and nothing else."""
        return not (self.lost or self.mismatched)


async def compare(store: PostgresThreadStore, expected: AsyncIterator[Expected]) -> Comparison:
    """Compare every message of every thread. `store` must see the tables of the buffer, too."""
    comparison = Comparison()

    async def check(thread: Expected) -> None:
        _judge(comparison, thread, await store.load_state(thread.thread_id, with_watermark=True))

    await each(expected, check, at_once=_AT_ONCE)
    return comparison


def _judge(comparison: Comparison, thread: Expected, found: ThreadState) -> None:
    comparison.threads += 1
    if found.thread is None:
        lost, mismatched, applied = thread.acknowledged, 0, 0
    else:
        # Checkpoint i holds i messages, so their number tells how many checkpoints Postgres holds.
        wanted = min(thread.acknowledged, len(thread.messages))
        lost = max(0, wanted - len(found.messages))
        comparison.compared += len(found.messages)
        mismatched = _differences(thread.messages, found.messages)
        applied = thread.acknowledged - lost
        if found.watermark.flushed_seq >= thread.thread_seq > 0:
            applied = thread.superseded + thread.acknowledged
    comparison.flushed += applied
    comparison.lost += lost
    comparison.mismatched += mismatched
    if (lost or mismatched) and len(comparison.problems) < _PROBLEMS_SHOWN:
        comparison.problems.append(
            f"thread {thread.thread_id!r}: {lost} of {thread.acknowledged} checkpoints lost, "
            f"{mismatched} messages differ"
        )


def _differences(written: list[Any], stored: list[bytes]) -> int:
    """Count the stored messages that differ from the one written in their place, or have no such one."""
    same = sum(
        _exactly(ours) == _exactly(decode_message(theirs)) for ours, theirs in zip(written, stored, strict=False)
    )
    return len(stored) - same


def _exactly(value: Any) -> bytes:
    # Not ==, which takes 1, 1.0 and True for the same and ignores the order of keys.
    return msgspec.json.encode(value)
