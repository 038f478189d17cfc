"""How long the sink has waited for servers that are away, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from bufstore import BufstoreError, LogFull, LogUnavailable, ReadNotFresh, StoreUnavailable
from bufstore.jetstream.errors import StorageFull
from bufstore.spark.outage import GaveUp, Patience
from unit.fake_log import run


def test_a_try_that_takes_long_before_it_fails_was_waited_for() -> None:
    """A worker process that starts in an outage, for example, finds out after half a minute."""

    async def main() -> None:
        patience = Patience(3600.0, "a batch", numbered=True)
        failures = iter([30.0, 0.0])

        async def work() -> str:
            for takes in failures:
                await asyncio.sleep(takes)
                raise StoreUnavailable("away")
            return "through"

        began = asyncio.get_running_loop().time()
        assert await patience.until_through(work) == "through"
        passed = asyncio.get_running_loop().time() - began
        assert passed >= 30.0
        assert patience.waited_s == pytest.approx(passed)

    run(main())


def test_what_got_through_meanwhile_was_not_waited_for() -> None:
    """Some rows are written while others fail: the time starts with the last one that was written."""

    async def main() -> None:
        patience = Patience(25.0, "a batch", numbered=True)
        tries = iter(range(3))

        async def work() -> None:
            await asyncio.sleep(20.0)
            patience.progressed()
            await asyncio.sleep(5.0)
            if next(tries) < 2:
                raise LogFull("full")

        await patience.until_through(work)
        # Each failed try counts from its last progress: its end, the pause, and the next try until its progress.
        assert 50.0 <= patience.waited_s < 55.0

    run(main())


def test_it_ends_when_nothing_got_through_for_so_long() -> None:
    async def main() -> None:
        patience = Patience(10.0, "a batch", numbered=True)

        async def work() -> None:
            await asyncio.sleep(4.0)
            raise StoreUnavailable("away")

        began = asyncio.get_running_loop().time()
        with pytest.raises(StoreUnavailable) as over:
            await patience.until_through(work)
        assert 10.0 <= asyncio.get_running_loop().time() - began < 10.0 + 4.0 + 5.0
        assert over.value.__notes__ == [
            f"waited {asyncio.get_running_loop().time() - began:.0f} s (outage_timeout_s is 10 s)"
        ]

    run(main())


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (LogFull("full"), LogFull),
        (StorageFull("no room"), LogFull),
        (StoreUnavailable("away"), StoreUnavailable),
        (ReadNotFresh("late"), LogUnavailable),
    ],
    ids=lambda e: type(e).__name__ if isinstance(e, BufstoreError) else e.__name__,
)
def test_the_driver_is_told_by_its_kind_what_a_task_waited_for(error: BufstoreError, told: type[BufstoreError]) -> None:
    raised = GaveUp.of(error).as_error()
    assert type(raised) is told
    assert str(error) in str(raised)
