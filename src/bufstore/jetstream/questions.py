"""Requests and writes on a connection, until they are answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: The end of the token of a question for what is stored, and of no other's.
OF_READ = "r"


@dataclass(slots=True)
class Question:
    """A request or write that waits for its answer."""

    subjects: Sequence[str]
    #: Called with the answer's payload, or the error that says why there is none. Returns whether another answer may
    #: come; none comes after an error.
    end: Callable[[bytes | Exception], bool]
    #: Called with payload and headers of each answer, where there may be several; then `end` gets errors only.
    heard: Callable[[bytes, bytes], None] | None = None


class Doubt(NamedTuple):
    """Which answers to a write are not believed at once.

    For a while two nodes may believe that they lead a stream (docs/adr/0028). A write reaches both, and both answer:
    the node that the others have left may refuse the write, and the other one may store it.
    """

    #: Whether the answer is a refusal that may be wrong.
    refused: Callable[[bytes], bool]
    #: Returns when a leader that the others follow has dealt with all that was sent before. Raises like `request`.
    prove: Callable[[], Awaitable[None]]
