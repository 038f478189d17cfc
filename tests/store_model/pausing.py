"""A loop in whose virtual time a process can be stopped and go on later, like SIGSTOP and SIGCONT."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

from unit.fake_log import JumpingLoop


class PausingLoop(JumpingLoop):
    """A loop that holds back the callbacks of a stopped process until the process goes on; its timers are late then."""

    def __init__(self, where: contextvars.ContextVar[int]) -> None:
        super().__init__()
        self._where = where
        self._stopped: dict[int, list[tuple[list[asyncio.Handle], Callable[[], object], contextvars.Context]]] = {}

    def stop_process(self, number: int, seconds: float) -> None:
        """Let nothing run in this process for so long."""
        if number not in self._stopped:
            self._stopped[number] = []
            contextvars.Context().run(self.call_later, seconds, self._go_on, number)

    def _go_on(self, number: int) -> None:
        for handles, callback, context in self._stopped.pop(number):
            self._defer(handles, callback, context)

    def _defer(self, handles: list[asyncio.Handle], callback: Callable[[], object], context: Any) -> None:
        super().call_soon(self._run, handles, callback, context, context=context)

    def _run(self, handles: list[asyncio.Handle], callback: Callable[[], object], context: Any) -> None:
        number = context.get(self._where, -1)
        if number in self._stopped:
            self._stopped[number].append((handles, callback, context))
        elif not handles or not handles[0].cancelled():
            callback()

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        handles: list[asyncio.Handle] = []
        handles.append(super().call_soon(self._run, handles, lambda: callback(*args), context, context=context))
        return handles[0]

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        handles: list[asyncio.Handle] = []
        timer = super().call_at(when, self._run, handles, lambda: callback(*args), context, context=context)
        handles.append(timer)
        return timer
