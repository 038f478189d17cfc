"""What goes wrong on a connection, as an error of ours: in connecting, in sending, and where NATS forbids it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import nats.errors

from bufstore.config import mask_url
from bufstore.errors import ConfigError, LogUnavailable
from bufstore.jetstream.client import ListeningClient, no_room, text_of, violation
from bufstore.jetstream.errors import MessageTooLarge
from bufstore.jetstream.messages import AppendUnknown

#: The exceptions that sending and waiting raise.
FAILURES = (
    nats.errors.OutboundBufferLimitError,
    nats.errors.ConnectionClosedError,
    nats.errors.MaxPayloadError,
    OSError,  # a TimeoutError is one
)

#: A request about one consumer, in lower case, up to the consumer's name.
_OF_CONSUMER = re.compile(r"(.*\.consumer\.(?:create|durable\.create|info|delete|msg\.next)\.[^.]+)\..+")


def meaning(failure: Exception, *, sent: bool, why: str) -> LogUnavailable | AppendUnknown:
    """Return one of `FAILURES` as an error of ours, which says whether what was to be stored may be.

    `sent`: all was sent before; `why`: why there is no connection.
    """
    if isinstance(failure, TimeoutError):
        return AppendUnknown("no answer from NATS in time")
    if isinstance(failure, OSError):
        return AppendUnknown(f"the connection failed: {text_of(failure)}")
    if sent:
        return AppendUnknown("the connection was lost before NATS answered")
    if isinstance(failure, nats.errors.MaxPayloadError):
        return too_large()
    return LogUnavailable(f"not connected to NATS: {why}")


def too_large() -> MessageTooLarge:
    """Return the error for a message that was not sent because the server would end the connection."""
    return MessageTooLarge("the message is larger than the NATS server's max_payload")


def why(error: Exception, client: ListeningClient, url: str, expired: str = "") -> Exception:
    """Return what to raise for an error of connecting to `url`: a ConfigError when somebody has to mend something.

    `expired`: what the credentials say of that (`bufstore.jetstream.credentials.expiry`).
    """
    if client.no_room:  # whatever waited for an answer there met a timeout
        return no_room()
    if isinstance(error, nats.errors.NoServersError) and client.errors:
        error = client.errors[-1]  # nats-py raises it when it has given up; it gave the reason before
    last = client.last_error
    if isinstance(error, nats.errors.ConnectionClosedError) and last is not None and violation(last) is None:
        error = last  # why it was closed; what is not permitted closes nothing
    if "authorization violation" in str(error).lower() or isinstance(error, nats.errors.AuthorizationError):
        return ConfigError(f"NATS refused the credentials ({mask_url(url)}): {text_of(error)}{expired}")
    if isinstance(error, ValueError) and not isinstance(error, OSError):  # an SSLError is both
        return ConfigError(f"NATS configuration: {text_of(error)}")
    return error


def came_late(error: BaseException) -> bool:
    """Whether the server ended a connection because the login came too late: this process or the server was busy."""
    return "authentication timeout" in str(error).lower()


def most_telling(errors: Sequence[Exception]) -> Exception:
    """Return one of the errors of connecting: what somebody has to mend says more than a server that is away.

    So does a server that is there.
    """
    late = next((e for e in errors if came_late(e)), errors[-1])
    return next((e for e in errors if isinstance(e, ConfigError)), late)


class Refused(NamedTuple):
    """What NATS does not permit to be published."""

    error: ConfigError
    #: The subjects that the messages may have had, in lower case.
    subjects: set[str]
    #: Whether such a message is stored; else it is a request.
    stores: bool


def may_not_publish(subject: str, api: str) -> Refused:
    """Return what was refused on a subject, which is in lower case."""
    how = "see `bufstore permissions`, and docs/MAILBOX.md and docs/TOKENS.md for theirs"
    if ".stream.create." in subject:
        how = "run `bufstore setup` as operator; for a LangGraph saver, start one once as operator"
    # A server of the domain names the subject that ours stands for there; one on a leaf node names ours.
    api = api.lower()
    sent = {subject, f"{api}.{subject}", subject.replace("$js.api.", f"{api}.")}
    asked = subject.removeprefix("$js.api.").removeprefix(f"{api}.")
    error = ConfigError(f"NATS does not permit this user to publish on {of_all_consumers(subject)!r} ({how})")
    return Refused(error, sent, asked == subject or asked.startswith("$kv."))


def of_all_consumers(subject: str) -> str:
    """Return the subject, which is in lower case, or of a request about one consumer, what it is for all of them.

    That is what somebody has to permit. A name that is new each time would make the same error another one.
    """
    found = _OF_CONSUMER.fullmatch(subject)
    return subject if found is None else f"{found[1]}.>"
