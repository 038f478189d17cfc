"""One group on its way: it is sent behind the last group that was seen, until its outcome is known.

If no answer comes, what follows the predecessor decides. If it is ours, it is stored. If it is another's, ours can
never be stored. If nothing follows, the same bytes go out again with the same expectation, so at most one copy is
stored.
"""

from __future__ import annotations

import asyncio

from tenacity import AsyncRetrying, retry_if_result, wait_random_exponential

from bufstore import elapsed
from bufstore.buffer.groups.group import Draft
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.groups.others import Others
from bufstore.buffer.groups.stream import GroupsInStream
from bufstore.buffer.groups.tail import Tail, Written
from bufstore.errors import BufstoreError, LogUnavailable
from bufstore.jetstream.errors import MessageTooLarge
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.log_lines import LogLines

_log = LogLines(__name__)

#: Longest pause between two tries while the outcome of a group is not known.
_PAUSE_MAX_S = 0.2
_PARTS_OLD = "the parts of a large entry were stored too long ago"


def parts_too_old(stream: GroupsInStream, parts_at: float) -> LogUnavailable | None:
    """The error for what names parts of which the first was stored at `parts_at`, if they may be gone; else None."""
    # For so long, parts certainly stay in the log while no group names them.
    return LogUnavailable(_PARTS_OLD) if elapsed.now_s() - parts_at > stream.windows.rely_s / 2 else None


class Sending:
    """See the module's text."""

    def __init__(
        self,
        draft: Draft,
        heads: Heads,
        tail: Tail,
        others: Others,
        stream: GroupsInStream,
        subject: str,
        purged: int,
        parts_at: float,
        timeout_s: float,
    ) -> None:
        """`purged`: the place below which the log may be purged. `parts_at`: when the first part was stored that the
        group names. `timeout_s`: the longest wait for one answer.
        """
        self._draft, self._heads, self._tail, self._others, self._stream = draft, heads, tail, others, stream
        self._parts_at, self._timeout_s = parts_at, timeout_s
        self._before, self._before_id, self._purged = heads.seen, heads.seen_id, max(purged, heads.purged)
        header = draft.header(self._before_id, self._before, self._purged)
        self.message = Outgoing(subject, draft.body, header, self._before)
        #: The loop's time when the group was sent last.
        self.sent_at = 0.0
        #: How often the group was sent without an answer.
        self.unanswered = 0

    def written(self, seq: int) -> Written:
        """The group, once it is stored with this sequence."""
        message = StoredMessage(self.message.subject, seq, self.message.header, self._draft.body)
        return Written(self._draft.stored(seq, self._before_id, self._before, self._purged), message)

    def took(self) -> None:
        """Note that the server has answered."""
        self._others.took(asyncio.get_running_loop().time() - self.sent_at)

    async def outcome(self, first: int | Exception | None = None) -> Written | Exception:
        """Store the group behind the last one. `first`: how the first try has ended, if it was made.

        Returns Conflict when another group stands there, which this process has then seen; another error when nothing
        is stored, or AppendUnknown.
        """
        # Almost always the first try succeeds, and preparing retries costs more than drafting a small group.
        outcome = await self._once(first)
        if outcome is None:
            pause = wait_random_exponential(multiplier=0.005, max=_PAUSE_MAX_S)
            outcome = await AsyncRetrying(wait=pause, retry=retry_if_result(_is_none))(self._once)
            assert outcome is not None
        return outcome

    async def _once(self, tried: int | Exception | None = None) -> Written | Exception | None:
        """Try once. None: look again."""
        refused = too_large = False
        try:
            if tried is None:
                if not self._tail.last_seen.confirmed:
                    await self._tail.confirm()
                    if self._is_gone():
                        return self._gone()
                if old := parts_too_old(self._stream, self._parts_at):  # though the log may still take it
                    return AppendUnknown("its parts may be gone") if self.unanswered else old
                self.sent_at = asyncio.get_running_loop().time()
                tried = await self._stream.publish(self.message, self._timeout_s)
            elif isinstance(tried, Exception):
                try:
                    raise tried
                finally:
                    del tried  # its traceback leads here, and would keep the group until the collector runs
            self.took()
            return self.written(tried)
        except Conflict as e:
            self.took()
            if not self.unanswered and self._heads.seen > self._before:  # it was heard before the refusal
                return e
            refused = True  # else the first copy of our own group may have been faster
        except AppendUnknown:
            self.unanswered += 1
        except BufstoreError as e:
            if not self.unanswered:
                return e
            too_large = isinstance(e, MessageTooLarge)
        try:
            await self._others.were_first()
            found = await self._tail.first_behind(self._before)
            if found is None and refused and not self._is_gone():
                await self._tail.confirm()
        except (BufstoreError, AppendUnknown) as e:
            _log.info("the outcome of a group stays unknown: %s", e, extra={"action": "append_unknown"})
            return None
        if found is None and self._is_gone():
            return self._gone()
        if found is None and too_large:  # an earlier copy was not: it may still come, but this one never can
            return AppendUnknown("the server now accepts only smaller messages than when the group was first sent")
        if found is None:
            return AppendUnknown("its parts may be gone") if parts_too_old(self._stream, self._parts_at) else None
        if found.id == self._draft.id:
            return self.written(found.seq)
        if found.before != self._before and self.unanswered:
            return AppendUnknown("whatever followed the group's predecessor has been purged")
        return Conflict("another group was stored first")

    def _is_gone(self) -> bool:
        """Whether it was found meanwhile that the log does not have what the group is to stand behind."""
        seen = self._heads.seen
        return seen < self._before or (seen == self._before and self._heads.seen_id != self._before_id)

    def _gone(self) -> Exception:
        reason = "the group's predecessor is not in the log"
        return AppendUnknown(reason) if self.unanswered else Conflict(reason)


def _is_none(outcome: object) -> bool:
    return outcome is None
