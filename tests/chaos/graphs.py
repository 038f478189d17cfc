"""The graphs of a chaos run: what a checkpoint holds, and how it is told in the history.

Channel `log` is a list of names: each checkpoint adds its own name behind its parent's names and what tasks have
written on top of the parent. So the newest checkpoint of a thread that does not fork tells its whole history, in order.
`last` stands in the checkpoint's row, `log` and `pad` in blobs; `pad` changes now and then only, so that checkpoints
name values that came with earlier ones.
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

#: A task's writes of which the first counts, and of which the last counts.
FIRST, LAST = ("log", "extra"), ("__resume__",)
_PAD_BYTES = (10, 200, 200, 5000)


@dataclass(frozen=True)
class Position:
    """The newest checkpoint of a namespace as somebody knows it, with what tasks have written on top of it."""

    ns: str = ""
    id: str | None = None
    values: Any = None
    versions: Any = None
    step: int = -1
    pending: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names that it stands for."""
        return (*(self.values or {}).get("log", ()), *self.pending)

    def next(self, name: str, version: Callable[[str | None, None], str], chance: random.Random, run: str = "") -> Step:
        """The next checkpoint."""
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
        """Behind a task's writes."""
        return replace(self, pending=(*self.pending, name))


@dataclass(frozen=True)
class Step:
    """A checkpoint that is to be saved."""

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
    """What a checkpoint holds, in few characters."""
    parts = [checkpoint["channel_values"], checkpoint["channel_versions"], metadata.get("step"), metadata.get("source")]
    return hashlib.sha1(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def key_of(found: CheckpointTuple) -> tuple[str, str]:
    """Namespace and id."""
    named = found.config["configurable"]
    return named["checkpoint_ns"], named["checkpoint_id"]


def position_of(found: CheckpointTuple | None, ns: str = "") -> Position:
    """What a read shows."""
    if found is None:
        return Position(ns)
    pending = tuple(value for _, channel, value in found.pending_writes or () if channel == "log")
    values, versions = found.checkpoint["channel_values"], found.checkpoint["channel_versions"]
    return Position(ns, key_of(found)[1], values, versions, found.metadata["step"], pending)


def saved_of(found: CheckpointTuple) -> Saved:
    """What a read shows, as it is recorded."""
    parent = found.parent_config["configurable"]["checkpoint_id"] if found.parent_config is not None else None
    writes = tuple((task, channel, str(value)) for task, channel, value in found.pending_writes or ())
    return Saved(parent, content_of(found.checkpoint, found.metadata), writes)
