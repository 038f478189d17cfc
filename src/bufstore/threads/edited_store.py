"""The edits of `ThreadRunStore`, for every store that can carry out one edit and one change of lineage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bufstore.threads import edits, lineage
from bufstore.threads.lineage import Children, LineageChange
from bufstore.threads.model import NO_METADATA, Run, ThreadMetadata
from bufstore.types import Message, Receipt


class EditedStore:
    """`ThreadRunStore` says what each method does."""

    async def _edit(self, wanted: edits.WantedEdit) -> Receipt:
        raise NotImplementedError

    async def _change(self, wanted: LineageChange) -> Receipt:
        raise NotImplementedError

    async def create_run(self, run: Run) -> Receipt:
        """See `ThreadRunStore.create_run`."""
        return await self._edit(edits.create_run(run))

    async def save_thread(self, thread_id: str, metadata: ThreadMetadata = NO_METADATA) -> Receipt:
        """See `ThreadRunStore.save_thread`."""
        return await self._edit(edits.save_thread(thread_id, metadata))

    async def update_metadata(self, thread_id: str, metadata: ThreadMetadata) -> Receipt:
        """See `ThreadRunStore.update_metadata`."""
        return await self._edit(edits.update_metadata(thread_id, metadata))

    async def save_thread_state(self, thread_id: str, state: Any) -> Receipt:
        """See `ThreadRunStore.save_thread_state`."""
        return await self._edit(edits.save_state(thread_id, state))

    async def append_messages(
        self, thread_id: str, messages: Sequence[Message], *, expected_version: int | None = None
    ) -> Receipt:
        """See `ThreadRunStore.append_messages`."""
        return await self._edit(edits.append_messages(thread_id, messages, expected_version))

    async def delete_messages(self, thread_id: str, message_ids: Sequence[str] | None = None) -> Receipt:
        """See `ThreadRunStore.delete_messages`."""
        return await self._edit(edits.delete_messages(thread_id, message_ids))

    async def set_parent(self, thread_id: str, parent_thread_id: str | None) -> Receipt:
        """See `ThreadRunStore.set_parent`."""
        return await self._change(lineage.new_parent(thread_id, parent_thread_id))

    async def delete_thread(self, thread_id: str, *, children: Children = Children.REJECT) -> Receipt:
        """See `ThreadRunStore.delete_thread`."""
        return await self._change(lineage.deletion(thread_id, children))
