"""Erases what the log still holds of threads: whole groups, after readers are told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from bufstore.buffer.groups.group import Group, decode_entry, group_in, hash_of
from bufstore.buffer.groups.oversize import parsed
from bufstore.buffer.groups.stream import READ_S, GroupsInStream, last_on, messages_on
from bufstore.buffer.places import first_place, last_place, number_of
from bufstore.buffer.ports.log import Remains
from bufstore.buffer.subjects import Subjects
from bufstore.errors import LogUnavailable, MalformedEntry
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage

_ERASED_AT_ONCE = 16
#: How often an erasure is told anew because others erase at the same time.
_TELL_TRIES = 10


class Erasing:
    """Carries out erasures for `bufstore.buffer.groups.log.GroupLog`."""

    def __init__(
        self,
        stream: GroupsInStream,
        subjects: Subjects,
        floor: Callable[[], Awaitable[int]],
    ) -> None:
        """`floor`: the place below which everything is settled."""
        self._stream, self._subjects, self._floor = stream, subjects, floor

    async def remains(self, below: Mapping[str, int]) -> Remains:
        """See `bufstore.buffer.ports.log.Log`."""
        wanted = {hash_of(thread_id): place_ for thread_id, place_ in below.items()}
        entries, parts, groups, last = 0, set[int](), list[int](), 0
        async for message in messages_on(self._stream, self._subjects.groups):
            last, group = message.seq, group_in(message)
            if group is None:
                continue
            found = [at for at, record in group.places() if at < wanted.get(record.hash, 0)]
            entries += len(found)
            if found:
                groups.append(group.seq)
                parts.update(*(_parts_of(group, number_of(at), message.body) for at in found))
        if not groups:
            return Remains(0, (), (), 0, False)
        return Remains(entries, groups, sorted(parts), first_place(groups[-1] + 1), groups[-1] == last)

    async def erase(self, remains: Remains) -> None:
        """See `bufstore.buffer.ports.log.Log`."""
        if await self._floor() < remains.settled_from:
            raise LogUnavailable("what is to be erased may still be needed")
        # The parts of an entry first: after an interrupted erasure, the group is left to name them.
        for messages in (remains.parts, remains.groups):
            for i in range(0, len(messages), _ERASED_AT_ONCE):
                some = messages[i : i + _ERASED_AT_ONCE]
                await self._tell(some)
                await asyncio.gather(*map(self._stream.overwrite, some))

    async def _tell(self, seqs: Sequence[int]) -> None:
        """Tell readers, which take a hole for a loss otherwise. Each message also names the highest ever erased."""
        for _ in range(_TELL_TRIES):
            before = await last_on(self._stream, self._subjects.erased)
            highest = max(_erased_in(before), default=0) if before is not None else 0
            numbers = sorted({*seqs, highest} - {0})
            body = ",".join(map(str, numbers)).encode()
            message = Outgoing(self._subjects.erased, body, None, before.seq if before is not None else 0)
            try:
                await self._stream.publish(message, READ_S)
            except Conflict:
                continue
            except AppendUnknown as e:
                raise LogUnavailable(f"the erasure was interrupted and is incomplete; erase again: {e}") from None
            return
        raise LogUnavailable("others erase at the same time; erase again")

    async def erased(self) -> int:
        """The place up to which groups may be erased; 0: none was."""
        found = await last_on(self._stream, self._subjects.erased)
        return last_place(max(_erased_in(found))) if found is not None and _erased_in(found) else 0


def _erased_in(message: StoredMessage) -> list[int]:
    """The sequences that a message names as erased; none in a foreign one."""
    numbers = message.body.split(b",")
    return [int(number) for number in numbers] if all(number.isdigit() for number in numbers) else []


def _parts_of(group: Group, number: int, body: bytes) -> list[int]:
    """The sequences of the parts that an entry consists of; none for one that is whole, or damaged."""
    try:
        entry = decode_entry(group, number, body)
        return parsed(entry.payload).parts if entry.elsewhere else []
    except MalformedEntry:
        return []
