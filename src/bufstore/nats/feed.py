"""Follows a subject of the log: a durable pull consumer of one process.

The feed promises an unbroken sequence: the cursor will say "everything up to here is done", so a delivery that was lost
on the way must not pass unnoticed. Each delivery carries the consumer's own dense counter, and each idle heartbeat
carries its last value: a jump means a lost message, silence means a lost connection. Then the feed is *lost*, and its
owner takes the partition again from the cursor. The feed asks for nothing twice, and repairs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
from nats.aio.subscription import Subscription

from bufstore.buffer.groups.delivery import LostAgain
from bufstore.errors import BufstoreError, ConfigError, LogUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.client import ListeningClient, check_room, refused_ack
from bufstore.jetstream.drift import check
from bufstore.jetstream.errors import ConsumerMissing
from bufstore.jetstream.headers import entry_header, fields, status_of
from bufstore.jetstream.messages import StoredMessage
from bufstore.jetstream.pulls import numbers_of
from bufstore.jetstream.stream import NatsStream
from bufstore.log_lines import LogLines
from bufstore.nats.pull_sizes import PullSizes

_log = LogLines(__name__)

_HEARTBEAT_S = 1.5
_EXPIRES_S = 30
#: Seconds after which a new consumer is looked at again that has nothing to deliver although the log has something.
_LOOK_AGAIN_S = (0.1, 0.2)
_LOOK_TIMEOUT_S = 2.0
#: Seconds after which a consumer whose owner is gone removes itself.
_INACTIVE_S = 60
#: Long, because entries wait in the owner's memory while Postgres is away: a redelivery would only repeat them.
_ACK_WAIT_S = 600


def consumer_config(name: str, filter_subject: str, start: int, pending_max: int) -> dict[str, Any]:
    """Return the configuration of one follower's consumer."""
    return {
        "name": name,
        "durable_name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": start,
        # The owner acks a prefix, its cursor: one ack for all up to it (docs/adr/0003).
        "ack_policy": "all",
        "ack_wait": _ACK_WAIT_S * 1_000_000_000,
        "max_deliver": -1,
        "max_ack_pending": pending_max,
        "filter_subject": filter_subject,
        "inactive_threshold": _INACTIVE_S * 1_000_000_000,
        "replay_policy": "instant",
    }


class NatsFeed:
    """See `bufstore.buffer.groups.delivery.StreamFeed`."""

    def __init__(
        self,
        client: ListeningClient,
        stream: NatsStream,
        config: dict[str, Any],
        wake: Callable[[], None],
        sizes: PullSizes,
        leave: Callable[[str], None],
    ) -> None:
        """`leave`: has a consumer removed later that could not be removed now."""
        self._client = client
        self._stream = stream
        self._name: str = config["name"]
        self._wake = wake
        self._messages_max: int = config["max_ack_pending"]
        self._sizes = sizes
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._inbox = client.new_inbox()
        self._subscription: Subscription
        self._arrived: list[StoredMessage] = []
        #: The messages that were delivered and are not acked yet: (sequence, reply subject, bytes).
        self._held: deque[tuple[int, str, int]] = deque()
        self._counter = 0
        self._last_seq: int = config["opt_start_seq"] - 1
        self._held_bytes = 0
        self._outstanding = 0
        self._heard = 0.0
        self._lost: str | None = None
        #: The client's last error when this feed last looked at its errors.
        self._last_error: Exception | None = None

    async def start(self) -> None:
        """Subscribe and ask for the first messages. Raises ConfigError, LogUnavailable."""
        before = self._client.no_room
        self._subscription = await self._client.listen(self._inbox, self._on_message)
        try:
            await check_room(self._client, before)
        except BaseException as e:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()
            if isinstance(e, nats.errors.Error | OSError):
                raise LogUnavailable(f"cannot subscribe on NATS: {type(e).__name__}") from None
            raise
        await self._pull()

    @property
    def lost(self) -> str | None:
        if self._lost is None:
            if not self._client.is_connected:
                self._lost = "the connection to NATS was lost"
            elif self._outstanding and self._loop.time() - self._heard > 3 * _HEARTBEAT_S:
                self._lost = "NATS sends no heartbeat"
            elif self._client.errors and self._client.errors[-1] is not self._last_error and self._may_not_ack():
                # The server would stop when it has delivered as much as may be unacknowledged. A new consumer begins
                # at the cursor, so a flusher goes on, slowly, and says why.
                self._lost = LostAgain(
                    "NATS does not permit this user to publish on $JS.ACK.>, where what is flushed is acknowledged: "
                    "permit it (see `bufstore permissions`)"
                )
        return self._lost

    def _may_not_ack(self) -> bool:
        self._last_error = self._client.errors[-1]
        return refused_ack(self._client, self._name) is not None

    def take(self) -> list[StoredMessage]:
        arrived, self._arrived = self._arrived, []
        return arrived

    @property
    def crowded(self) -> bool:
        return 2 * len(self._held) >= self._messages_max or 2 * self._held_bytes >= self._sizes.bytes_max

    async def ack(self, seq: int) -> None:
        reply = None
        while self._held and self._held[0][0] <= seq:
            _, reply, size = self._held.popleft()
            self._held_bytes -= size
        if reply is None:
            return
        try:
            # The third line that matters, the ack: only after the commit. Acking first would let the log forget
            # what a crash between the two keeps out of Postgres. Losing an ack is harmless.
            await self._client.publish(reply, b"+ACK")
        except nats.errors.Error:
            return
        await self._pull()

    async def close(self) -> None:
        self._lost = self._lost or "closed"
        if not self._client.is_connected:
            self._leave(self._name)
            return
        try:
            await self._subscription.unsubscribe()
            await self._stream.remove_consumer(self._name)
        except (nats.errors.Error, BufstoreError) as e:
            _log.debug("closing a feed: %s", e, extra={"action": "feed_close"})
            if not isinstance(e, ConsumerMissing):
                self._leave(self._name)

    async def _pull(self) -> None:
        """Keep one request open while there is space for its messages."""
        room = self._messages_max - len(self._held)
        full = room <= self._messages_max // 4 or self._held_bytes >= self._sizes.bytes_max
        if self._outstanding or full or self._lost:
            return
        size = self._sizes.next(room)
        self._outstanding = size["batch"]
        self._heard = self._loop.time()
        request = {
            **size,
            "expires": _EXPIRES_S * 1_000_000_000,
            "idle_heartbeat": int(_HEARTBEAT_S * 1_000_000_000),
        }
        try:
            subject = self._stream.next_of(self._name)
            await self._client.publish(subject, json.dumps(request).encode(), reply=self._inbox)
        except nats.errors.Error as e:
            self._lose(f"asking for messages failed: {type(e).__name__}")

    def _on_message(self, subject: str, reply: str, data: bytes, headers: bytes) -> Awaitable[None] | None:
        self._heard = self._loop.time()
        if not reply:
            return self._on_status(headers)
        _, seq, counter, *_ = numbers_of(reply)
        if counter != self._counter + 1:
            self._lose(f"delivery {self._counter + 1} is missing")
            return None
        self._counter = counter
        self._outstanding -= 1
        if seq > self._last_seq:  # otherwise a redelivery of a message that is still held
            self._last_seq = seq
            self._held.append((seq, reply, len(data)))
            self._held_bytes += len(data)
            self._arrived.append(StoredMessage(subject, seq, entry_header(headers), data))
            self._wake()
        return None if self._outstanding else self._pull()

    async def _on_status(self, headers: bytes) -> None:
        status, description = status_of(headers)
        if status == "100":
            last = fields(headers).get("Nats-Last-Consumer")
            if last is not None and int(last) > self._counter:
                self._lose(f"deliveries up to {last} are missing after {self._counter}")
            return
        of_bytes = status == "409" and "Bytes" in description
        if of_bytes:
            self._sizes.ended(self._counter)
        if status == "408" or of_bytes:
            # The request ended (its time, or its bytes): ask again.
            self._outstanding = 0
            await self._pull()
            return
        if status == "409" and "Completed" in description:
            return  # of a request whose messages have all been counted
        if status:
            self._lose(f"the consumer ended: {status} {description}")

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._wake()


