"""Cursors of partitions to which nothing is written (`bufstore.buffer.flush.idle`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bufstore.buffer.flush.idle import IdleCursors
from bufstore.buffer.flush.owned_partition import OwnedPartition
from bufstore.buffer.places import place
from bufstore.buffer.ports.ledger import Cursor
from bufstore.buffer.subjects import Subjects
from bufstore.config import BufferConfig
from bufstore.memory.ledger import MemoryLedger
from bufstore.threads.memory_store import MemoryThreadStore
from unit.fake_log import run
from unit.test_group_feeds import Server, settled


class Owner:
    """Owns partitions, and moves their cursors."""

    def __init__(self, server: Server) -> None:
        self._server, self._ledger = server, MemoryLedger(MemoryThreadStore())
        self.owned: dict[int, OwnedPartition] = {}
        parts: Any = SimpleNamespace(ledger=self._ledger, config=BufferConfig())
        self.idle = IdleCursors(parts, self.owned)

    async def take(self, partition: int, seq: int = 0) -> OwnedPartition:
        """Follow a partition from the position after `seq`."""
        await self._ledger.setup()
        (cursor,) = await self._ledger.take([partition], "me")
        self._ledger._cursors[partition] = cursor = Cursor(partition, cursor.term, seq, seq)
        feed = await self._server.open(partition, seq + 1)
        self.owned[partition] = OwnedPartition(cursor, feed, Subjects("s", 4))
        return self.owned[partition]

    async def collect(self) -> None:
        """Take what has arrived."""
        await settled()
        for one in self.owned.values():
            one.collect()


def test_who_comes_where_another_has_stopped_the_delivery_is_delivered_to() -> None:
    """The newcomer has passed all that was delivered there, so its entries cannot show that the other is late."""

    async def main() -> None:
        server = Server(["1"] * 20 + ["2"] * 5, ahead=10)
        owner = Owner(server)
        one = await owner.take(1)
        await owner.collect()
        assert len(one.pending) == 10, "all that is delivered ahead, and none of it can be passed"
        two = await owner.take(2, place(12, 0))
        await owner.collect()
        assert not two.pending
        await owner.idle.advance()
        await owner.collect()
        assert list(two.pending) == server.expected(2, 0)
        assert len(one.pending) == 10, "it is set aside"
        await server.feeds.aclose()

    run(main())


def test_an_idle_cursor_goes_to_the_last_entry_of_any_partition() -> None:
    async def main() -> None:
        server = Server(["12", "1", "1"])
        owner = Owner(server)
        busy = await owner.take(1), await owner.take(2)
        idle = await owner.take(3)
        await owner.collect()
        await owner.idle.advance()
        assert [one.cursor.seq for one in busy] == [0, 0], "entries of theirs are open"
        assert idle.cursor.seq == place(3, 0)
        await server.feeds.aclose()

    run(main())
