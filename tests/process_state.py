"""What a test may change in its process and must put back: it must not matter which tests run in one process.

The logs are given back as they were, for a command configures those of its process, as it should. All else that
differs afterwards fails the test.
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

#: pytest's own.
_NOT_OURS = ("PYTEST_CURRENT_TEST",)
#: What a program handles (SIGALRM is pytest-timeout's). To ask for all of them takes longer than many a test.
_CAUGHT = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE")
)


@contextmanager
def kept() -> Iterator[None]:
    """Gives the logs back as they were. Raises AssertionError when what happens within changes anything else."""
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
    """Levels and handlers of all loggers, as they are now."""

    def __init__(self) -> None:
        self._before = {logger: (logger.level, logger.handlers[:]) for logger in self._all()}

    def give_back(self) -> None:
        """Also of those that are new since: these have none."""
        for logger in self._all():
            level, handlers = self._before.get(logger, (logging.NOTSET, []))
            logger.handlers[:] = handlers
            if logger.level != level:
                logger.setLevel(level)  # which also forgets what it knows of others' levels

    @staticmethod
    def _all() -> list[logging.Logger]:
        found = logging.root.manager.loggerDict.values()
        return [logging.root, *(logger for logger in found if isinstance(logger, logging.Logger))]
