"""*once*: saving once per run, at its end: the least load on the database, and a crash loses the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.baselines.unbuffered import Unbuffered
from bufstore import Run


class Once(Unbuffered):
    """The same tables as *unbuffered*, one transaction per conversation."""

    async def converse(self, thread: str, messages: Sequence[Any]) -> None:
        """The conversation happens in memory, then all of it is saved."""
        await self.store.checkpoint(thread, messages, Run(run_id=f"run-of-{thread}", thread_id=thread))
