"""A page of messages from any store that can read a range of positions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from bufstore.threads.queries import (
    MessagePage,
    MessageQuery,
    MessageRecord,
    Order,
    check_limit,
    check_position,
    check_query,
    new_cursor,
    read_cursor,
    record_of,
)
from bufstore.types import check_id

#: Reads (position, encoded message) pairs. Arguments: first and last position, the most pairs, whether newest first.
Fetch = Callable[[int, int, int, bool], Awaitable[list[tuple[int, bytes]]]]

#: How many messages a query reads at a time if it looks into them.
_CHUNK = 500
LAST = 2**31 - 1


async def message_page(
    thread_id: str, query: MessageQuery, limit: int, cursor: str | None, fetch: Fetch
) -> MessagePage:
    """The page of `query` behind `cursor`; an empty one for a thread that does not exist.

    A query by positions alone uses the index; a query for a visibility or a run reads the messages in chunks until the
    page is full. Raises InvalidId, InvalidQuery, and what `fetch` raises.
    """
    check_id(thread_id, "thread_id")
    check_query(query, MessageQuery)
    limit = check_limit(limit)
    newest_first = query.order is Order.NEWEST_FIRST
    low = (query.after or 0) + 1
    high = LAST if query.before is None else query.before - 1
    if cursor is not None:
        seq = read_cursor(cursor, query, thread_id, int)
        low, high = (low, min(high, seq - 1)) if newest_first else (max(low, seq + 1), high)
    found: list[MessageRecord] = []
    while len(found) <= limit and 1 <= low <= high <= LAST:
        count = limit + 1 if query.takes_all else _CHUNK
        rows = await fetch(low, high, count, newest_first)
        found += filter(query.matches, (record_of(thread_id, seq, payload) for seq, payload in rows))
        if len(rows) < count:
            break
        low, high = (low, rows[-1][0] - 1) if newest_first else (rows[-1][0] + 1, high)
    page = found[:limit]
    more = len(found) > limit
    return MessagePage(records=page, next_cursor=new_cursor(query, thread_id, page[-1].seq) if more else None)


def of_list(messages: Sequence[bytes]) -> Fetch:
    """Return what reads from all messages of a thread, encoded."""

    async def fetch(low: int, high: int, count: int, newest_first: bool) -> list[tuple[int, bytes]]:
        found = list(enumerate(messages, 1))[low - 1 : high]
        return (found[::-1] if newest_first else found)[:count]

    return fetch


def check_range(first: int, last: int) -> tuple[int, int]:
    """Return the range of positions `first` to `last`, beginning at 1 or later. Raises InvalidQuery."""
    check_position(first, "first")
    check_position(last, "last")
    return max(first, 1), last
