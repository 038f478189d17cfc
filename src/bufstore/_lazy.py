"""Public names that are imported when they are first asked for.

Importing a package needs only the drivers of those of its names that are used. Type checkers read the imports beside
the table instead; tests/unit/test_public_names.py keeps the two equal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

#: What to install for a driver that is missing or does not work, by the driver's module.
_INSTALL = {
    "nats": "nats-py",
    "psycopg": "'psycopg[binary,pool]'",
    "psycopg_pool": "'psycopg[pool]'",
    "redis": "'bufstore[redis]'",
    "langgraph": "'bufstore[langgraph]'",
    "langchain_core": "'bufstore[langgraph]'",
    "pyarrow": "'bufstore[spark]'",
}


def names(
    package: str, modules: Mapping[str, Iterable[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package; `modules`: its public names by their module.

    ``__getattr__`` raises ImportError, which says what to install, when the driver of the name's module is missing.
    """
    module_of = {name: module for module, found in modules.items() for name in found}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(module_of[name]), name)
        except ImportError as e:
            driver = _driver(e)
            if driver is None:
                raise
            raise ImportError(
                f"{package}.{name} needs {driver}: pip install {_INSTALL[driver]} ({e})", name=driver
            ) from e
        setattr(sys.modules[package], name, value)  # so Python does not call `find` again for this name
        return value

    return sorted(module_of), find, lambda: sorted({*vars(sys.modules[package]), *module_of})


def _driver(error: ImportError) -> str | None:
    """Return the driver that could not be imported, or None if something else could not."""
    name = (error.name or "").partition(".")[0]
    if name in _INSTALL:
        return name
    # The error of a psycopg without libpq names no module.
    return "psycopg" if "pq wrapper" in str(error) else None
