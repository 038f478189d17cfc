"""Hints in JetStream: a counter per hint where the server has counters (2.12), else a KV value changed by CAS.

A counter is exact however many ask at once, in one round trip each. It starts at `_BIAS` plus the count, so that the
answer to a claim tells a used-up hint from one that is unknown (or forgotten): only the second is below zero, since
nobody can claim as much as the bias. Claims below the bias need not be given back: the hint is used up.

A change of the KV value loses a race now and then. It is tried again, with growing random pauses, until the time is
over; then everybody is called. Five attempts and then nobody, as elsewhere, left 92 of 100 workers asleep.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, KeyValueConfig, RetentionPolicy, StorageType, StreamConfig
from nats.js.client import JetStreamContext
from nats.js.kv import KeyValue
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from bufstore.notify.payload import HINT_TTL_S, hint_key

_BIAS = 1 << 40
#: How long to wait before trying again, after JetStream could not be set up.
_AGAIN_S = 10.0


class Hints(enum.Enum):
    """Where hints are kept."""

    #: Counters if the server has them, else KV, else nowhere.
    AUTO = "auto"
    COUNTERS = "counters"
    KV = "kv"
    #: All listeners are called.
    NONE = "none"


class HintStore:
    """Budgets by hint id. Raises whatever nats-py raises: its callers fail open."""

    def __init__(self, prefix: str, hints: Hints | KeyValue, api: str, timeout_s: float) -> None:
        self._prefix = prefix
        self._kind = Hints.KV if isinstance(hints, KeyValue) else hints
        self._given = hints if isinstance(hints, KeyValue) else None
        self._api = api
        self._timeout_s = timeout_s
        self._js: tuple[Client, JetStreamContext] | None = None
        self._bucket: KeyValue | None = None
        self._ready = asyncio.Lock()
        self._not_before = 0.0

    @property
    def kind(self) -> Hints:
        """Where hints are kept; AUTO until that is known."""
        return self._kind

    async def provide(self, client: Client, hint: str, count: int) -> None:
        js = await self._prepare(client)
        try:
            if self._kind is Hints.COUNTERS:
                increment = {"Nats-Incr": f"+{_BIAS + count}"}
                await js.publish(self._subject(hint), headers=increment, timeout=self._timeout_s)
            else:
                await self._kv().create(hint_key(self._prefix, hint, "_"), str(count).encode())
        except nats.js.errors.NoStreamResponseError:
            self._js = None  # somebody has removed the stream: the next call makes it again
            raise

    async def claim(self, client: Client, hint: str, wanted: int) -> int:
        """Take up to `wanted` of a hint and return how many: all of them when the hint is unknown."""
        js = await self._prepare(client)
        if self._kind is Hints.COUNTERS:
            ack = await js.publish(self._subject(hint), headers={"Nats-Incr": f"-{wanted}"}, timeout=self._timeout_s)
            return granted(int(str(ack.val)), wanted)
        # Without a limit: the caller ends it when its time is over.
        return await AsyncRetrying(
            wait=wait_random_exponential(multiplier=0.001, max=0.05),
            retry=retry_if_exception_type(nats.js.errors.KeyWrongLastSequenceError),
        )(self._compare_and_take, hint_key(self._prefix, hint, "_"), wanted)

    async def _compare_and_take(self, key: str, wanted: int) -> int:
        try:
            entry = await self._kv().get(key)
        except nats.js.errors.KeyNotFoundError:  # also for a deleted key
            return wanted
        if not entry.value or not entry.value.isdigit():
            return wanted  # a marker of the server's, or a value that is not ours
        take = min(int(entry.value), wanted)
        if take:
            await self._kv().update(key, str(int(entry.value) - take).encode(), last=entry.revision)
        return take

    def _subject(self, hint: str) -> str:
        return hint_key(self._prefix, hint, ".")

    def _kv(self) -> KeyValue:
        bucket = self._given or self._bucket
        assert bucket is not None
        return bucket

    async def _prepare(self, client: Client) -> JetStreamContext:
        """Return the JetStream context of this client; make the stream or bucket once per client."""
        if self._js is not None and self._js[0] is client:
            return self._js[1]
        async with self._ready:
            if self._js is not None and self._js[0] is client:
                return self._js[1]
            loop = asyncio.get_running_loop()
            if loop.time() < self._not_before:
                raise nats.js.errors.ServiceUnavailableError(description="JetStream did not answer a moment ago")
            self._not_before = loop.time() + _AGAIN_S
            js = client.jetstream(prefix=self._api, timeout=self._timeout_s)
            if self._given is None:
                await self._set_up(client, js)
            self._js = (client, js)
            self._not_before = 0.0
            return js

    async def _set_up(self, client: Client, js: JetStreamContext) -> None:
        version = client.connected_server_version
        # An older server would make the stream without the field, which it does not know.
        if self._kind is Hints.COUNTERS or (self._kind is Hints.AUTO and (version.major, version.minor) >= (2, 12)):
            await _ensure_counters(js, self._prefix)
            self._kind = Hints.COUNTERS
            return
        name = self._prefix.replace(".", "_") + "_hints"
        self._bucket = await js.create_key_value(
            KeyValueConfig(bucket=name, ttl=HINT_TTL_S, history=1, storage=StorageType.MEMORY)
        )
        self._kind = Hints.KV


async def _ensure_counters(js: JetStreamContext, prefix: str) -> None:
    config = StreamConfig(
        name=prefix.replace(".", "_") + "-hints",
        subjects=[hint_key(prefix, "*", ".")],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        max_age=HINT_TTL_S,
        # A lost hint wakes too many workers once: that is not worth a disk.
        storage=StorageType.MEMORY,
        allow_msg_counter=True,
    )
    info = await js.add_stream(config)
    if not info.config.allow_msg_counter:
        raise nats.js.errors.BadRequestError(description="this server has no counters (2.12 introduced them)")


def granted(value: int, wanted: int) -> int:
    """Return what a claim of `wanted` got when the counter then showed `value`."""
    if value < 0:
        return wanted  # an unknown hint
    return max(0, min(wanted, value + wanted - _BIAS))


def hint_failure(error: Exception) -> str:
    """Return a line for the log: nats-py's own texts may be empty."""
    detail: Any = getattr(error, "description", None) or error
    return f"{type(error).__name__}: {detail}"
