"""What NATS answers to requests of its API: objects, in which a field may lack that we need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bufstore.errors import LogUnavailable

NO_ANSWER = "NATS sent a reply that does not answer the request"

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Answer(dict[str, Any]):
    """An object of an answer. Indexing it with a field that it does not have raises LogUnavailable."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__({name: value for name, value in fields.items() if value is not None})

    def __missing__(self, field: str) -> Any:
        raise LogUnavailable(f"{NO_ANSWER}: it lacks {field!r}")


def answer_of(data: bytes) -> Answer:
    """Decode an answer, and the objects in it (but not those further in). Raises LogUnavailable if it is none."""
    try:
        fields = _decode(data)
    except ValueError:
        raise LogUnavailable(NO_ANSWER) from None
    return Answer({name: Answer(value) if isinstance(value, dict) else value for name, value in fields.items()})
