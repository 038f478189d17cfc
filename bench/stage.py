"""The tools of a row of the table: servers, workers, rounds, the scale.

The order of the contestants rotates from round to round, so that the same one does not always go first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bench.contestant import Contestant, Place
from bench.servers import BenchServers
from bench.worker import Worker

T = TypeVar("T")
Kind = type[Contestant] | tuple[type[Contestant], dict[str, Any]]


def server_of(kind: Kind) -> str:
    """Return the server that makes a contestant's step durable."""
    contestant: type[Contestant] = kind[0] if isinstance(kind, tuple) else kind
    return contestant.server


@dataclass
class Stage:
    """`scale` shrinks counts and times for trials; `rounds` is how often everything is measured.

    `quick`: rows with a long preparation prepare less.
    """

    servers: BenchServers
    rounds: int
    scale: float = 1.0
    say: Callable[[str], None] = print
    quick: bool = False
    #: Objects that rows share, by name.
    shared: dict[str, Any] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def count(self, full: int, least: int) -> int:
        """Return a scaled number of things."""
        return max(round(full * self.scale), min(least, full))

    def seconds(self, full: float) -> float:
        """Return how long to measure, scaled."""
        return max(full * self.scale, 0.15)

    def place(self, *, lazy: bool = False, name: str | None = None) -> Place:
        """Return a new name on the servers (`lazy`: on the NATS server with the default sync)."""
        nats = self.servers.lazy_nats if lazy else self.servers.nats
        return Place(
            nats,
            self.servers.dsn,
            name or f"b{next(self._numbers)}",
            self.servers.pids(lazy=lazy),
            # A row that writes little reserves little, so that a dozen logs fit on a disk that is half full.
            log_bytes=self.count(Place.log_bytes, 256 << 20),
        )

    def workers(self, place: Place | None = None, **kinds: Kind) -> AbstractContextManager[dict[str, Worker]]:
        """Open contestants, each in its own process."""
        where = place or self.place()
        return self.workers_at({name: (where, kind) for name, kind in kinds.items()})

    @contextmanager
    def workers_at(self, kinds: Mapping[str, tuple[Place, Kind]]) -> Iterator[dict[str, Worker]]:
        """Open contestants, each in its own process and place."""
        workers: dict[str, Worker] = {}
        try:
            for name, (place, kind) in kinds.items():
                contestant, options = kind if isinstance(kind, tuple) else (kind, {})
                workers[name] = Worker(contestant, place, **options)
            # One after the other, because two that create the same tables would wait for each other.
            for worker in workers.values():
                worker.call("open")
            yield workers
        except BaseException:
            for worker in workers.values():
                with suppress(Exception):
                    worker.kill()
            raise
        alive = [worker for worker in workers.values() if not worker.killed]
        for worker in alive:
            worker.begin("close")
        for worker in alive:
            worker.stop()

    def interleave(self, actions: Mapping[str, Callable[[], T]], rounds: int | None = None) -> dict[str, list[T]]:
        """Do all actions in every round, and return the results of each."""
        found: dict[str, list[T]] = {name: [] for name in actions}
        names = list(actions)
        for number in range(rounds or self.rounds):
            turn = number % len(names)
            order = names[turn:] + names[:turn]
            # Backwards every other time: what one leaves behind must not always meet the same neighbour.
            for name in reversed(order) if number % 2 else order:
                found[name].append(actions[name]())
        return found
