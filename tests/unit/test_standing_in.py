"""The flusher that `bufstore flush` and `bufstore erase` are when no other is alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bufstore import ConfigError, FlushTimeout
from bufstore.cli.operate import flush
from bufstore.cli.running import Failure
from unit.fake_log import run


class Nobody:
    """An inspection that finds no flusher."""

    async def members(self) -> list[str]:
        return []


class Stores:
    """Endpoints whose store opens by `opening`."""

    def __init__(self, opening: Any) -> None:
        self._opening = opening

    @asynccontextmanager
    async def opened(self, **_: Any) -> AsyncIterator[None]:
        await self._opening()
        yield


@pytest.fixture(autouse=True)
def no_flusher(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def inspecting(_: Any) -> AsyncIterator[Nobody]:
        yield Nobody()

    monkeypatch.setattr(flush, "inspecting", inspecting)


def test_a_flush_does_not_wait_for_a_stand_in_that_still_opens() -> None:
    """Regression: with Postgres away, `flush --timeout 8` took over 20 s."""

    async def main() -> None:
        opening = asyncio.Event()

        async def never() -> None:
            opening.set()
            await asyncio.Event().wait()

        stores: Any = Stores(never)
        async with asyncio.timeout(1), flush.standing_in(stores):
            await opening.wait()

    run(main())


def test_a_late_flush_says_why_nothing_could_be_flushed_here() -> None:
    """Regression: it said that no flusher was alive, and not that this command may not be one."""

    async def main() -> None:
        async def refused() -> None:
            raise ConfigError("the stream is another store's")

        stores: Any = Stores(refused)
        with pytest.raises(Failure, match=r"no flusher is alive\); this command .*: the stream is another store's"):
            async with flush.standing_in(stores) as stand_in:
                await stand_in.wait()
                await asyncio.sleep(1)
                raise FlushTimeout("t", target=2, flushed=0, reason="no flusher is alive")

    run(main())
