"""Pages and single messages: queries over many rows, each through an index."""

from __future__ import annotations

from bufstore.postgres.connection.statements import Statements
from bufstore.threads.message_pages import check_range, message_page
from bufstore.threads.model import decode_run
from bufstore.threads.postgres import columns
from bufstore.threads.postgres.rows import thread_of
from bufstore.threads.queries import (
    ALL_MESSAGES,
    ALL_RUNS,
    ALL_THREADS,
    LIMIT,
    MessagePage,
    MessageQuery,
    MessageRecord,
    RunPage,
    RunQuery,
    ThreadPage,
    ThreadQuery,
    check_limit,
    check_message_id,
    check_query,
    page_of,
    prefix_end,
    read_position,
    record_of,
)
from bufstore.types import check_id


class ListedStore:
    """The pages of `PostgresThreadStore`; `Queryable` says what each method does."""

    _sql: Statements

    async def query_messages(
        self, thread_id: str, query: MessageQuery = ALL_MESSAGES, *, limit: int = LIMIT, cursor: str | None = None
    ) -> MessagePage:
        async def fetch(low: int, high: int, count: int, newest_first: bool) -> list[tuple[int, bytes]]:
            name = "messages_newest_first" if newest_first else "messages_oldest_first"
            return [(seq, payload) for seq, payload in await self._sql.read(name, thread_id, low, high, count)]

        return await message_page(thread_id, query, limit, cursor, fetch)

    async def load_message(self, thread_id: str, message_id: str) -> MessageRecord | None:
        check_message_id(message_id)
        rows = await self._sql.read("messages_by_id", check_id(thread_id, "thread_id"), columns.hash_of_id(message_id))
        records = (record_of(thread_id, seq, payload) for seq, payload in rows)
        return next((record for record in records if record.message_id == message_id), None)

    async def load_message_range(self, thread_id: str, first: int, last: int) -> list[MessageRecord]:
        check_id(thread_id, "thread_id")
        first, last = check_range(first, last)
        if last < first:
            return []
        rows = await self._sql.read("messages_oldest_first", thread_id, first, last, last - first + 1)
        return [record_of(thread_id, seq, payload) for seq, payload in rows]

    async def query_runs(self, query: RunQuery = ALL_RUNS, *, limit: int = LIMIT, cursor: str | None = None) -> RunPage:
        check_query(query, RunQuery)
        limit, position = check_limit(limit), read_position(cursor, query)
        status = query.status.value if query.status is not None else None
        rows = await self._sql.read(
            "query_runs", query.thread_id, status, *_prefix(query), *(position or (None, None)), limit + 1
        )
        found = [((when, run_id), decode_run(record)) for when, run_id, record in rows]
        runs, next_cursor = page_of(query, limit, found)
        return RunPage(runs=runs, next_cursor=next_cursor)

    async def query_threads(
        self, query: ThreadQuery = ALL_THREADS, *, limit: int = LIMIT, cursor: str | None = None
    ) -> ThreadPage:
        check_query(query, ThreadQuery)
        limit, position = check_limit(limit), read_position(cursor, query)
        rows = await self._sql.read(
            "query_threads",
            query.resource_id,
            query.parent_thread_id,
            query.roots,
            *_prefix(query),
            *(position or (None, None)),
            limit + 1,
        )
        found = [((when, thread_id), thread_of(thread_id, row)) for when, thread_id, *row in rows]
        threads, next_cursor = page_of(query, limit, found)
        return ThreadPage(threads=threads, next_cursor=next_cursor)


def _prefix(query: RunQuery | ThreadQuery) -> tuple[str | None, str | None]:
    """The range of ids that have the prefix."""
    return (query.id_prefix, prefix_end(query.id_prefix)) if query.id_prefix is not None else (None, None)
