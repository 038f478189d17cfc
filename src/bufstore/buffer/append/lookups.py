"""Looking up the last entry of many threads in one request."""

from __future__ import annotations

import asyncio

from bufstore.buffer.ports.log import Log
from bufstore.jetstream.messages import StoredMessage


class Lookups:
    """Joins the lookups of one turn of the event loop into one request."""

    def __init__(self, log: Log, timeout_s: float) -> None:
        self._log = log
        self._timeout_s = timeout_s
        self._waiting: dict[str, asyncio.Future[StoredMessage | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def last(self, subject: str) -> StoredMessage | None:
        """The subject's last message, if it has one. Raises LogUnavailable."""
        future = self._waiting.get(subject)
        if future is None:
            if not self._waiting:
                task = asyncio.create_task(self._ask())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            future = self._waiting[subject] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(future)

    async def _ask(self) -> None:
        waiting, self._waiting = self._waiting, {}
        try:
            found = await self._log.last(list(waiting), self._timeout_s)
        except Exception as e:
            for future in waiting.values():
                future.set_exception(e)
                future.exception()
        else:
            for subject, future in waiting.items():
                future.set_result(found.get(subject))
