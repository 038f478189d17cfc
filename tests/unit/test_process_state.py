"""A test that leaves its process changed fails, and logs are restored."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from bufstore import failpoints
from process_state import kept

#: What is left changed: the function that changes it, and the one that puts it back.
_CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "environment": (lambda: os.environ.update(LEFT="1"), lambda: os.environ.pop("LEFT")),
    "working directory": (lambda: os.chdir("/"), lambda: None),
    "import path": (lambda: sys.path.append("/left"), lambda: sys.path.remove("/left")),
    "modules that cannot be imported": (
        lambda: sys.modules.update(left=None),  # type: ignore[arg-type]
        lambda: sys.modules.pop("left"),
    ),
    "signal handlers": (
        lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        lambda: signal.signal(signal.SIGUSR2, signal.SIG_DFL),
    ),
    "garbage collector": (gc.disable, gc.enable),
    "memory is traced": (tracemalloc.start, tracemalloc.stop),
    "failpoints": (lambda: setattr(failpoints, "active", print), lambda: setattr(failpoints, "active", None)),
    "logs are disabled": (lambda: logging.disable(logging.INFO), lambda: logging.disable(logging.NOTSET)),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_what_is_left_changed_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(".")  # this is put back in the end
    change, put_back = _CHANGES[what]
    try:
        with pytest.raises(AssertionError, match=f"process changed: {what}: "), kept():
            change()
    finally:
        put_back()


def test_logs_are_given_back() -> None:
    root, known = logging.getLogger(), logging.getLogger("bufstore")
    before, handler = (root.level, root.handlers[:], known.level), logging.NullHandler()
    with kept():
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        known.setLevel(logging.CRITICAL)
        logging.getLogger("bufstore.new here").setLevel(logging.ERROR)
    assert (root.level, root.handlers, known.level) == before
    assert logging.getLogger("bufstore.new here").level == logging.NOTSET
