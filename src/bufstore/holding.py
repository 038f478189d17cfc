"""Something that is held for a time: renewed while it is used; our own clock finds it lost if it was not renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, retry_if_exception_type, retry_if_not_exception_type, wait_random_exponential

from bufstore import elapsed
from bufstore.errors import Closed, ConfigError, LogFull, StepUnknown, StoreMisconfigured, Unavailable
from bufstore.tasks import end, spawn


class Holding:
    """Something that is ours for `for_s` seconds from each confirmed renewal on. The user of a Holding closes it.

    All times are those of `bufstore.elapsed`: others take it also while this machine is suspended.
    """

    def __init__(self, for_s: float, began: float, lost: Callable[[], object]) -> None:
        """`began`: when the taking began. `lost` is called when no renewal came in time."""
        self._for_s, self._lost = for_s, lost
        self._timer: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.confirm(began)

    def confirm(self, began: float) -> None:
        """Note a renewal that was begun at `began`."""
        self.stop()
        self.began, self.until = began, began + self._for_s
        # A timer decides, not a failed renewal: a renewal's answer may take longer than the time that is left.
        self._timer = asyncio.get_running_loop().call_later(self.until - elapsed.now_s(), self._run_out)

    @property
    def is_over(self) -> bool:
        """Whether its time is over, though the timer, which stands still in a suspension, may not have said so yet."""
        return elapsed.now_s() >= self.until

    def stop(self) -> None:
        """Hold it no more: from now on it is not found lost."""
        if self._timer is not None:
            self._timer.cancel()

    def keep(self, renew: Callable[[], Awaitable[bool]], every_s: float) -> None:
        """Call `renew`, which confirms, until it says no: `every_s` after each confirmation, soon again without one."""
        self._renewing = spawn(self._renew(renew, every_s), name="bufstore-renew")

    async def _renew(self, renew: Callable[[], Awaitable[bool]], every_s: float) -> None:
        held = True
        while held:
            due_s = self.began + every_s - elapsed.now_s()
            await asyncio.sleep(max(due_s, min(every_s, self._for_s / 20)))
            held = await renew()
        self.stop()

    def _run_out(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        self._lost()

    async def aclose(self) -> None:
        """End the renewals. Its time runs on until `stop`."""
        renewing, self._renewing = self._renewing, None
        await end(renewing)


def while_held(over: Callable[[float], bool]) -> AsyncRetrying:
    """Return what tries the end of work again while the store is away or refuses it, until what is held is `over`.

    What was done would be done again otherwise. `over` is told for how many seconds it has been tried.
    """
    return AsyncRetrying(
        retry=retry_if_exception_type((Unavailable, StepUnknown, LogFull, ConfigError, StoreMisconfigured))
        & retry_if_not_exception_type(Closed),
        wait=wait_random_exponential(multiplier=0.1, max=1.0),
        stop=lambda tried: over(tried.seconds_since_start or 0.0),
        reraise=True,
    )
