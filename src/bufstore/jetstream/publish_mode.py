"""Decides whether plain messages or an atomic batch store a group sooner, by measuring both, without I/O.

On a server that syncs every message, a batch of a few dozen wins by far; on a server that syncs now and then, plain
messages win. Where the two cross depends on disk, server and processor. So both are timed for each size of group, and
the slower mode is tried again now and then, ever more rarely as long as it keeps losing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Below the first size a batch has never won, from the second on plain messages have never won: nothing to try there.
BATCH_FROM, PLAIN_TO = 4, 65
#: The smallest batch that is believed to win before anything was measured: right for a server that syncs every message.
_BATCH_AT_FIRST = 8
#: The number of groups after which the other mode is tried, at first and at most.
_TRY_FIRST, _TRY_MAX = 16, 4096
#: The weight of the newest time in the mean.
_SHARE = 0.25


@dataclass(slots=True)
class _Size:
    """What is known of groups of about one size: the mean seconds for a message in each mode (None: not tried yet)."""

    plain_s: float | None = None
    batch_s: float | None = None
    #: The number of groups until the other mode is tried, and that number after the last try.
    left: int = _TRY_FIRST
    pause: int = _TRY_FIRST


@dataclass(slots=True)
class PublishModes:
    """Chooses the mode for one stream."""

    _sizes: dict[int, _Size] = field(default_factory=dict)

    def batched(self, messages: int) -> bool:
        """Return whether a group of this many messages is to be one batch."""
        if messages < BATCH_FROM or messages >= PLAIN_TO:
            return messages >= PLAIN_TO
        size = self._of(messages)
        better = self._better(size, messages)
        size.left -= 1
        if size.left > 0:
            return better
        size.left = size.pause = min(2 * size.pause, _TRY_MAX)
        return not better

    def took(self, messages: int, batched: bool, seconds: float) -> None:
        """Note that a group of this many messages was stored in this mode and time."""
        if not BATCH_FROM <= messages < PLAIN_TO:
            return
        size = self._of(messages)
        each = seconds / messages
        before = self._better(size, messages)
        known, other = (size.batch_s, size.plain_s) if batched else (size.plain_s, size.batch_s)
        mean = each if known is None else known + _SHARE * (each - known)
        if batched:
            size.batch_s = mean
        else:
            size.plain_s = mean
        surprise = batched is not before and other is not None and each < other
        if surprise or self._better(size, messages) is not before:
            size.left = size.pause = _TRY_FIRST

    def _of(self, messages: int) -> _Size:
        return self._sizes.setdefault(messages.bit_length(), _Size())

    def _better(self, size: _Size, messages: int) -> bool:
        if size.plain_s is None or size.batch_s is None:
            return messages >= _BATCH_AT_FIRST
        return size.batch_s < size.plain_s
