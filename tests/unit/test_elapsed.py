"""The time that passes outside the process."""

from __future__ import annotations

import sys
import time

import pytest

from bufstore import elapsed
from bufstore.mailbox import MailboxConfig, MemoryMailboxStore
from unit.fake_log import run


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long it was suspended")
@pytest.mark.parametrize("paused_at", [None, 1, 2])
def test_a_pause_while_the_clocks_are_read_is_no_time_that_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, paused_at: int | None
) -> None:
    """The machine was suspended for five seconds; the process stands still before the second or third reading."""
    now, reading = 100.0, 0

    def clock(which: int) -> float:
        nonlocal now, reading
        now += 2.0 if reading == paused_at else 1e-7
        reading += 1
        return now + (5.0 if which == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", clock)
    assert elapsed.suspended_s() == pytest.approx(5.0, abs=1e-3)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long it was suspended")
def test_a_claim_after_a_suspension_ends_a_lease_later(monkeypatch: pytest.MonkeyPatch) -> None:
    suspended, clock = 0.0, time.clock_gettime

    def with_suspension(which: int) -> float:
        return clock(which) + (suspended if which == time.CLOCK_BOOTTIME else 0.0)

    monkeypatch.setattr(time, "clock_gettime", with_suspension)

    async def main() -> None:
        nonlocal suspended
        async with MemoryMailboxStore(config=MailboxConfig(lease_s=30)) as store:
            began_ms = store.backend.now_ms()
            suspended = 3600.0
            await store.enqueue("t")
            claim = await store.claim("t", "w")
            assert claim is not None
            assert claim.lease_until_ms - began_ms == pytest.approx(3_630_000, abs=5000)

    run(main())
