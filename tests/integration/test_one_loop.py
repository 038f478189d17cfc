"""No call from another event loop than a store's own hangs, or breaks the store for those who use it right."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from bufstore import BufferedThreadStore, Consistency, ThreadMetadata
from conftest import Deployment
from helpers import elsewhere, run_of

_VALUES: dict[str, Any] = {
    "thread_id": "t",
    "parent_thread_id": None,
    "run_id": "r",
    "run": run_of("t"),
    "message_id": "m",
    "messages": [1],
    "delta": [1],
    "message_ids": None,
    "first": 1,
    "last": 2,
    "state": {},
    "metadata": ThreadMetadata(),
}


async def test_each_call_is_refused_and_the_store_goes_on(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await store.checkpoint("t", [1], run_of("t"))
        await store.force_flush("t")
        calls: list[Any] = [partial(store.bulk.learn_new, ["new", "newer"])]
        for name, method in inspect.getmembers(BufferedThreadStore, inspect.iscoroutinefunction):
            if not name.startswith("_") and name != "open":
                values = [_VALUES[p.name] for p in list(inspect.signature(method).parameters.values())[1:] if _given(p)]
                calls.append(partial(getattr(store, name), *values))
        for call in calls:
            await elsewhere(call)
        assert len(calls) > 25
        await store.checkpoint_append("t", [2], run_of("t"))
        assert await store.load_messages("t") == [1, 2]
        await store.delete_messages("t")
        await store.force_flush_all()
        assert await store.load_messages("t", consistency=Consistency.EVENTUAL) == []
        assert (await store.health()).log == ""


def _given(parameter: inspect.Parameter) -> bool:
    required = parameter.default is inspect.Parameter.empty
    return parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and required
