"""Checks that a test leaves its process as it was, because any tests may run in one process.

Loggers are restored, because a command may configure its process's logging. Any other change fails the test.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bufstore import failpoints

#: Set by pytest itself.
_NOT_OURS = ("PYTEST_CURRENT_TEST",)
#: Signals that a program handles, without SIGALRM, which pytest-timeout uses. Reading all handlers would take too long.
_CAUGHT = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE")
)


@contextmanager
def kept() -> Iterator[None]:
    """Restore the loggers at the end of the block. Raises AssertionError when the block changes anything else."""
    before, logs = _state(), _Logs()
    yield
    logs.give_back()
    after = _state()
    changed = [f"{name}: {was!r} became {after[name]!r}" for name, was in before.items() if was != after[name]]
    assert not changed, f"the test leaves its process changed: {'; '.join(changed)}"


def _state() -> dict[str, Any]:
    logs = logging.root.manager
    return {
        "environment": {name: value for name, value in os.environ.items() if name not in _NOT_OURS},
        "working directory": Path.cwd(),
        "import path": sys.path[:],
        "modules that cannot be imported": {name for name, module in list(sys.modules.items()) if module is None},
        "signal handlers": {number: signal.getsignal(number) for number in _CAUGHT},
        "garbage collector": (gc.isenabled(), gc.get_threshold()),
        "memory is traced": tracemalloc.is_tracing(),
        "failpoints": failpoints.active,
        "logs are disabled": logs.disable,
    }


class _Logs:
    """The levels and handlers of all loggers at one moment."""

    def __init__(self) -> None:
        self._before = {logger: (logger.level, logger.handlers[:]) for logger in self._all()}

    def give_back(self) -> None:
        """Restore all loggers; those that are new have no handlers and no level."""
        for logger in self._all():
            level, handlers = self._before.get(logger, (logging.NOTSET, []))
            logger.handlers[:] = handlers
            if logger.level != level:
                logger.setLevel(level)  # setLevel also clears the loggers' cache of levels

    @staticmethod
    def _all() -> list[logging.Logger]:
        found = logging.root.manager.loggerDict.values()
        return [logging.root, *(logger for logger in found if isinstance(logger, logging.Logger))]
