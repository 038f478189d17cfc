"""A broker whose subscription heals itself: whenever its connection ends, it makes a new one, as long as it is wanted.

Subscribers are not told that the connection is gone. They are told, once, that it is back: they may have missed
something.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from bufstore.jetstream.short_lives import ShortLives
from bufstore.log_lines import LogLines
from bufstore.notify.broker import Broker, Teardown
from bufstore.notify.listener import SharedListener
from bufstore.notify.protocol import Event
from bufstore.tasks import Lasting

_log = LogLines(__name__)

Heard = tuple[Event, str]


class Source(Protocol):
    """One connection that is subscribed to all three events."""

    async def next(self) -> Heard | None:
        """Return the next payload; None when something may have been missed. Raises when the connection is unusable."""

    async def aclose(self) -> None:
        """Release the connection."""


class HealingBroker(Broker):
    """Has one `Source` at a time, shared by the events, as long as one of them is subscribed to."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._shared: SharedListener[Heard, Callable[[str], None]] = SharedListener(name, self._open, self._deliver)

    async def _attach(self) -> Source:
        """Return a new source. Raises NotifyUnavailable, ConfigError, StoreMisconfigured."""
        raise NotImplementedError

    async def subscribe(self, event: Event, deliver: Callable[[str], None]) -> Teardown:
        return await self._shared.subscribe([event.value], deliver)

    async def aclose(self) -> None:
        await self._shared.aclose()

    def _deliver(self, heard: Heard) -> None:
        event, payload = heard
        for deliver in self._shared.pick(event.value, self._shared.count(event.value)):
            deliver(payload)

    async def _open(self, deliver: Callable[[Heard], None]) -> Teardown:
        return Lasting(partial(self._run, [await self._attach()], deliver), name=f"bufstore-{self._name}").aclose

    async def _run(self, made: list[Source], deliver: Callable[[Heard], None]) -> None:
        """`made`: the first source, until a task has it."""
        loop, lives, news = asyncio.get_running_loop(), ShortLives(), True
        while True:
            if made:
                source = made.pop()
            else:
                source = await AsyncRetrying(
                    wait=wait_random_exponential(multiplier=0.05, max=2), retry=retry_if_exception_type(Exception)
                )(self._attach)
                text, back = "%s: reconnected", {"action": "notify_back"}
                _log.log(logging.INFO if news else logging.DEBUG, text, self._name, extra=back)
                self.tell_restored()
            lives.made(loop.time())
            try:
                while True:
                    heard = await source.next()
                    if heard is not None:
                        deliver(heard)
                    else:
                        self.tell_restored()
            except Exception as e:
                # A server that accepts and hangs up at once would have everybody look again, as fast as it can.
                pause_s, news = lives.ended(loop.time(), type(e).__name__)
                _log.log(
                    logging.WARNING if news else logging.DEBUG,
                    "%s: lost the connection; reconnecting: %s",
                    self._name,
                    type(e).__name__,
                    extra={"action": "notify_lost"},
                )
            finally:
                with contextlib.suppress(Exception):
                    await source.aclose()
            await asyncio.sleep(pause_s)
