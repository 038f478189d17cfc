"""What `bufstore doctor` makes of the errors that it meets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from bufstore.cli.doctor import nats
from bufstore.cli.doctor.diagnosis import Level, Notes
from bufstore.config import LogConfig
from bufstore.jetstream.errors import ApiError, ConsumerMissing, consumer_error
from bufstore.jetstream.messages import Conflict
from bufstore.nats.permissions import Role


class _NoConsumer:
    """A log whose cluster has no place for a consumer at this moment."""

    async def publish(self, *_: Any) -> None:
        raise Conflict("nothing is stored")

    async def ends(self, *_: Any) -> None: ...

    async def last(self, *_: Any) -> None: ...

    async def api(self, verb: str, *_: Any) -> None:
        if verb.startswith("CONSUMER.CREATE"):
            raise consumer_error(ApiError(503, 10023, "insufficient resources"), "LOG")
        if verb.startswith("CONSUMER.DELETE"):
            raise ConsumerMissing("there is none")


def test_a_cluster_without_a_place_for_a_consumer_lacks_no_right() -> None:
    notes, session = Notes("NATS"), SimpleNamespace(stream=_NoConsumer())
    asyncio.run(
        nats._permissions(notes, session, "$JS.API", LogConfig(), Role.FLUSHER, bucket=True)  # type: ignore[arg-type]
    )
    found = {check.what: check for check in notes.checks}
    assert found["permissions"].level is Level.OK
    assert found["consumer"].level is Level.BAD and "too few of its nodes" in found["consumer"].found