async def open_feed(
    client: ListeningClient,
    stream: NatsStream,
    config: dict[str, Any],
    wake: Callable[[], None],
    bytes_max: int,
    leave: Callable[[str], None],
    made_within_s: float,
) -> NatsFeed:
    """Create the consumer, or check the existing one, and follow it. Raises ConfigError, LogUnavailable."""
    name = config["name"]
    try:
        made = await stream.api(
            f"CONSUMER.CREATE.{stream.name}.{name}.{config['filter_subject']}",
            {"stream_name": stream.name, "config": config, "action": "create"},
            timeout_s=made_within_s,
        )
    except ConfigError:
        # No two owners have the same term, so a consumer of this name is not ours: say how it differs. If there is no
        # such consumer, the server does not accept it, and has said why.
        with contextlib.suppress(LogUnavailable):
            found = (await stream.consumer(name))["config"]
            remove = f"nats consumer rm {stream.name} {name}"
            way_out = f"Another process made this consumer: remove it (`{remove}`)."
            check(f"consumer {name}", config, found, "", remove, way_out=way_out)
        raise
    reach(Failpoint.TAKE_NEW_MADE)
    if not made.get("num_pending"):
        await _check_not_behind(stream, config)
    # The server writes a limit of its own (max_request_batch) into the consumer, and refuses pulls that ask for more.
    batch_max = made.get("config", {}).get("max_batch", 0)
    feed = NatsFeed(client, stream, config, wake, PullSizes(bytes_max, batch_max), leave)
    try:
        await feed.start()
    except BaseException:
        leave(name)
        raise
    return feed


async def _check_not_behind(stream: NatsStream, config: dict[str, Any]) -> None:
    """Raise LogUnavailable when a consumer's leader has nothing of what the log's leader has for the consumer.

    A node that was cut off leads new consumers again long before it has caught up. Until then it delivers nothing, and
    sends heartbeats. The next consumer may be led by another node.
    """
    (end,) = await stream.ends([config["filter_subject"]], _LOOK_TIMEOUT_S)
    if end < config["opt_start_seq"]:
        return
    for pause in _LOOK_AGAIN_S:
        await asyncio.sleep(pause)
        info = await stream.consumer(config["name"], _LOOK_TIMEOUT_S)
        if info["num_pending"]:
            return
    node = (info.get("cluster") or {}).get("leader")
    raise LogUnavailable(f"the consumer {config['name']} is led by {node}, which has not caught up with the log")
