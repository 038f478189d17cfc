"""What a failure to send, or to get an answer, means for a message that was to be stored. Pure."""

from __future__ import annotations

import nats.errors

from bufstore.errors import LogUnavailable
from bufstore.jetstream.client import text_of
from bufstore.jetstream.errors import MessageTooLarge
from bufstore.jetstream.messages import AppendUnknown

#: The exceptions that sending and waiting raise.
FAILURES = (
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionClosedError,
    nats.errors.MaxPayloadError,
    OSError,  # a TimeoutError is one
)


def meaning(failure: Exception, *, sent: bool, why: str) -> LogUnavailable | AppendUnknown:
    """Return one of `FAILURES` as an error of ours. `sent`: all was sent before; `why`: why there is no connection."""
    if isinstance(failure, TimeoutError):
        return AppendUnknown("no answer from NATS in time")
    if isinstance(failure, OSError):
        return AppendUnknown(f"the connection failed: {text_of(failure)}")
    if sent:
        return AppendUnknown("the connection was lost before NATS answered")
    if isinstance(failure, nats.errors.MaxPayloadError):
        return MessageTooLarge("the message is larger than the NATS server's max_payload")
    return LogUnavailable(f"not connected to NATS: {why}")
