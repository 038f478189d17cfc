"""A message that is on its way without a task: it is sent where that is asked for, and a call tells how it ended.

A task would begin a turn of the event loop later, and go on a turn after the answer has come. Where one writer waits
for each answer, these are two turns of five (docs/adr/0060).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bufstore.jetstream.failures import meaning
from bufstore.jetstream.pace import Pace
from bufstore.jetstream.questions import Questions
from bufstore.tasks import TURNS


class Posted:
    """A message whose answer has not come; for `Pace`, also the limit of the wait for it."""

    def __init__(
        self,
        questions: Questions,
        pace: Pace,
        subject: str,
        timeout_s: float,
        told: Callable[[Posted, bytes | Exception], None],
    ) -> None:
        """`told`: called, later, with this and the answer, or the error that says why there is none."""
        self._questions, self._pace, self._told = questions, pace, told
        self._loop = asyncio.get_running_loop()
        self._expired = False
        self.at = self._loop.time()
        self._until = self.at + timeout_s
        self._timer: asyncio.Handle = self._loop.call_at(self._until, self._over)
        self.token = questions.ask([subject], self._end)
        try:
            pace.begin(self.token, self, timeout_s)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Tell nobody, whatever comes."""
        self._timer.cancel()
        self._questions.forget(self.token)
        self._pace.end(self.token)

    def when(self) -> float:
        return self._until

    def expired(self) -> bool:
        return self._expired

    def reschedule(self, when: float | None) -> None:
        assert when is not None, "a message on its way has a limit"
        self._timer.cancel()
        self._until, self._timer = when, self._loop.call_at(when, self._over)

    def _end(self, outcome: bytes | Exception) -> bool:
        self._told(self, outcome)
        self.cancel()  # not before: if that failed, it is told once more when the time is over
        return False

    def _over(self, turns: int = TURNS) -> None:
        # What has arrived is read first, as `tasks.what_came` does for who awaits it.
        self._expired = True
        if turns:
            self._timer = self._loop.call_soon(self._over, turns - 1)
        else:
            self._questions.end(self.token, meaning(TimeoutError(), sent=True, why=""))
