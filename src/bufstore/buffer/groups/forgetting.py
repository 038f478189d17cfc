"""When a process forgets which entries threads have in the log: once nothing needs them any more.

A flusher forgets when it has learnt how far all owners are. A process without one asks for that now and then, while it
remembers much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.places import first_place
from bufstore.errors import BufstoreError
from bufstore.log_lines import LogLines
from bufstore.tasks import spawn

_log = LogLines(__name__)

#: How often a process without a flusher asks what it may forget, while it remembers much.
_FORGET_EVERY_S = 5.0


class Forgetting:
    """Forgets what `heads` has below a floor, and tells the callbacks before."""

    def __init__(
        self,
        heads: Heads,
        oldest: Callable[[], int | None],
        settled: Callable[[], Awaitable[int]],
        refused: Callable[[], bool],
    ) -> None:
        """`oldest`: the last group that was seen when the oldest unit came that waits; None: no unit waits. `settled`:
        the place below which everything is settled.

        `refused`: whether the log is refused, so that nothing it says counts.
        """
        self._heads, self._oldest, self._settled, self._refused = heads, oldest, settled, refused
        self._callbacks: list[Callable[[bool], None]] = []
        self._task: asyncio.Task[None] | None = None
        #: Whether `forget` was called since `_look` last asked.
        self._asked = False
        self._closed = False

    def on_forget(self, callback: Callable[[bool], None]) -> None:
        """Call back before something is forgotten (True: before everything is)."""
        self._callbacks.append(callback)

    def forget(self, floor: int) -> None:
        """Forget what stands below this place."""
        self._asked = True
        # A unit that waits was drafted on what was known when it came.
        oldest = self._oldest()
        floor = floor if oldest is None else min(floor, first_place(oldest))
        if self._heads.forgets(floor):
            self._tell(everything=False)
        self._heads.forget(floor)

    def all_begins_anew(self) -> None:
        """Tell the callbacks that nothing of what was known may be true any more."""
        self._tell(everything=True)

    def _tell(self, *, everything: bool) -> None:
        for callback in self._callbacks:
            callback(everything)

    def look_soon(self) -> None:
        """Ask now and then what may be forgotten, while much is remembered."""
        if self._task is None and self._heads.much and not self._closed:
            self._task = spawn(self._look(), name="bufstore-forgetting")

    async def _look(self) -> None:
        try:
            while self._heads.much:
                self._asked = False
                await asyncio.sleep(_FORGET_EVERY_S)
                if not self._asked and not self._refused():
                    await self._forget_settled()
        finally:
            self._task = None  # also when Ctrl-C ends this task, and not the program

    async def _forget_settled(self) -> None:
        try:
            self.forget(await self._settled())
        except BufstoreError as e:
            text = "cannot find out what this process may forget about the log: %s"
            _log.info(text, e, extra={"action": "floors_unavailable"})
        except Exception:
            _log.exception("could not forget what is no longer needed", extra={"action": "forget_failed"})

    async def aclose(self) -> None:
        """Ask no more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
