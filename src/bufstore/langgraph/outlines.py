"""What may go of a thread's history: the decision, on checkpoints without their values."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import msgspec

from bufstore.langgraph.model import BlobKey, CheckpointRow, Drop, versions_of
from bufstore.langgraph.protocol import Outline


class _Checkpoint(msgspec.Struct):
    v: int = 0
    ts: Any = None
    channel_values: dict[str, Any] | None = None


class _Metadata(msgspec.Struct):
    parents: Any = None
    counters_since_delta_snapshot: Any = msgspec.UNSET
    delta_writes_versioned: Any = msgspec.UNSET


_checkpoint = msgspec.json.Decoder(_Checkpoint).decode
_metadata = msgspec.json.Decoder(_Metadata).decode


def outline_of(row: CheckpointRow, blobs: Container[BlobKey], *, parent_sends: bool) -> Outline:
    """The outline of a checkpoint.

    `blobs`: those that there are. `parent_sends`: something was sent among its parent's writes.
    """
    checkpoint, metadata = _checkpoint(row.checkpoint), _metadata(row.metadata)
    named = versions_of(row)
    # A snapshot of a delta channel leaves a true in the row, with a blob behind it.
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
        needs_parent=row.parent is not None and checkpoint.v < 4 and parent_sends,
        ts=checkpoint.ts if isinstance(checkpoint.ts, str) else "",
    )


def all_but_latest(outlines: Iterable[Outline]) -> Drop | None:
    """What goes when only the newest checkpoint of each namespace stays; None: nothing goes.

    A subgraph's call goes with the root's checkpoint that it started from, once that one is there. An old checkpoint's
    parent stays as long as what was sent to it is taken from there.
    """
    by_ns: dict[str, dict[str, Outline]] = {}
    for outline in outlines:
        by_ns.setdefault(outline.ns, {})[outline.id] = outline
    kept: dict[str, set[str]] = {}
    for ns, found in by_ns.items():
        newest = found[max(found)]
        kept[ns] = {newest.id} | ({newest.parent} if newest.needs_parent and newest.parent else set())
    roots = by_ns.get("", {})
    calls = set()
    for ns, found in by_ns.items():
        root = found[max(found)].root
        # A call's namespace has its task behind a colon; a subgraph that keeps its state between calls has none.
        if ":" in ns and root in roots and root not in kept.get("", ()):
            calls.add(ns)
    gone = [o for ns, found in by_ns.items() if ns not in calls for o in found.values() if o.id not in kept[ns]]
    return drop_of(gone, [o for found in by_ns.values() for o in found.values()], calls)


def drop_of(gone: Iterable[Outline], all_: Iterable[Outline], namespaces: Iterable[str] = ()) -> Drop | None:
    """What deletes these checkpoints, and the blobs that none of the others names; None: nothing goes."""
    lost = {(o.ns, o.id): o for o in gone}
    needed = {key for o in all_ if (o.ns, o.id) not in lost for key in o.blobs}
    freed = {key for o in lost.values() for key in o.blobs} - needed
    names = sorted(namespaces)
    return Drop(sorted(lost), names, sorted(freed)) if lost or names else None
