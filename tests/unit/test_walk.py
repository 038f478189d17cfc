"""Walking through all messages of a filter, in pages of bounded size; and a memory with a bound."""

from __future__ import annotations

from typing import Any

from bufstore.jetstream.messages import StoredMessage
from bufstore.jetstream.walk import Walk
from bufstore.newest import Newest


class Messages:
    """A stream of messages of one size."""

    def __init__(self, count: int, size: int) -> None:
        self.messages = [StoredMessage("s", seq, None, b"x" * size) for seq in range(1, count + 1)]
        self.asked: list[int] = []

    async def read(self, subject: str, seq: int, timeout_s: float, limit: int) -> list[StoredMessage]:
        self.asked.append(limit)
        return [m for m in self.messages if m.seq > seq][:limit]


def _walk(stream: Messages, least: int = 1) -> Walk:
    fake: Any = stream
    return Walk(fake, "s", 1.0, most=100, bytes_most=1000, least=least)


async def test_a_round_passes_each_message_once_in_growing_pages() -> None:
    stream = Messages(200, 1)
    walk, seen = _walk(stream), list[int]()
    while True:
        seen += [m.seq for m in await walk.next(1000)]
        if not walk.position:
            break
    assert seen == list(range(1, 201))
    assert stream.asked == [16, 32, 64, 100]
    assert [m.seq for m in await walk.next(3)] == [1, 2, 3], "the next round, and no more than is wanted"


async def test_a_page_of_large_messages_has_few_of_them_and_yet_some() -> None:
    for least, asked in ((1, 3), (5, 5)):
        stream = Messages(100, 300)
        walk = _walk(stream, least)
        for _ in range(3):
            await walk.next(1000)
        assert stream.asked == [16, asked, asked]


async def test_an_empty_stream_is_a_round() -> None:
    walk = _walk(Messages(0, 1))
    assert await walk.next(10) == []
    assert walk.position == 0


def test_a_memory_with_a_bound_forgets_what_was_set_longest_ago() -> None:
    memory: Newest[str, int] = Newest(2)
    memory["a"], memory["b"] = 1, 2
    memory["a"] = 3
    memory["c"] = 4
    assert dict(memory) == {"a": 3, "c": 4}
    assert memory.pop("a", None) == 3
    assert "b" not in memory
