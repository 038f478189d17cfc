"""`change_log`: what flushers and writers of a log must agree on, changed while they run."""

from __future__ import annotations

from bufstore.buffer.windows import Windows
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import NoLog
from bufstore.nats.session import Nats, session_to


async def change_log(
    *,
    nats: Nats = "nats://127.0.0.1:4222",
    stream: str = LogConfig.stream,
    failover_window_s: float | None = None,
    archive: bool | None = None,
    settle: bool = False,
) -> Windows:
    """Change what a log says of its failover window (seconds) and of archiving. None: as it is. Returns the result.

    A change has two steps. This call begins it: from now on the log says both what was and what will be, flushers keep
    the larger window, writers that start rely on the smaller, and both configurations may open it. Once every process
    has been restarted with the new one, a call with `settle` ends it: only the new one is left. The same call with what
    was takes a change back, at any time before. Without a change and `settle` it only looks.

    Raises ConfigError (NoLog; nothing to settle; an impossible window), LogUnavailable.
    """
    session = session_to(nats, BufferConfig(log=LogConfig(stream=stream)), "bufstore-change")
    await session.open()
    try:
        if await session.log.epoch(checked=False) is None:
            raise NoLog(stream)
        before = session.log.windows
        if settle:
            after = before.settled()
        elif failover_window_s is None and archive is None:
            return before
        else:
            after = before.changed(failover_window_s, archive)
        if after != before:
            await session.log.set_windows(after)
        return after
    finally:
        await session.aclose()
