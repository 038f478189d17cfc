"""Which part of a thread's history may be deleted: the decision, on checkpoints without their values."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from typing import Any

import msgspec

from bufstore.langgraph.model import BlobKey, CheckpointRow, Drop, takes_sends, versions_of
from bufstore.langgraph.payload import encode_payload
from bufstore.langgraph.protocol import Outline


class _Checkpoint(msgspec.Struct):
    ts: Any = None
    channel_values: dict[str, Any] | None = None


class _Metadata(msgspec.Struct):
    parents: Any = None
    counters_since_delta_snapshot: Any = msgspec.UNSET
    delta_writes_versioned: Any = msgspec.UNSET


_checkpoint = msgspec.json.Decoder(_Checkpoint).decode
_metadata = msgspec.json.Decoder(_Metadata).decode


def outline_of(row: CheckpointRow, blobs: Container[BlobKey], *, parent_sends: bool) -> Outline:
    """Return the outline of a checkpoint.

    `blobs`: those that exist. `parent_sends`: whether something was sent among its parent's writes.
    """
    checkpoint, metadata = _checkpoint(row.checkpoint), _metadata(row.metadata)
    named = versions_of(row)
    # A snapshot of a delta channel stands as `true` in the row, and its value in a blob.
    values = checkpoint.channel_values or {}
    root = metadata.parents.get("") if isinstance(metadata.parents, dict) else None
    snapshot = {key[1] for key in named if values.get(key[1]) is True and key in blobs}
    counted = metadata.counters_since_delta_snapshot is not msgspec.UNSET
    return Outline(
        ns=row.ns,
        id=row.id,
        parent=row.parent,
        blobs=frozenset(named),
        root=root if isinstance(root, str) else None,
        delta=bool(snapshot) or counted or metadata.delta_writes_versioned is not msgspec.UNSET,
        needs_parent=parent_sends and takes_sends(row),
        ts=checkpoint.ts if isinstance(checkpoint.ts, str) else "",
    )


def all_but_latest(outlines: Iterable[Outline]) -> Drop | None:
    """Return the drop after which only the newest checkpoint of each namespace is left; None: nothing goes.

    The namespace of a subgraph's call goes with the root graph's checkpoint that the call started from, also if that
    was never written (`bufstore.langgraph.history`). The parent of an old checkpoint stays if the checkpoint takes from
    it what was sent to it.
    """
    by_ns: dict[str, dict[str, Outline]] = {}
    for outline in outlines:
        by_ns.setdefault(outline.ns, {})[outline.id] = outline
    kept: dict[str, set[str]] = {}
    for ns, found in by_ns.items():
        newest = found[max(found)]
        kept[ns] = {newest.id} | ({newest.parent} if newest.needs_parent and newest.parent else set())
    roots = kept.get("", set())
    calls = set()
    for ns, found in by_ns.items():
        root = found[max(found)].root
        # The namespace of a call has its task behind a colon; a subgraph that keeps state between calls has no colon.
        if ":" in ns and root is not None and roots and root not in roots and root < max(roots):
            calls.add(ns)
    gone = [o for ns, found in by_ns.items() if ns not in calls for o in found.values() if o.id not in kept[ns]]
    return drop_of(gone, [o for found in by_ns.values() for o in found.values()], calls)


def drop_of(gone: Iterable[Outline], all_: Iterable[Outline], namespaces: Iterable[str] = ()) -> Drop | None:
    """Return the drop of these checkpoints and of the blobs that none of the others names; None: nothing goes."""
    lost = {(o.ns, o.id): o for o in gone}
    needed = {key for o in all_ if (o.ns, o.id) not in lost for key in o.blobs}
    freed = {key for o in lost.values() for key in o.blobs} - needed
    names = sorted(namespaces)
    return Drop(sorted(lost), names, sorted(freed)) if lost or names else None


def within(drop: Drop, all_: Collection[Outline], bytes_max: int) -> Drop:
    """Return the drop, or the first part of it that takes no more bytes of the log. A part is a drop of its own: it has
    the blobs that none of the checkpoints names which stay for now.
    """
    part: Drop | None = drop
    count = len(drop.checkpoints) + len(drop.namespaces)
    while part is not None and count > 1 and len(encode_payload(part)) > bytes_max:
        count //= 2
        first = set(drop.checkpoints[:count])
        part = drop_of([o for o in all_ if (o.ns, o.id) in first], all_, drop.namespaces[:count])
    return part or drop
