"""What the parts of the suite share: checks and what they need, ids, runs, and two small helpers."""

from __future__ import annotations

import asyncio
import enum
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bufstore.errors import ConfigError
from bufstore.threads.model import Run
from bufstore.types import Receipt

E = TypeVar("E", bound=BaseException)
Body = Callable[[Any], Awaitable[None]]


class Capability(enum.Enum):
    """What a store may lack. What needs no capability, every store does."""

    #: Gives back any value that bufstore takes, not only what JSON has: bytes, NUL in text, keys that are no text.
    ANY_VALUE = "any value"
    #: query_messages, load_message, load_message_range.
    MESSAGE_PAGES = "message pages"
    #: query_runs, query_threads.
    LISTS = "lists"
    #: save_thread, update_metadata, save_thread_state, create_run, append_messages, delete_messages; in `apply`: the
    #: fields of a ThreadChange that these calls fill.
    EDITS = "edits"
    #: set_parent, delete_thread, and parents that are checked; in `apply`: `parent`, `deleted` and `gone`.
    LINEAGE = "lineage"
    #: `apply` fails for a run whose id another thread has. Without this, only the buffer's shared state refuses it.
    RUN_OWNERS = "run owners"


#: A store that does all of the contract.
EVERYTHING = frozenset(Capability)


@dataclass(frozen=True)
class Check:
    """One promise: called with a store (or an `Applier`), it returns, or fails with AssertionError or another error."""

    #: A sentence, its words joined by underscores.
    name: str
    #: What to know beyond the name; empty when there is nothing more.
    text: str
    needs: frozenset[Capability]
    body: Body

    async def __call__(self, subject: Any) -> None:
        if not __debug__:
            raise ConfigError("checks are made of assert statements, which `python -O` leaves out: run them without -O")
        await self.body(subject)

    def __str__(self) -> str:
        return self.name


def registrar(checks: list[Check]) -> Callable[..., Callable[[Body], Check]]:
    """Return a decorator that takes the capabilities that a check needs, and puts the check into `checks`."""

    def needing(*needs: Capability) -> Callable[[Body], Check]:
        def register(body: Body) -> Check:
            check = Check(getattr(body, "__name__", ""), (body.__doc__ or "").strip(), frozenset(needs), body)
            checks.append(check)
            return check

        return register

    return needing


class Raised(Generic[E]):
    """What `raises` caught, after its block."""

    value: E


@contextmanager
def raises(kind: type[E]) -> Iterator[Raised[E]]:
    """Fail with AssertionError unless the block raises an error of this kind."""
    caught: Raised[E] = Raised()
    try:
        yield caught
    except kind as e:
        caught.value = e
        return
    raise AssertionError(f"{kind.__name__} was not raised")


async def at_once(*calls: Awaitable[Receipt], refused: type[Exception]) -> list[Receipt | Exception]:
    """Return the outcomes of calls made at once; raise any error but `refused`."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    found: list[Receipt | Exception] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, refused):
            raise outcome
        found.append(outcome)
    return found


def count(outcomes: list[Receipt | Exception], kind: type[object]) -> int:
    """Return how many of the outcomes are of this kind."""
    return sum(isinstance(outcome, kind) for outcome in outcomes)


def fresh(what: str = "thread") -> str:
    """Return an id that nothing else has."""
    return f"{what}-{uuid.uuid4().hex}"


def run_of(thread_id: str, run_id: str | None = None, **fields: Any) -> Run:
    return Run(run_id=run_id or f"run-of-{thread_id}", thread_id=thread_id, **fields)
