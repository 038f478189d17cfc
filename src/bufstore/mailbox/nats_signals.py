"""Signals and live deliveries on NATS.

A signal is the message at ``s.<thread>``: one at most per thread, put in the same batch as the work that it is about.
All workers share one durable consumer of signals.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import nats.errors
from nats.aio.msg import Msg

from bufstore.errors import ConfigError, LogUnavailable, MalformedEntry
from bufstore.jetstream.client import refusal
from bufstore.jetstream.pulls import Delivery, PullRefused
from bufstore.jetstream.shared_consumer import SharedConsumer
from bufstore.jetstream.subject_tokens import token, untoken
from bufstore.jetstream.subscriptions import Subscriptions
from bufstore.log_lines import LogLines
from bufstore.mailbox.config import NatsMailboxNames
from bufstore.mailbox.nats_bucket import Bucket
from bufstore.mailbox.ports import Live, LiveHandler
from bufstore.tasks import no_cancel_lost, own_cancels_only

_log = LogLines(__name__)

#: How long a worker pauses when the consumer lets no more workers wait.
_CROWDED_S = 0.5


class NatsSignals(SharedConsumer):
    """The consumer of signals."""

    async def pull(self, limit: int, timeout_s: float) -> list[tuple[str, Delivery]]:
        """Return threads that may have work: all that wait, or the first that comes in time. Raises LogUnavailable."""
        try:
            came = await self.pulls.ready(limit)
            if not came and timeout_s > 0:
                # Only one: a request that is still open when its worker is gone would take signals with it.
                came = [d for d in [await self.pulls.next(timeout_s)] if d is not None]
        except PullRefused as e:
            if e.code == "503":  # the consumer is gone: somebody removed it
                await self.setup()
            else:  # the consumer lets no more workers wait: this one asks again later
                await asyncio.sleep(min(timeout_s, _CROWDED_S))
            return []
        found: list[tuple[str, Delivery]] = []
        for delivery in came:
            if (thread_id := _thread_id(delivery)) is not None:
                found.append((thread_id, delivery))
            else:
                await self.pulls.answer(delivery, b"+TERM")  # it would come again and again, and take a place each time
        return found


def _thread_id(delivery: Delivery) -> str | None:
    try:
        return untoken(delivery.subject.rpartition(".")[2])
    except MalformedEntry:
        what = delivery.subject[:200]
        _log.warning("ignoring a signal that belongs to no thread: %r", what, extra={"action": "mailbox_foreign"})
        return None


class NatsLive:
    """Live deliveries: request and reply of core NATS, kept nowhere."""

    def __init__(self, bucket: Bucket, names: NatsMailboxNames) -> None:
        self._bucket = bucket
        self._prefix = f"{names.live_subject}.{names.bucket}."
        self._subscriptions = Subscriptions(bucket.connection)

    async def deliver(self, thread_id: str, payload: bytes, timeout_s: float) -> Live:
        """See `Backend.deliver_live`."""
        self._bucket.stream.check_size(payload)
        client, subject = self._bucket.connection.client(), self._prefix + token(thread_id)
        before = refusal(client, "publish", subject)
        try:
            with no_cancel_lost():  # nats-py, and Python's wait_for before 3.12, may swallow a cancellation
                await client.request(subject, payload, timeout=timeout_s)
        except nats.errors.NoRespondersError:
            return Live.NO_SUBSCRIBER
        except (nats.errors.Error, OSError, TimeoutError):
            refused = refusal(client, "publish", subject) not in (None, before)
            return Live.NO_SUBSCRIBER if refused else Live.UNKNOWN
        return Live.DELIVERED

    async def listen(self, thread_id: str, handler: LiveHandler) -> Callable[[], Awaitable[None]]:
        """See `Backend.listen_live`."""

        async def heard(msg: Msg) -> None:
            # Answer first: a sender that gets no answer enqueues what the handler may be working on already.
            with contextlib.suppress(nats.errors.Error, OSError):
                await msg.respond(b"")
            try:
                with own_cancels_only():  # otherwise nats-py would end the subscription
                    await handler(msg.data)
            except Exception:
                _log.exception("a live handler failed", extra={"action": "mailbox_live_failed"})

        subject = self._prefix + token(thread_id)
        unsubscribe = await self._subscriptions.add(subject, heard)

        async def stop() -> None:
            await unsubscribe()
            # Otherwise the server may still count us as a listener, and a sender would wait for our answer.
            with contextlib.suppress(LogUnavailable):
                await self._told()

        try:
            await self._told()
            if refusal(self._bucket.connection.client(), "subscription", subject) is not None:
                raise ConfigError(f"NATS does not permit this user to subscribe to {subject!r}: see docs/MAILBOX.md")
        except BaseException:
            await stop()
            raise
        return stop

    async def _told(self) -> None:
        """Return when the server knows of every earlier subscription: it answers in order.

        This does not use nats-py's flush, whose PING may overtake what still waits to be written.
        """
        await self._bucket.stream.info()
