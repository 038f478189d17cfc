"""A worker in a process of its own, for tests that pause or kill it.

Takes one item, says so on standard output, waits for a line on standard input, writes to the sink with its token, and
prints whether the sink accepted it, and whether the token was still valid at the check and at the end.
"""

from __future__ import annotations

import asyncio
import sys

from bufstore.errors import TokenLost
from bufstore.tokens import ExclusiveWork, TokensConfig
from token_sink import write


async def main(nats: str, name: str, ttl_s: float, dsn: str, table: str) -> None:
    """Run the worker as the module's text says."""
    async with await ExclusiveWork.open(nats, TokensConfig(name=name, ttl_s=ttl_s)) as work:
        task = await work.take(30)
        assert task is not None
        print("took", task.token, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        accepted = await write(dsn, table, task.key, task.token, "the process")
        try:
            task.check()
            checked = "ours"
        except TokenLost:
            checked = "lost"
        try:
            await task.done()
            print("sink", accepted, checked, "done", flush=True)
        except TokenLost:
            print("sink", accepted, checked, "lost", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5]))
