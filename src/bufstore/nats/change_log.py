"""`change_log` changes what the flushers and writers of a log must agree on, while they run."""

from __future__ import annotations

from bufstore.buffer.windows import Windows
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import ConfigError, NoLog
from bufstore.nats.session import Nats, session_to


async def change_log(
    *,
    nats: Nats = "nats://127.0.0.1:4222",
    stream: str = LogConfig.stream,
    failover_window_s: float | None = None,
    archive: bool | None = None,
    settle: bool = False,
) -> Windows:
    """Change a log's failover window (seconds) and whether it archives. None: as it is. Returns the result.

    A change has two steps. This call begins the change: from now on the log holds both the old and the new setting,
    flushers keep the larger window, writers that start rely on the smaller one, and processes with either setting may
    open the log. When every process has been restarted with the new setting, a call with `settle` ends the change: only
    the new setting is left. Until then, a call with the old setting takes the change back. Without a setting and
    `settle`, the call only looks.

    Raises ConfigError (NoLog; nothing to settle; a setting beside `settle`; an impossible one), LogUnavailable.
    """
    if settle and (failover_window_s is not None or archive is not None):
        raise ConfigError("settle ends a change, and takes no setting")
    if archive is not None and type(archive) is not bool:
        raise ConfigError(f"archive must be a bool, not {archive!r}")
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
