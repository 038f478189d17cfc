"""Lists of a buffered store: wait until what they cover is flushed, then let the database find the page.

A list cannot be overlaid with the tails of all threads and stay a page. So everything that the log holds at the time
of the call is flushed first; then the wrapped store answers, from its indices. A thread whose chain is broken shows
its flushed state, and the page names the thread (`Page.quarantined`). The ledger says which threads are broken before
the page is read, so a thread that heals in between is at worst marked without need. A read without a page raises
ThreadQuarantined. If an app's own store has no such queries, the messages of a thread are read whole, and all other
lists are refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.errors import (
    ConfigError,
    FlushTimeout,
    LogUnavailable,
    ReadNotFresh,
    StoreUnavailable,
    ThreadQuarantined,
)
from bufstore.tasks import while_awake
from bufstore.threads.lanes import ThreadLanes
from bufstore.threads.message_pages import LAST, check_range, message_page, of_list
from bufstore.threads.protocol import Queryable, WrappableStore
from bufstore.threads.queries import (
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
    read_cursor,
    read_position,
    record_of,
)
from bufstore.threads.store_answers import answered
from bufstore.types import Consistency, check_id

T = TypeVar("T")


class BufferedLists:
    """The list reads of `BufferedThreadStore`, at a consistency level."""

    def __init__(self, store: WrappableStore, lanes: ThreadLanes) -> None:
        self._store = store if isinstance(store, Queryable) else None
        self._lanes, self._config = lanes, lanes.config

    async def messages(
        self, thread_id: str, query: MessageQuery, limit: int, cursor: str | None, level: Consistency
    ) -> MessagePage:
        """See `Queryable.query_messages`. Raises ReadNotFresh, and what the wrapped store raises."""
        check_id(thread_id, "thread_id")
        check_query(query, MessageQuery)
        check_limit(limit)
        if cursor is not None:
            read_cursor(cursor, query, thread_id, int)
        if (store := self._store) is not None:

            async def page_of() -> MessagePage:
                marked = _marked(thread_id, await self._row(thread_id))
                page = await self._stored(store.query_messages(thread_id, query, limit=limit, cursor=cursor))
                return msgspec.structs.replace(page, quarantined=marked)

            return await self._behind(level, thread_id, page_of)
        state = await self._lanes.of(thread_id).reads.thread(thread_id, level, quarantined="known")
        page = await message_page(thread_id, query, limit, cursor, of_list(state.messages))
        return msgspec.structs.replace(page, quarantined=_marked(thread_id, state.watermark))

    async def message(self, thread_id: str, message_id: str, level: Consistency) -> MessageRecord | None:
        """See `Queryable.load_message`. Errors as in `messages`, and ThreadQuarantined."""
        check_message_id(message_id)
        if (store := self._store) is not None:
            return await self._whole(level, thread_id, lambda: store.load_message(thread_id, message_id))
        records = await self.message_range(thread_id, 1, LAST, level)
        return next((r for r in records if r.message_id == message_id), None)

    async def message_range(self, thread_id: str, first: int, last: int, level: Consistency) -> list[MessageRecord]:
        """See `Queryable.load_message_range`. Errors as in `message`."""
        first, last = check_range(first, last)
        if (store := self._store) is not None:
            return await self._whole(level, thread_id, lambda: store.load_message_range(thread_id, first, last))
        check_id(thread_id, "thread_id")
        state = await self._lanes.of(thread_id).reads.thread(thread_id, level)
        return [record_of(thread_id, seq, m) for seq, m in enumerate(state.messages[first - 1 : last], first)]

    async def runs(self, query: RunQuery, limit: int, cursor: str | None, level: Consistency) -> RunPage:
        """See `Queryable.query_runs`. Raises ConfigError if the wrapped store has no queries."""
        store = self._queryable
        check_query(query, RunQuery)
        check_limit(limit)
        read_position(cursor, query)

        async def page_of() -> RunPage:
            if query.thread_id is not None:
                marked = _marked(query.thread_id, await self._row(query.thread_id))
                page = await self._stored(store.query_runs(query, limit=limit, cursor=cursor))
                return msgspec.structs.replace(page, quarantined=marked)
            broken = await self._asked(self._lanes.broken())
            page = await self._stored(store.query_runs(query, limit=limit, cursor=cursor))
            return msgspec.structs.replace(page, quarantined=broken.intersection(r.thread_id for r in page.runs))

        return await self._behind(level, query.thread_id, page_of)

    async def threads(self, query: ThreadQuery, limit: int, cursor: str | None, level: Consistency) -> ThreadPage:
        """See `Queryable.query_threads`. Raises ConfigError if the wrapped store has no queries."""
        store = self._queryable
        check_query(query, ThreadQuery)
        check_limit(limit)
        read_position(cursor, query)

        async def page_of() -> ThreadPage:
            broken = await self._asked(self._lanes.broken())
            page = await self._stored(store.query_threads(query, limit=limit, cursor=cursor))
            return msgspec.structs.replace(page, quarantined=broken.intersection(t.thread_id for t in page.threads))

        return await self._behind(level, None, page_of)

    async def settled(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what `ask` finds in Postgres once everything that the log holds now is flushed. Raises ReadNotFresh.

        If Postgres may have gone back meanwhile, it asks again.
        """
        return await self._behind(Consistency.READ_YOUR_WRITES, None, ask)

    async def _whole(self, level: Consistency, thread_id: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Do as `_behind`; raise ThreadQuarantined if the thread's chain is broken."""
        check_id(thread_id, "thread_id")

        async def checked() -> T:
            since = (await self._row(thread_id)).broken_since if level is not Consistency.EVENTUAL else None
            if since is not None:
                raise ThreadQuarantined(thread_id, since)
            return await self._stored(ask())

        return await self._behind(level, thread_id, checked)

    async def _stored(self, answer: Awaitable[T]) -> T:
        return await answered(self._store, answer, self._config.read_timeout_s)

    async def _row(self, thread_id: str) -> Watermark:
        return await self._asked(self._lanes.of(thread_id).ledger.watermark(thread_id))

    async def _asked(self, answer: Coroutine[Any, Any, T]) -> T:
        """Return the ledger's answer. Raises StoreUnavailable when it does not come in the time of a read."""
        try:
            return await self._lanes.first.reads.store.in_time(answer, self._config.read_timeout_s)
        except StoreUnavailable as e:
            raise StoreUnavailable(f"only Postgres knows what is in quarantine: {e}") from None

    async def _behind(self, level: Consistency, thread_id: str | None, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what `ask` finds once everything that the log holds now (of the thread) is flushed."""
        if level is Consistency.EVENTUAL:
            return await ask()

        async def flushed() -> T:
            try:
                await self._lanes.force_flush(thread_id, timeout_s=self._config.read_timeout_s)
            except (FlushTimeout, LogUnavailable) as e:
                raise ReadNotFresh(f"the list could not be read as {level.value}: {e}") from e
            return await ask()

        return await while_awake(lambda: self._lanes.same_postgres.within(flushed), self._config.read_timeout_s)

    @property
    def _queryable(self) -> Queryable:
        if self._store is None:
            raise ConfigError("the wrapped store has no queries: make it `bufstore.Queryable` (docs/OWN_STORE.md)")
        return self._store


def _marked(thread_id: str, watermark: Watermark) -> frozenset[str]:
    return frozenset([thread_id]) if watermark.broken_since is not None else frozenset()
