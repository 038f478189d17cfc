"""Requests and writes on a connection, until they are answered."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bufstore.jetstream.messages import AppendUnknown

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


class Questions:
    """What waits for an answer on one connection, by token: the end of the subject where the answer arrives.

    nats-py's own table does not notice a lost connection, so its requests would wait for their whole timeout.
    """

    def __init__(self) -> None:
        self._tokens = itertools.count()
        self._open: dict[str, Question] = {}

    def __len__(self) -> int:
        return len(self._open)

    def ask(
        self,
        subjects: Sequence[str],
        end: Callable[[bytes | Exception], bool],
        heard: Callable[[bytes, bytes], None] | None = None,
    ) -> str:
        """Note a question on these subjects, as in `Question`. Returns its token."""
        token = f"{next(self._tokens)}{OF_READ if heard is not None else ''}"
        self._open[token] = Question(subjects, end, heard)
        return token

    def heard(self, token: str, data: bytes, headers: bytes) -> None:
        """Pass on one answer of several. The question may have been given up."""
        if (asked := self._open.get(token)) is not None and asked.heard is not None:
            asked.heard(data, headers)

    def end(self, token: str, outcome: bytes | Exception) -> None:
        """Pass on the answer, or why there is none, and forget the question unless another answer may come."""
        question = self._open.get(token)
        if question is not None and not question.end(outcome):
            self._open.pop(token, None)

    def end_all(self, error: Exception) -> None:
        """End all questions with this error."""
        for token in list(self._open):
            self.end(token, error)

    def refuse(self, error: Exception, subjects: set[str], stores: bool) -> None:
        """End the questions on these subjects, which are in lower case: one of them was refused.

        `stores`: they are writes. Of several nobody knows which one: what was sent before the right was taken away is
        stored.
        """
        asked = [t for t, q in self._open.items() if any(subject.lower() in subjects for subject in q.subjects)]
        for token in asked:
            self.end(token, AppendUnknown(str(error)) if stores and len(asked) > 1 else error)

    def forget(self, token: str) -> None:
        """Wait for no answer any more."""
        self._open.pop(token, None)


class Doubt(NamedTuple):
    """Which answers to a write are not believed at once.

    For a while two nodes may believe that they lead a stream (docs/adr/0028). A write reaches both, and both answer:
    the node that the others have left may refuse the write, and the other one may store it.
    """

    #: Whether the answer is a refusal that may be wrong.
    refused: Callable[[bytes], bool]
    #: Returns when a leader that the others follow has dealt with all that was sent before. Raises like `request`.
    prove: Callable[[], Awaitable[None]]
