"""*once*: one save per run, at its end: the least load on the database, but a crash loses the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.baselines.unbuffered import Unbuffered
from bufstore import Run


class Once(Unbuffered):
    """The same tables as *unbuffered*, one transaction per conversation."""

    async def converse(self, thread: str, messages: Sequence[Any]) -> None:
        """Save the whole conversation at its end."""
        await self.store.checkpoint(thread, messages, Run(run_id=f"run-of-{thread}", thread_id=thread))
