"""How an idle worker waits for work: listen, then look, then sleep; never longer than the poll interval.

Listening before looking closes the gap in which work comes after the look and before the listening. Whatever goes
wrong with the notifier, the look is repeated after `poll_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable

from bufstore.config import check_timeout
from bufstore.errors import Closed, ConfigError, StoreMisconfigured, Unavailable
from bufstore.log_lines import LogLines
from bufstore.notify.notifier import Notifier
from bufstore.notify.protocol import Unlisten
from bufstore.tasks import end, spawn, to_the_end

_log = LogLines(__name__)

#: By how much a pause may exceed what was asked for, as a fraction, at random: workers that began together do not poll
#: together.
_JITTER = 0.1


class WhileIdle:
    """Listens only while its worker has nothing to do.

    A notifier wakes as many workers as there are items, and a busy worker must not be among them.
    """

    def __init__(self, notifier: Notifier | None, kinds: Iterable[str], call: Callable[[str], None]) -> None:
        self._notifier, self._kinds, self._call = notifier, kinds, call
        self._unlisten: Unlisten | None = None
        self._changing = asyncio.Lock()

    @property
    def listening(self) -> bool:
        """True while it listens."""
        return self._unlisten is not None

    async def begin(self) -> bool:
        """Begin to listen, if it can and does not yet; return whether it began.

        Work that came before is not told. Raises Closed.
        """
        async with self._changing:
            if self._notifier is None or self._unlisten is not None:
                return False
            try:
                self._unlisten = await self._notifier.listen_scheduled(self._kinds, self._call)
            except Closed:
                raise
            except (Unavailable, ConfigError, StoreMisconfigured) as e:  # the notifier has logged a refusal
                _log.debug("waiting without notifications: %s", e, extra={"action": "notify_poll"})
            return self._unlisten is not None

    async def end(self) -> None:
        """Stop listening, until `begin` is called again."""
        async with self._changing:
            unlisten, self._unlisten = self._unlisten, None
            if unlisten is not None:
                await unlisten()


async def wait_for_work(
    notifier: Notifier,
    kinds: Iterable[str],
    due_in_s: Callable[[], Awaitable[float | None]],
    *,
    poll_s: float = 60.0,
    stopping: asyncio.Event | None = None,
) -> bool:
    """Wait until it is worth trying to get work, and return True; return False as soon as `stopping` is set.

    `kinds` are kinds of work; a str is one. `due_in_s` looks and returns in how many seconds work is due: 0: now; None:
    never, as far as it knows. Its errors are raised here. A worker that is called takes work until there is none, and
    only then waits again. Raises ConfigError unless `poll_s` is a number of seconds above 0, and Closed.
    """
    check_timeout(poll_s, "poll_s")
    called = asyncio.Event()
    scheduled: list[str] = []

    def call(kind: str) -> None:
        scheduled.append(kind)
        called.set()

    idle, worth = WhileIdle(notifier, kinds, call), False
    try:
        await idle.begin()
        due = await due_in_s()
        if due is None or due > 0:
            pause = poll_s if due is None else min(due, poll_s)
            pause *= 1 + random.uniform(0, _JITTER)  # noqa: S311 - no secret
            await _first([called] if stopping is None else [called, stopping], pause)
        worth = not (stopping and stopping.is_set())
        return worth
    finally:
        try:
            await idle.end()
        except asyncio.CancelledError:
            worth = False
            raise
        finally:
            if not worth:
                await to_the_end(_tell(notifier, scheduled))  # anyio cancels again and again


async def _tell(notifier: Notifier, kinds: Iterable[str]) -> None:
    """Tell another worker of calls that went to this one only, which stops or is cancelled."""
    with contextlib.suppress(Closed):  # then nobody can be told: others poll
        for kind in kinds:
            await notifier.notify_scheduled(kind)


async def _first(events: list[asyncio.Event], pause_s: float) -> None:
    """Wait for one of the events, for at most `pause_s`."""
    waiting = [spawn(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(*waiting)
