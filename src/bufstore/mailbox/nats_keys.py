"""Where everything of a mailbox lives in its bucket, and how it is encoded.

    t.<thread>                        the thread's state, with the dispatch that is claimed: what steps compare and set
    q.<thread>.<priority>.<dispatch>  a dispatch that could be claimed when it was enqueued; never rewritten, so that
                                      the order of the stream is the order of the queue
    r.<thread>.<dispatch>             a dispatch that was delayed, or handed back
    p.<thread>.<priority>             look at the queue of this priority, too; written with each enqueue to it, so that
                                      it is not forgotten while somebody relies on it
    x.<thread>.<dispatch>             a finished one; the order of the stream is the order in which they finished
    k.<thread>.<key>                  the id of the dispatch that has a dedupe key
    i.<thread>.<dispatch>             an id that the caller chose
    s.<thread>                        a signal: look at the thread
    l.<slot>.<thread>                 look at the thread's lease in this slot of time
    d.<slot>.<thread>.<dispatch>      signal the thread in this slot of time, when this dispatch is due
    sweep                             the present sweeper

A key is removed by an empty message that replaces it, in the same batch as the change that it is about. If nats-server
2.15 is killed after the empty message is gone too, it may bring the replaced message back: it keeps no record of a
message that was replaced, and goes by what it finds. So the presence of a message under q, r, p, l, d, s, k or i
proves nothing: a claim requires in its batch that ``x`` knows no end of the dispatch. All else goes by ``t``, whose
removal stays for long. ``x`` is written once and then purged, and the server keeps a record of a purge.

Every key begins with what it is read by: a queue, a slot of time, a thread. Ids are tokens
(`bufstore.jetstream.subject_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import Outgoing, StoredMessage
from bufstore.jetstream.subject_tokens import token, untoken
from bufstore.mailbox.decisions import Step
from bufstore.mailbox.model import DEFAULT_PRIORITY, Dispatch, MailboxThread, numbered

#: The length of a slot of time: everything that becomes due in a slot is looked at together.
SLOT_MS = 5000
#: How long a removed key stays as an empty message: the shortest time to live there is.
GONE_S = 1
#: The same for the key of a thread, whose earlier state must not come back.
THREAD_GONE_S = 7 * 24 * 3600

#: The slot and time of a message that is no entry of ours: it never comes due.
_NEVER = 1 << 62

_encode = msgspec.msgpack.Encoder().encode
_dispatch = msgspec.msgpack.Decoder(Dispatch).decode
_thread = msgspec.msgpack.Decoder(MailboxThread).decode


class Entry(NamedTuple):
    """A message under ``l`` or ``d``."""

    slot: int
    thread_id: str
    at_ms: int


class Keys:
    """The subjects of one bucket, and the messages on them."""

    def __init__(self, bucket: str) -> None:
        self.prefix = f"$KV.{bucket}."
        self.stream = f"KV_{bucket}"

    def of(self, kind: str, *words: str) -> str:
        """Return the subject of these words, which are tokens, numbers or wildcards."""
        return f"{self.prefix}{kind}.{'.'.join(words)}"

    def thread(self, thread_id: str) -> str:
        return self.of("t", token(thread_id))

    def signal(self, thread_id: str) -> Outgoing:
        return Outgoing(self.of("s", token(thread_id)), b"")

    def places(self, thread: str = "*") -> list[str]:
        """Return filters of a thread's dispatches (`thread`: a token), or of all. Of several places the last counts."""
        return [self.of("q", thread, "*", "*"), self.of("r", thread, "*"), self.of("x", thread, "*")]

    def by_id(self, thread_id: str, dispatch_id: str) -> list[str]:
        """Return the subject of the thread, and the filters of the places where a dispatch of it may be."""
        t, d = token(thread_id), token(dispatch_id)
        return [self.thread(thread_id), self.of("x", t, d), self.of("r", t, d), self.of("q", t, "*", d)]

    def is_returned(self, d: Dispatch) -> bool:
        """True when a queued dispatch is under ``r``."""
        return d.attempts > 0 or d.available_at_ms > d.created_at_ms

    def queued(self, d: Dispatch) -> str:
        if self.is_returned(d):
            return self.returned(d)
        return self.of("q", token(d.thread_id), str(d.priority), token(d.dispatch_id))

    def returned(self, d: Dispatch) -> str:
        return self.of("r", token(d.thread_id), token(d.dispatch_id))

    def ended(self, d: Dispatch) -> str:
        return self.of("x", token(d.thread_id), token(d.dispatch_id))

    def gone(self, subject: str, expected: int | None = None, *, ttl_s: int = GONE_S) -> Outgoing:
        """Return the message that removes a key."""
        return Outgoing(subject, b"", expected=expected, ttl_s=ttl_s)

    def kind(self, subject: str) -> str:
        """Return the first word of a key."""
        return subject.removeprefix(self.prefix).partition(".")[0]

    def priorities(self, found: Iterable[StoredMessage]) -> list[int]:
        """Return the priorities that those of these messages name that are under ``p``."""
        words = [m.subject.removeprefix(self.prefix).split(".") for m in found if m.body]
        return [int(word[2]) for word in words if word[0] == "p" and word[2].isdecimal()]

    def entry(self, found: StoredMessage) -> Entry:
        """Return the entry of a message under ``l`` or ``d``; a message that is not ours never comes due."""
        try:
            slot, thread, *_ = found.subject.removeprefix(self.prefix).split(".")[1:]
            return Entry(int(slot), untoken(thread), int(found.body))
        except (ValueError, MalformedEntry):
            return Entry(_NEVER, "", _NEVER)

    def state(self, found: StoredMessage | None, thread_id: str) -> MailboxThread:
        """Return the thread's state; an empty one if the thread has none, or none any longer."""
        if found is None:
            return MailboxThread(thread_id=thread_id)
        if not found.body:
            return MailboxThread(thread_id=thread_id, version=found.seq)
        return numbered(_decoded(_thread, found), found.seq)

    def dispatch(self, found: StoredMessage) -> Dispatch:
        """Return the dispatch of a message under q, r or x."""
        d: Dispatch = _decoded(_dispatch, found)
        return replace(d, position=found.seq) if d.position == 0 else d

    def enqueued(self, draft: Dispatch, state: MailboxThread, keys: list[Outgoing]) -> tuple[Dispatch, list[Outgoing]]:
        """Return the dispatch (its position still to come) and the messages that enqueue it; its own is the last."""
        d = replace(draft, epoch=state.epoch, position=0)
        if self.is_returned(d):
            announced = [self._delayed(d)]
        else:
            announced = [self.signal(d.thread_id)]
            if d.priority != DEFAULT_PRIORITY:
                announced.append(Outgoing(self.of("p", token(d.thread_id), str(d.priority)), b"-"))
        return d, [*keys, *announced, Outgoing(self.queued(d), _encode(d), expected=0)]

    def step(self, before: MailboxThread, step: Step, now_ms: int) -> list[Outgoing]:
        """Return the messages of a step, the thread's own last.

        Only steps rewrite what is under ``r``, so the number of the thread's state guards it.
        """
        messages: list[Outgoing] = []
        for move in step.moves:
            if (was := move.before) is not None:
                messages.append(self.gone(self.queued(was), None if self.is_returned(was) else was.position))
                if was.available_at_ms > now_ms:
                    messages.append(self.gone(self._delayed(was).subject))
            if (after := move.after) is None:
                continue
            if after.status.finished:
                messages.append(Outgoing(self.ended(after), _encode(after), expected=0))
            else:
                messages.append(Outgoing(self.queued(after), _encode(after)))
                if after.available_at_ms > now_ms:
                    messages.append(self._delayed(after))
        if step.wake:
            messages.append(self.signal(before.thread_id))
        active, until = step.thread.active, before.active.lease_until_ms if before.active is not None else None
        if active is not None and active.lease_until_ms != until:
            due = self._entry(active.lease_until_ms or 0, "l", token(before.thread_id))
            # A claim requires that the dispatch has not ended already.
            claimed = before.active is None
            messages.append(replace(due, expected=0, expected_of=self.ended(active)) if claimed else due)
        return [*messages, self.written(step.thread, before.version)]

    def written(self, state: MailboxThread, expected: int) -> Outgoing:
        """Return the message that makes this the thread's state."""
        return Outgoing(self.thread(state.thread_id), _encode(state), expected=expected)

    def _delayed(self, d: Dispatch) -> Outgoing:
        return self._entry(d.available_at_ms, "d", token(d.thread_id), token(d.dispatch_id))

    def _entry(self, at_ms: int, kind: str, *words: str) -> Outgoing:
        return Outgoing(self.of(kind, str(at_ms // SLOT_MS), *words), str(at_ms).encode())


def _decoded(decode: Any, found: StoredMessage) -> Any:
    try:
        return decode(found.body)
    except msgspec.MsgspecError as e:
        raise MalformedEntry(f"what is stored at {found.subject[:200]} does not belong to a mailbox: {e}") from None
