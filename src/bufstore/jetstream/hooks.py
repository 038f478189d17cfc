"""The private methods of nats-py that we replace, and whether the installed version still calls them.

If nats-py renames such a method, nothing fails: ours would just never be called, and its effect would be lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from types import FunctionType

from nats.aio.client import Client
from nats.protocol.parser import Parser

from bufstore.jetstream import frames

#: The methods that we replace, each with its parameters.
_HOOKS = {
    "_process_msg": ["self", "sid", "subject", "reply", "data", "headers"],
    "_process_headers": ["self", "headers"],
    "_process_err": ["self", "err_msg"],
    "_process_op_err": ["self", "e"],
    "_close": ["self", "status", "do_cbs"],
    "_connect_command": ["self"],
    "_flush_pending": ["self", "force_flush"],
}
#: The method that sends the credentials.
GUARD = "_connect_command"


def changed(client: type = Client, callers: Iterable[type] = (Client, Parser)) -> list[str]:
    """Return the names of the methods that this version lacks, has with other parameters, or no longer calls."""
    called = {name for owner in callers for method in _functions(owner) for name in method.__code__.co_names}
    return [name for name, wanted in _HOOKS.items() if name not in called or _parameters(client, name) != wanted]


def concerns() -> list[str]:
    """Return what is slower or weaker than with a checked version of nats-py; empty when a checked one is installed."""
    found = []
    if not frames.supported:
        found.append("bufstore was not tested with this version: every message takes a slower path")
    if "_process_headers" in (gone := changed()):
        found.append("it parses headers differently: one message with invalid headers may end the connection")
    if "_process_err" in gone:
        found.append("it reports errors differently: an account's max_payload below the server's stops all writes")
    if "_flush_pending" in gone:
        found.append("it handles a stalled link differently: calls may take longer than they should")
    if GUARD in gone:
        found.append("it signs in differently: bufstore refuses to use TLS with it")
    return found


def installed() -> str:
    """Return the name and the version of the installed client."""
    return f"nats-py {version('nats-py')}"


def advice() -> str:
    """Return what to install."""
    return f"install nats-py {' or '.join(frames.CHECKED_VERSIONS)}*, or a newer bufstore"


def _functions(owner: type) -> Iterator[FunctionType]:
    return (value for value in vars(owner).values() if isinstance(value, FunctionType))


def _parameters(owner: type, name: str) -> list[str] | None:
    method = getattr(owner, name, None)
    return list(inspect.signature(method).parameters) if isinstance(method, FunctionType) else None
