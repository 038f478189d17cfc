"""Finds out what became of a unit whose answer was lost: asks the log what follows the unit's predecessor.

If the unit follows it, the unit is stored: it is whole in one group, so its first entry is enough. If another's entry
does, the unit can never be stored any more. If nothing does, the same unit is sent again, and whichever copy arrives
first wins: the other fails the compare-and-set.
"""

from __future__ import annotations

from collections.abc import Callable

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from bufstore.buffer.append.lane import Unit
from bufstore.buffer.domain import M
from bufstore.buffer.ports.log import Log, Writer
from bufstore.errors import BufstoreError
from bufstore.jetstream.messages import AppendUnknown, Conflict
from bufstore.log_lines import LogLines

_log = LogLines(__name__)

#: The pause between two tries while the log is away; a write may have to wait for as long once it is back.
PAUSE = wait_random_exponential(multiplier=0.02, max=0.2)


class _StillUnknown(Exception):
    """Look again."""


async def resolve(unit: Unit[M], log: Log, group: Writer, known: Callable[[], bool]) -> int | Conflict | None:
    """The last sequence of a unit whose answer was lost; Conflict if the unit is certainly not stored.

    None: every caller has given up. `known`: whether the log still knows what was written since the unit was drafted.
    If not, it proves nothing that nothing stands behind the predecessor, and the unit is not sent again.
    """
    first = unit.messages[0]
    async for attempt in AsyncRetrying(wait=PAUSE, retry=retry_if_exception_type(_StillUnknown)):
        with attempt:
            if all(w.done.done() for w in unit.writes):
                return None
            try:
                behind = await log.after(first.subject, unit.before.seq, limit=1)
                if behind and behind[0].header == first.header:  # the header has the id and the checksum
                    return behind[0].seq + len(unit.messages) - 1
                if behind:
                    return Conflict("another entry took the position of ours")
                if not known():
                    raise _StillUnknown
                return await group.submit(unit.messages)
            except Conflict:
                raise _StillUnknown from None  # maybe a conflict with our own first copy: look again
            except (AppendUnknown, BufstoreError) as e:
                _log.info("the outcome of an append stays unknown: %s", e, extra={"action": "append_unknown"})
                raise _StillUnknown from None
    return None
