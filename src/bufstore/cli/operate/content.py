"""What an entry's payload says, as JSON can hold it: a payload of a thread of messages, or of LangGraph's checkpoints.

A payload of one domain is never taken for one of the other, whatever log it is from: their first elements differ.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bufstore.langgraph import payload as of_langgraph
from bufstore.threads.model import decode_message, decode_run
from bufstore.threads.payload import Edit, Removal, decode_payload


def kind_of(body: bytes, *, self_contained: bool) -> str:
    """Return the kind of an entry; "unknown": another release's, or of an app's own domain."""
    try:
        payload = decode_payload(body)
    except ValueError:
        try:
            return of_langgraph.kind_of(of_langgraph.decode_payload(body))
        except ValueError:
            return "unknown"
    if isinstance(payload, Removal):
        return "removal"
    if isinstance(payload, Edit):
        return "edit"
    return "snapshot" if self_contained else "append"


def content_of(body: bytes) -> dict[str, Any]:
    """Return how many of its predecessor's messages an entry keeps, its messages and its run; or LangGraph's operation.

    Empty if this release cannot decode the payload, or if it holds what JSON cannot.
    """
    for content in (_of_messages, _of_checkpoints):
        try:
            found = content(body)
            msgspec.json.encode(found)
        except (ValueError, TypeError, RecursionError, msgspec.MsgspecError):
            continue
        return found
    return {}


def _of_messages(body: bytes) -> dict[str, Any]:
    payload = decode_payload(body)
    run = None if isinstance(payload, Removal) else payload.run
    return {
        "keeps": payload.keep,
        "messages": [decode_message(m) for m in payload.messages],
        "run": decode_run(run) if run is not None else None,
    }


def _of_checkpoints(body: bytes) -> dict[str, Any]:
    return {"operation": of_langgraph.shown(of_langgraph.decode_payload(body))}
