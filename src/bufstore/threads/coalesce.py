"""Many entries of a thread, folded into one change."""

from __future__ import annotations

from collections.abc import Sequence

from bufstore.buffer.entry import Base, StoredEntry
from bufstore.buffer.ports import Inapplicable
from bufstore.threads.model import RunSave, ThreadChange
from bufstore.threads.payload import Payload, decode_payload


def coalesce(thread_id: str, version: int, entries: Sequence[StoredEntry]) -> ThreadChange:
    """The change that equals `entries` in order, on a thread of `version` messages.

    A thread that the buffer has no row of may be in the store all the same; the writer of an entry with base NONE
    has looked there, so what its entry keeps is what there is.

    Raises Inapplicable for the first entry that is no payload, keeps more messages than there are, or does not
    arrive at the version that its envelope names.
    """
    keep = version
    messages: list[bytes] = []
    whole = False
    runs: dict[str, bytes] = {}
    saves: list[RunSave] = []
    for stored in entries:
        payload = decoded(stored)
        if stored is entries[0] and stored.entry.base is Base.NONE:
            keep = payload.keep
        if payload.keep > keep + len(messages):
            raise Inapplicable(stored.entry.id, f"keeps {payload.keep} of {keep + len(messages)} messages")
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


def decoded(stored: StoredEntry) -> Payload:
    """The entry's payload. Raises Inapplicable."""
    entry = stored.entry
    try:
        payload = decode_payload(entry.payload)
    except ValueError as e:
        raise Inapplicable(entry.id, str(e)) from e
    if payload.keep + len(payload.messages) != entry.version:
        raise Inapplicable(entry.id, "its messages do not add up to its version")
    return payload
