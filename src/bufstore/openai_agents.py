"""A session of the OpenAI Agents SDK whose items are a thread of a `BufferedThreadStore`.

    session = BufferedSession("conversation-1", store)
    await Runner.run(agent, "Where is my bag?", session=session)

Any number of processes may use one session at once. Needs the extra ``bufstore[openai-agents]``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from bufstore.errors import AlreadyExists, InvalidRecord, NotFound, OutcomeUnknown
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.model import Run, RunStatus
from bufstore.types import Consistency, check_id

if TYPE_CHECKING:
    from agents.items import TResponseInputItem
    from agents.memory import SessionSettings

__all__ = ["BufferedSession"]


class BufferedSession:
    """The SDK's `Session` on a thread of a store, with the store's guarantees and errors.

    Each item is a message with an id of its own, because the SDK's items have no id, or one that repeats. While
    Postgres is away, sessions that the log still shows go on; none can begin or be cleared.
    """

    def __init__(
        self, session_id: str, store: BufferedThreadStore, *, session_settings: SessionSettings | None = None
    ) -> None:
        """`session_id`: also the thread's id. `session_settings`: the SDK's own."""
        self.session_id, self.session_settings = check_id(session_id, "session_id"), session_settings
        self._store = store

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Return the items, oldest first; with `limit`, that many of the last ones."""
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        items: list[Any] = [message["item"] for message in await self._messages()]
        return items if limit is None else items[-limit:] if limit > 0 else []

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Append all items or none. After a lost answer, append them again, unless they are there.

        Raises InvalidRecord for anything but a list of items, and what `append_messages` of the store raises.
        """
        messages = _messages_of(items)
        try:
            if items:
                await self._store.append_messages(self.session_id, messages)
        except OutcomeUnknown:
            with suppress(AlreadyExists):
                await self._store.append_messages(self.session_id, messages)

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove and return the last item, or None. Two callers get the same item only after a lost answer."""
        while messages := await self._messages():
            last = [messages[-1]["id"]]
            try:
                await self._store.delete_messages(self.session_id, last)
            except NotFound:
                continue  # another caller was faster
            except OutcomeUnknown:
                with suppress(NotFound):  # now it is gone, by this call or another's
                    await self._store.delete_messages(self.session_id, last)
            return messages[-1]["item"]  # type: ignore[no-any-return]
        return None

    async def replace_items(self, items: Sequence[TResponseInputItem]) -> None:
        """Make `items` the whole list, in one entry."""
        # A hash: a session id of the largest size would leave no room for the prefix.
        run_id = f"replaced/{blake2b(self.session_id.encode(), digest_size=16).hexdigest()}"
        run = Run(run_id=run_id, thread_id=self.session_id, status=RunStatus.DONE)
        await self._store.checkpoint(self.session_id, _messages_of(items), run)

    async def _atomic_replace_items(self, items: list[TResponseInputItem]) -> bool:
        """Called by the SDK's compaction, so that a crash leaves the old or the new list. False: do it otherwise."""
        if type(self) is not BufferedSession:
            return False  # a subclass may store items in another form
        await self.replace_items(items)
        return True

    async def clear_session(self) -> None:
        """Delete all items, and with them the session's thread. Raises LineageError if the app gave it children."""
        with suppress(NotFound):
            await self._store.delete_thread(self.session_id)

    async def _messages(self) -> list[Any]:
        # Whatever the store's own level is: a caller that pops must see which items others have popped.
        found = await self._store.load_messages(self.session_id, consistency=Consistency.READ_YOUR_WRITES) or []
        if not all(isinstance(message, dict) and {"id", "item"} <= message.keys() for message in found):
            raise InvalidRecord(f"thread {self.session_id!r} has messages that no session wrote")
        return found


def _messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    if isinstance(items, (str, bytes, bytearray, Mapping)) or not isinstance(items, Iterable):
        raise InvalidRecord(f"items must be a list of items, not {type(items).__name__}")
    return [{"id": secrets.token_hex(8), "item": item} for item in items]
