"""What a wrapped store answers: in the time of a read, and with errors that end no more than the read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from bufstore.errors import StoreUnavailable
from bufstore.tasks import own_cancels_only

T = TypeVar("T")


async def answered(answer: Awaitable[T], timeout_s: float) -> T:
    """Return the answer. Raises StoreUnavailable after `timeout_s` seconds, and what an app's own store raises.

    If the store awaits something that is cancelled, but not by its caller, raises StrayCancelledError.
    """
    try:
        with own_cancels_only():
            async with asyncio.timeout(timeout_s):
                return await answer
    except TimeoutError:
        raise StoreUnavailable(f"the store did not answer within {timeout_s:g} s") from None
