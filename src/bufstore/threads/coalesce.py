"""Many entries of a thread, folded into one change."""

from __future__ import annotations

from collections.abc import Sequence

from bufstore.buffer.entry import StoredEntry
from bufstore.buffer.ports import Inapplicable
from bufstore.threads.model import RunSave, ThreadChange
from bufstore.threads.payload import Payload, decode_payload


def coalesce(thread_id: str, version: int | None, entries: Sequence[StoredEntry]) -> ThreadChange:
    """The change that equals `entries` in order, on a thread of `version` messages.

    `version` is None when the buffer flushes the thread for the first time: the store may have held it before, and
    then the writer of the first entry has looked there.

    Raises Inapplicable for the first entry that is no payload, keeps more messages than there are, or does not
    arrive at the version that its envelope names.
    """
    keep = version if version is not None else _payload(entries[0], None).keep
    messages: list[bytes] = []
    whole = False
    runs: dict[str, bytes] = {}
    saves: list[RunSave] = []
    for stored in entries:
        payload = _payload(stored, keep + len(messages))
        if payload.keep >= keep:
            del messages[payload.keep - keep :]
            messages += payload.messages
        else:
            keep = payload.keep
            messages = list(payload.messages)
        whole = whole or (stored.entry.self_contained and payload.keep == 0)
        runs.pop(payload.save.run_id, None)  # the order of the last save, not of the first
        runs[payload.save.run_id] = payload.run
        saves.append(payload.save)
    return ThreadChange(
        thread_id=thread_id,
        keep=keep,
        messages=messages,
        whole=whole and keep == 0,
        runs=runs,
        saves=saves,
    )


def _payload(stored: StoredEntry, version: int | None) -> Payload:
    entry = stored.entry
    try:
        payload = decode_payload(entry.payload)
    except ValueError as e:
        raise Inapplicable(entry.id, str(e)) from e
    if version is not None and payload.keep > version:
        raise Inapplicable(entry.id, f"keeps {payload.keep} of {version} messages")
    if payload.keep + len(payload.messages) != entry.version:
        raise Inapplicable(entry.id, "its messages do not add up to its version")
    return payload
