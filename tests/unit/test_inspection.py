"""What an inspection says when a server goes away meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from bufstore import BufferConfig, LogUnavailable, MemoryThreadStore
from bufstore.cli import inspection
from bufstore.cli.inspection import Inspection
from bufstore.memory import MemoryNats
from bufstore.threads.behind import buffer_of
from unit.fake_log import run
from unit.test_buffered_in_memory import instance


def test_a_log_that_goes_away_during_a_look_is_no_trouble_of_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: Any, **__: Any) -> None:
        raise LogUnavailable("the link is cut")

    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner):
            pass
        buffer = buffer_of(inner, nats, BufferConfig(flusher=False), name="look")
        async with buffer.connected():
            monkeypatch.setattr(inspection, "apart", away)
            with pytest.raises(LogUnavailable, match="the link is cut"):
                await Inspection(buffer).status()

    run(main())
