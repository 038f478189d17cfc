"""What a domain brings to a chaos run: the rest (servers, faults, processes, schedule) is the same for all."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from bufstore import BufferConfig
from chaos.checkers import Checker
from chaos.history import Final, History, ParkedEntry, Recorder

#: Modules that have a `DOMAIN`.
NAMES = ("threads", "lanes", "checkpoints")


@dataclass(frozen=True)
class Domain:
    """Functions of one domain. The tables of the buffer itself stand in the schema that the site names."""

    #: The module that a worker process runs.
    worker: str
    #: Opens what the supervisor looks with: Postgres, NATS, configuration.
    open: Callable[[str, str, BufferConfig], Awaitable[Any]]
    #: Reads some of what is there at the end, and records it.
    read_back: Callable[[Any, History, random.Random, Recorder], Awaitable[None]]
    #: What Postgres holds at the end, of its address and what is in quarantine.
    final: Callable[[str, dict[int, ParkedEntry]], Awaitable[Final]]
    checkers: tuple[Checker, ...]
    #: LogConfig.lanes.
    lanes: int = 1


def domain(name: str) -> Domain:
    """The domain of this name."""
    if name not in NAMES:
        raise SystemExit(f"no such domain: {name}; there are {', '.join(NAMES)}")
    found: Domain = import_module(f"chaos.{name}").DOMAIN
    return found
