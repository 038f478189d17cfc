"""The reported outcome of a step whose answer was lost."""

from __future__ import annotations

import re
import time

import pytest

from bufstore import BufstoreError, LogFull, LogUnavailable, TooLarge
from bufstore.jetstream.messages import AppendUnknown
from bufstore.mailbox import Dispatch, MailboxConfig, MemoryMailbox, StepUnknown
from bufstore.mailbox.memory import MemoryBackend
from bufstore.mailbox.store import MailboxStore


class _Failing(MemoryBackend):
    """A backend that stores nothing, and fails with these reasons, one after the other."""

    reasons: list[Exception]

    async def add(self, draft: Dispatch, *, own_id: bool, now_ms: int) -> Dispatch:
        raise self.reasons.pop(0) if len(self.reasons) > 1 else self.reasons[0]


@pytest.mark.parametrize("last", [LogFull("full"), TooLarge(2, 1), LogUnavailable("away")])
async def test_a_refusal_after_a_lost_answer_does_not_say_that_nothing_was_done(last: BufstoreError) -> None:
    backend = _Failing(MemoryMailbox(), time.time, 1.0)
    store = MailboxStore(backend, MailboxConfig(timeout_s=0.05))
    backend.reasons = [AppendUnknown("no answer"), last]  # the first try may still arrive
    with pytest.raises(StepUnknown, match=re.escape(str(last))):
        await store.enqueue("t")
    backend.reasons = [last]
    with pytest.raises(type(last)):
        await store.enqueue("t")
