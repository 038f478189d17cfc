"""What is held for a time: renewed while it is used, and found lost by our own clock when it was not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bufstore.tasks import end, spawn


class Holding:
    """Something that is ours for `for_s` from each confirmed renewal on. Whoever has it closes it."""

    def __init__(self, for_s: float, began: float, lost: Callable[[], object]) -> None:
        """`began`: it was taken not before then, by the loop's clock. `lost` is called when it was not renewed."""
        self._for_s, self._lost = for_s, lost
        self._timer: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.confirm(began)

    def confirm(self, began: float) -> None:
        """It was renewed, not before `began`."""
        self.stop()
        self.began, self.until = began, began + self._for_s
        # Not when a renewal fails: its answer may be out for longer than there is time.
        self._timer = asyncio.get_running_loop().call_at(self.until, self._run_out)

    def stop(self) -> None:
        """Nothing is held any more, and nothing will be found lost."""
        if self._timer is not None:
            self._timer.cancel()

    def keep(self, renew: Callable[[], Awaitable[bool]], every_s: float) -> None:
        """Call `renew`, which confirms, so long after each confirmation, and again soon; until it says no."""
        self._renewing = spawn(self._renew(renew, every_s), name="bufstore-renew")

    async def _renew(self, renew: Callable[[], Awaitable[bool]], every_s: float) -> None:
        held = True
        while held:
            due_s = self.began + every_s - asyncio.get_running_loop().time()
            await asyncio.sleep(max(due_s, min(every_s, self._for_s / 20)))
            held = await renew()
        self.stop()

    def _run_out(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        self._lost()

    async def aclose(self) -> None:
        """Renew it no more. Its time goes on, until `stop`."""
        renewing, self._renewing = self._renewing, None
        await end(renewing)
