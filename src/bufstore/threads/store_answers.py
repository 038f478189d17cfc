"""What a wrapped store answers, within a read's time; its errors end only the read."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import TypeVar

from bufstore.errors import StoreUnavailable
from bufstore.tasks import own_cancels_only

T = TypeVar("T")


async def answered(store: object, answer: Awaitable[T], timeout_s: float) -> T:
    """Return the store's answer. Raises what the store raises.

    Raises StoreUnavailable after `timeout_s` seconds, unless the store is one of ours, which bounds its calls itself;
    StrayCancelledError if an app's own store awaits something that is cancelled, but not by its caller.
    """
    ours = inspect.getattr_static(store, "behind", None) is not None
    try:
        with own_cancels_only():
            async with asyncio.timeout(None if ours else timeout_s) as bound:
                return await answer
    except TimeoutError as e:
        if not bound.expired():
            raise StoreUnavailable("the store's own call timed out") from e
        raise StoreUnavailable(f"the store did not answer within {timeout_s:g} s") from None
