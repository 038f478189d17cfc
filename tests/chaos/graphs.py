"""The graphs of a chaos run: the contents of a checkpoint, and how the history records them.

Channel `log` is a list of names: each checkpoint appends its own name to its parent's names and the names that tasks
wrote on the parent. So the newest checkpoint of a thread that does not fork shows its whole history, in order. `last`
is stored in the checkpoint's row, `log` and `pad` in blobs. `pad` changes rarely, so that checkpoints refer to values
saved with earlier ones.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from langgraph.checkpoint.base import Checkpoint, CheckpointMetadata, CheckpointTuple
from langgraph.checkpoint.base.id import uuid6

from chaos.history import Saved
from langgraph_savers import checkpoint

#: Channels of tasks' writes where the first write wins, and those where the last wins.
FIRST, LAST = ("log", "extra"), ("__resume__",)
_PAD_BYTES = (10, 200, 200, 5000)


@dataclass(frozen=True)
class Position:
    """The newest known checkpoint of a namespace, with the names that tasks wrote on it."""

    ns: str = ""
    id: str | None = None
    values: Any = None
    versions: Any = None
    step: int = -1
    pending: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the checkpoint and of the writes on it."""
        return (*(self.values or {}).get("log", ()), *self.pending)

    def next(self, name: str, version: Callable[[str | None, None], str], chance: random.Random, run: str = "") -> Step:
        """Return the step that saves the next checkpoint."""
        versions = dict(self.versions or {})
        changed = version(max(versions.values(), default=None), None)
        new = {"log": changed, "last": changed}
        values = dict(self.values or {}) | {"log": [*self.names, name], "last": name}
        if "pad" not in values or chance.random() < 0.1:
            new["pad"] = changed
            values["pad"] = [chance.randbytes(chance.choice(_PAD_BYTES)).hex()]
        made = checkpoint(versions | new, values, str(uuid6()))
        after = replace(self, id=made["id"], values=values, versions=versions | new, step=self.step + 1, pending=())
        metadata: CheckpointMetadata = {"source": "loop", "step": after.step, "parents": {}}
        return Step(made, metadata | {"run_id": run} if run else metadata, new, self.id, after)

    def with_pending(self, name: str) -> Position:
        """Return the position after a task's write."""
        return replace(self, pending=(*self.pending, name))


@dataclass(frozen=True)
class Step:
    """A checkpoint to be saved."""

    checkpoint: Checkpoint
    metadata: CheckpointMetadata
    new_versions: dict[str, Any]
    parent: str | None
    after: Position

    @property
    def content(self) -> str:
        """See `content_of`."""
        return content_of(self.checkpoint, self.metadata)


def content_of(checkpoint: Any, metadata: Any) -> str:
    """Return a short digest of a checkpoint's contents."""
    parts = [checkpoint["channel_values"], checkpoint["channel_versions"], metadata.get("step"), metadata.get("source")]
    return hashlib.sha1(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def key_of(found: CheckpointTuple) -> tuple[str, str]:
    """Return namespace and id."""
    named = found.config["configurable"]
    return named["checkpoint_ns"], named["checkpoint_id"]


def position_of(found: CheckpointTuple | None, ns: str = "") -> Position:
    """Return the position that a read shows."""
    if found is None:
        return Position(ns)
    pending = tuple(value for _, channel, value in found.pending_writes or () if channel == "log")
    values, versions = found.checkpoint["channel_values"], found.checkpoint["channel_versions"]
    return Position(ns, key_of(found)[1], values, versions, found.metadata["step"], pending)


def saved_of(found: CheckpointTuple) -> Saved:
    """Return a read checkpoint as the history records it."""
    parent = found.parent_config["configurable"]["checkpoint_id"] if found.parent_config is not None else None
    writes = tuple((task, channel, str(value)) for task, channel, value in found.pending_writes or ())
    return Saved(parent, content_of(found.checkpoint, found.metadata), writes)
