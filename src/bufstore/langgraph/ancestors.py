"""What the ancestors of a checkpoint have written to some channels, newest first: the decision, on rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from bufstore.langgraph.model import BlobKey, BlobRow, Tables, WriteRow


class Walk:
    """Goes from checkpoint to parent, until each channel has met a value that is stored.

    What it yields is what `BaseCheckpointSaver.get_delta_channel_history` of LangGraph gathers one ancestor at a time.
    """

    def __init__(self, ns: str, at: str | None, channels: Iterable[str]) -> None:
        self.ns = ns
        #: The checkpoint that comes next; None: all is found, or there are no more.
        self.at = at
        #: The checkpoints it has passed: nothing keeps a checkpoint from naming itself, or a later one, as its parent.
        self._passed: set[str] = set()
        #: The writes of each channel, oldest last.
        self.writes: dict[str, list[WriteRow]] = {channel: [] for channel in channels}
        #: The stored value that a channel's writes are based on: JSON, or in a blob.
        self.inline: dict[str, Any] = {}
        self.blobs: dict[str, BlobRow] = {}

    @property
    def channels(self) -> list[str]:
        """The channels that have met no stored value yet."""
        return [c for c in self.writes if c not in self.inline and c not in self.blobs]

    def first_beyond(self, tables: Tables) -> str | None:
        """Return the next checkpoint that these rows do not have; None: there is none."""
        at, passed = self.at, set(self._passed)
        while at is not None and (row := tables.checkpoints.get((self.ns, at))) is not None:
            passed.add(at)
            at = row.parent if row.parent not in passed else None
        return at

    def on(self, tables: Tables) -> None:
        """Walk on as far as these rows have the checkpoints."""
        written: dict[str, list[WriteRow]] = {}
        left = set(self.channels)
        for write in tables.writes.values():
            if write.ns == self.ns and write.channel in left:
                written.setdefault(write.checkpoint_id, []).append(write)
        while left and self.at is not None and (row := tables.checkpoints.get((self.ns, self.at))) is not None:
            for write in sorted(written.get(row.id, ()), key=lambda w: w.order, reverse=True):
                if write.channel in left:
                    self.writes[write.channel].append(write)
            stored = json.loads(row.checkpoint)
            values, versions = stored.get("channel_values") or {}, stored.get("channel_versions") or {}
            for channel in list(left):
                blob = tables.blobs.get((self.ns, channel, str(versions.get(channel))))
                if blob is not None and blob.type != "empty":
                    self.blobs[channel] = blob
                elif channel in values:
                    self.inline[channel] = values[channel]
                else:
                    continue
                left.discard(channel)
            self._passed.add(row.id)
            self.at = row.parent if row.parent not in self._passed else None
        if not left:
            self.at = None


def unknown_blobs(tables: Tables, named: Iterable[BlobKey], channels: Iterable[str]) -> list[BlobKey]:
    """Return the named blobs of these channels for which nobody has asked yet whether they are there."""
    wanted = set(channels)
    return sorted(key for key in set(named) - tables.known if key[1] in wanted)
