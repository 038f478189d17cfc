"""The windows that all flushers and writers of a log must agree on, and how they change at run time: the decision.

A writer that does not find a thread in the log relies on this: purged entries were committed a whole window ago. So
no flusher may keep entries for less time than any writer relies on. At rest the log names one window. During a change
it names two: flushers keep entries for the larger one, and writers rely on the smaller one, until every process has
read the log again; only then does the new window stand alone. Whether the window is raised or lowered, or the change
is undone in between, no writer ever relies on more than the present window, and no flusher keeps entries for less.

`archive` changes in the same two steps: nothing leaves the log unarchived while either value requires an archive.

A log of an earlier release may name a longer window than any process may have today. Flushers keep to that window, and
writers rely on the longest window allowed today, which is shorter.
"""

from __future__ import annotations

from typing import Self

import msgspec

from bufstore.config import FAILOVER_WINDOW_MAX_S, LogConfig, check_failover_window
from bufstore.errors import ConfigDrift, ConfigError


class Windows(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a log names: those of now and, during a change, the next ones."""

    failover_window_s: float
    archive: bool
    next_failover_window_s: float | None = None
    next_archive: bool | None = None

    @classmethod
    def of(cls, config: LogConfig) -> Self:
        """Return the values that a new log names."""
        return cls(failover_window_s=config.failover_window_s, archive=config.archive)

    @property
    def changing(self) -> bool:
        """Whether a change is under way."""
        return self.next_failover_window_s is not None

    @property
    def keep_s(self) -> float:
        """The shortest time, in seconds, for which flushers keep entries after their flush."""
        return max(self.failover_window_s, self.next_failover_window_s or 0.0)

    @property
    def rely_s(self) -> float:
        """The longest time, in seconds, that writers and readers may rely on."""
        next_s = self.next_failover_window_s or self.failover_window_s
        return min(self.failover_window_s, next_s, FAILOVER_WINDOW_MAX_S)

    @property
    def archives(self) -> bool:
        """Whether entries must be archived before they may leave the log."""
        return self.archive or bool(self.next_archive)

    def changed(self, failover_window_s: float | None = None, archive: bool | None = None) -> Windows:
        """Begin a change. None: the value stays as it is, or as a change that is under way has it.

        A change to the present values undoes a change that is under way. Raises ConfigError for an impossible window.
        """
        if failover_window_s is None:
            failover_window_s = self.next_failover_window_s or self.failover_window_s
        if failover_window_s not in (self.failover_window_s, self.next_failover_window_s):
            check_failover_window(failover_window_s, "failover_window_s")
        known = self.archive if self.next_archive is None else self.next_archive
        archive = known if archive is None else archive
        rest = Windows(failover_window_s=self.failover_window_s, archive=self.archive)
        if (failover_window_s, archive) == (self.failover_window_s, self.archive):
            return rest
        return msgspec.structs.replace(rest, next_failover_window_s=failover_window_s, next_archive=archive)

    def settled(self) -> Windows:
        """End the change, once every process has read what `changed` returned. Raises ConfigError if there is none."""
        if self.next_failover_window_s is None or self.next_archive is None:
            raise ConfigError("no change of this log's windows is under way")
        return Windows(failover_window_s=self.next_failover_window_s, archive=self.next_archive)

    def check(self, config: LogConfig) -> None:
        """Raise ConfigDrift when `config` has neither the value that the log names now nor the next one."""
        next_s = self.next_failover_window_s or self.failover_window_s
        for field, values in (
            ("failover_window_s", [min(s, FAILOVER_WINDOW_MAX_S) for s in (self.failover_window_s, next_s)]),
            ("archive", [self.archive, self.next_archive]),
        ):
            ours = getattr(config, field)
            if ours not in values:
                raise ConfigDrift(
                    f"stream {config.stream}",
                    field,
                    expected=ours,
                    found=values[0],
                    way_out=f"Set LogConfig.{field} to {values[0]!r}, or change what the log says: `bufstore log set` "
                    "(see docs/OPERATIONS.md, Changing a log's windows).",
                )
