"""What an entry's payload says, as JSON can hold it."""

from __future__ import annotations

from typing import Any

import msgspec

from bufstore.threads.model import decode_message, decode_run
from bufstore.threads.payload import Removal, decode_payload


def content_of(body: bytes) -> dict[str, Any]:
    """How many messages of the predecessor it keeps, its messages, and its run.

    Nothing if the payload is not of this release, or holds what JSON does not.
    """
    try:
        payload = decode_payload(body)
        run = None if isinstance(payload, Removal) else payload.run
        content = {
            "keeps": payload.keep,
            "messages": [decode_message(m) for m in payload.messages],
            "run": decode_run(run) if run is not None else None,
        }
        msgspec.json.encode(content)
    except (ValueError, TypeError, msgspec.MsgspecError):
        return {}
    return content
