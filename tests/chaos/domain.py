"""The parts of a chaos run that depend on what is stored; servers, faults, processes and schedule are common."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from bufstore import BufferConfig
from chaos.checkers import Checker
from chaos.history import Final, History, ParkedEntry, Recorder

#: Modules that define a `DOMAIN`.
NAMES = ("threads", "lanes", "checkpoints", "checkpoint_lanes")


@dataclass(frozen=True)
class Domain:
    """The functions of one domain. The buffer's tables are in the schema that the site names."""

    #: The module that a worker process runs.
    worker: str
    #: Opens the supervisor's store from the addresses of Postgres and NATS and a configuration.
    open: Callable[[str, str, BufferConfig], Awaitable[Any]]
    #: Reads a part of the final state, and records the reads.
    read_back: Callable[[Any, History, random.Random, Recorder], Awaitable[None]]
    #: Returns the final state of Postgres, given its address and the quarantined entries.
    final: Callable[[str, dict[int, ParkedEntry]], Awaitable[Final]]
    checkers: tuple[Checker, ...]
    #: LogConfig.lanes.
    lanes: int = 1


def domain(name: str) -> Domain:
    """Return the domain of this name."""
    if name not in NAMES:
        raise SystemExit(f"no such domain: {name}; there are {', '.join(NAMES)}")
    found: Domain = import_module(f"chaos.{name}").DOMAIN
    return found
