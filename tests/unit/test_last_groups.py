"""A process behind a backlog finds the partitions' ends in the log's last groups, and reads nothing else for that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bufstore.buffer.subjects import Subjects
from bufstore.config import BufferConfig, LogConfig
from bufstore.jetstream.messages import Outgoing, Part
from bufstore.memory.log import MemoryLog
from bufstore.memory.server import MemoryNats
from unit.fake_log import run

CONFIG = BufferConfig(log=LogConfig(partitions=4))
SUBJECTS = Subjects(CONFIG.log.subject, 4)
THREADS = {SUBJECTS.partition(thread): thread for thread in map(str, range(100))}
#: The number of entries in a backlog, each in a group of its own.
BACKLOG = 500


async def written(nats: MemoryNats, partitions: Sequence[int]) -> dict[int, int]:
    """Write to these partitions, one after the other. Returns where each partition ends then."""
    log = nats.session(CONFIG).log
    if await log.epoch(checked=False) is None:
        await log.create(1, None)
    await log.epoch()
    places = {p: await log.publish(Outgoing(SUBJECTS.of(THREADS[p]), b"x"), 5.0) for p in partitions}
    await log.aclose()
    return places


@pytest.mark.parametrize(("quiet", "least", "most"), [(False, 4, 100), (True, BACKLOG, 10 * BACKLOG)])
def test_it_reads_a_backlog_only_for_partitions_that_the_last_groups_have_nothing_of(
    monkeypatch: pytest.MonkeyPatch, quiet: bool, least: int, most: int
) -> None:
    async def main() -> None:
        nats = MemoryNats()
        ends = await written(nats, [0, *([n % 3 + 1 if quiet else n % 4 for n in range(BACKLOG)])])
        log, read, part = nats.session(CONFIG).log, 0, MemoryLog.part

        async def counted(self: MemoryLog, subject: str, *args: float) -> Part:
            nonlocal read
            found = await part(self, subject, *args)
            read += len(found.messages)
            return found

        monkeypatch.setattr(MemoryLog, "part", counted)
        assert await log.epoch() == 1
        assert await log.latest_partition_ends(5.0) == [ends[p] for p in range(4)]
        assert least <= read <= most
        await log.aclose()

    run(main())
