"""What one pass of a sweeper takes for lost, when the pass itself takes long."""

from __future__ import annotations

from bufstore.mailbox import MailboxConfig, MemoryMailbox, Sweeper
from bufstore.mailbox.memory import MemoryBackend
from bufstore.mailbox.store import MailboxStore


class _Slow(MemoryBackend):
    """A backend whose look for what is due takes ten seconds."""

    at_s = 1_000_000.0
    lost_before_s: float | None = None

    def __init__(self) -> None:
        super().__init__(MemoryMailbox(), lambda: self.at_s, 1.0)

    async def signal_due(self, now_ms: int, limit: int) -> int:
        found = await super().signal_due(now_ms, limit)
        self.at_s += 10
        return found

    async def signal_lost(self, due_ms: int, limit: int) -> int:
        self.lost_before_s = due_ms / 1000
        return await super().signal_lost(due_ms, limit)


async def test_what_falls_due_during_a_pass_is_not_taken_for_lost() -> None:
    """No pass has looked for it yet; on NATS it would be signalled, and a warning logged, although nothing is wrong."""
    backend = _Slow()
    began_s = backend.at_s
    assert await Sweeper(MailboxStore(backend, MailboxConfig(sweep_interval_s=1.0))).sweep()
    assert backend.lost_before_s == began_s - 2.0
