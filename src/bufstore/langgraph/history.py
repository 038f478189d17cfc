"""How much of a thread's history is written: the decision, on rows that are not written yet."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, Literal

import msgspec

from bufstore.errors import ConfigError
from bufstore.langgraph.folded import Folded
from bufstore.langgraph.model import BlobKey, CheckpointKey, CheckpointRow, Tables, is_old, versions_of
from bufstore.langgraph.outlines import outline_of
from bufstore.types import check_choice

#: "all": every checkpoint. "run": of each run the newest one of a flush, and those to which somebody may want to go
#: back. "latest": the newest one of a flush.
History = Literal["all", "run", "latest"]

#: The sources of checkpoints that somebody other than the run has asked for.
_SOURCES = frozenset({"input", "update", "fork"})
#: The channels of writes that say that a run has stopped at their checkpoint.
_STOPS = frozenset({"__interrupt__", "__error__", "__resume__"})


def check_history(history: History) -> History:
    """Return `history` if it is a mode. Raises ConfigError."""
    return check_choice(history, History, "history", ConfigError)


class _Metadata(msgspec.Struct):
    source: Any = None
    run_id: Any = None


_metadata = msgspec.json.Decoder(_Metadata).decode


def thin(folded: Folded, history: History) -> None:
    """Leave out checkpoints that newer ones of the same flush have superseded, with their writes and blobs.

    A checkpoint that stays gets its nearest ancestor that stays as its parent, and keeps the values that it names. A
    thread with a DeltaChannel, whose values stand in its history, is left as it is; so is one with a checkpoint of an
    old version, which needs its parent.
    """
    rows = folded.rows
    if history == "all" or any(_needs_history(row, rows) for row in rows.checkpoints.values()):
        return
    kept = _kept(folded, history)
    gone = rows.checkpoints.keys() - kept
    if not gone:
        return
    for key in kept:
        rows.checkpoints[key] = _rewired(rows.checkpoints[key], gone, rows)
    superseded = _named(rows.checkpoints[key] for key in gone) - _named(rows.checkpoints[key] for key in kept)
    rows.blobs = {key: blob for key, blob in rows.blobs.items() if key not in superseded}
    rows.writes = {key: write for key, write in rows.writes.items() if key[:2] not in gone}
    rows.checkpoints = {key: row for key, row in rows.checkpoints.items() if key not in gone}


def _kept(folded: Folded, history: History) -> set[CheckpointKey]:
    rows = folded.rows.checkpoints
    kept, newest = set(folded.copied), dict[tuple[str, Any], str]()
    # What was put last need not be the newest by its id (two workers, or clocks): its writer goes on from it, and
    # does not put again the values that it names. A copy is nobody's to go on from.
    kept |= set({key[0]: key for key in rows if key not in folded.copied}.values())
    if history == "run":
        kept |= {key[:2] for key, write in folded.rows.writes.items() if write.channel in _STOPS}
    for (ns, id_), row in rows.items():
        groups: list[tuple[str, Any]] = [(ns, None)]
        if history == "run":
            metadata = _metadata(row.metadata)
            groups.append((ns, str(metadata.run_id)))
            if metadata.source in _SOURCES:
                kept.add((ns, id_))
                if row.parent is not None:  # where the run before ended or stopped: few runs say their ids
                    kept.add((ns, row.parent))
        for group in groups:
            newest[group] = max(newest.get(group, ""), id_)
    return (kept & rows.keys()) | {(ns, id_) for (ns, _), id_ in newest.items()}


def _needs_history(row: CheckpointRow, rows: Tables) -> bool:
    return is_old(row) or outline_of(row, rows.blobs.keys(), parent_sends=False).delta


def _rewired(row: CheckpointRow, gone: Set[CheckpointKey], rows: Tables) -> CheckpointRow:
    parent, passed = row.parent, set[str]()
    while parent is not None and (row.ns, parent) in gone:
        # No writer makes a circle of parents, but the log may hold anything.
        again = parent in passed
        passed.add(parent)
        parent = None if again else rows.checkpoints[row.ns, parent].parent
    return row if parent == row.parent else msgspec.structs.replace(row, parent=parent)


def _named(rows: Iterable[CheckpointRow]) -> set[BlobKey]:
    return {key for row in rows for key in versions_of(row)}
