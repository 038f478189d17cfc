"""The lines that this package logs. A line that an app's logging cannot take is lost, and nothing else.

`logging` passes on what a record factory or a filter raises, and what a handler raises that does not keep to its
`handleError`. It would end the task that logs, often one that is just recovering from a fault.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


class LogLines(logging.LoggerAdapter[logging.Logger]):
    """The logger of a module, used like any other. It raises nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def log(
        self,
        level: int,
        msg: object,
        *args: object,
        exc_info: object = None,
        stack_info: bool = False,
        stacklevel: int = 1,
        extra: Mapping[str, object] | None = None,
        **_: object,
    ) -> None:
        """Log a line with the fields of `extra`, also where the app's own records have a field of that name."""
        logger = self.logger
        try:
            if not logger.isEnabledFor(level):
                return
            where = logger.findCaller(stack_info, stacklevel + 1)
            if isinstance(exc_info, BaseException):
                error: Any = (type(exc_info), exc_info, exc_info.__traceback__)
            else:
                error = sys.exc_info() if exc_info else None
            record = logger.makeRecord(logger.name, level, *where[:2], msg, args, error, where[2], None, where[3])
            record.__dict__.update(extra or {})
            logger.handle(record)
        except Exception:
            # As `logging.Handler.handleError` does.
            with suppress(Exception):
                if logging.raiseExceptions and sys.stderr is not None:
                    traceback.print_exc(file=sys.stderr)
