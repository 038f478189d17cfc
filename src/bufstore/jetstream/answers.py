"""What NATS answers to requests of its API: objects, in which a field that we need may lack, or be something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bufstore.errors import LogUnavailable

NO_ANSWER = "NATS sent a reply that does not answer the request"

_decode = msgspec.json.Decoder(dict[str, Any]).decode

#: What a field is in whatever object it stands, of the fields that are used without a further look.
_KINDS: dict[str, type] = {
    **dict.fromkeys(("config", "state", "error", "cluster", "metadata", "message", "ack_floor"), dict),
    **dict.fromkeys(("created", "ts", "time"), str),
    **dict.fromkeys(("messages", "bytes", "max_bytes", "seq", "first_seq", "last_seq", "stream_seq"), int),
    **dict.fromkeys(("num_pending", "num_ack_pending", "num_redelivered", "num_waiting"), int),
}


class Answer(dict[str, Any]):
    """An object of an answer. Indexing it with a field that it does not have raises LogUnavailable."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Raises LogUnavailable if a field is something else than it has to be."""
        super().__init__({name: value for name, value in fields.items() if value is not None})
        for name, value in self.items():
            if not isinstance(value, _KINDS.get(name, object)):
                raise LogUnavailable(f"{NO_ANSWER}: its {name!r} is of another kind")

    def __missing__(self, field: str) -> Any:
        raise LogUnavailable(f"{NO_ANSWER}: it lacks {field!r}")


def answer_of(data: bytes) -> Answer:
    """Decode an answer, and the objects in it (but not those further in). Raises LogUnavailable if it is none."""
    try:
        fields = _decode(data)
    except ValueError:
        raise LogUnavailable(NO_ANSWER) from None
    return Answer({name: Answer(value) if isinstance(value, dict) else value for name, value in fields.items()})
