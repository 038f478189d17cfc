"""Telling workers that there is work, without waking more of them than needed. See docs/NOTIFY.md.

Adapters: `MemoryNotifier` here, `bufstore.notify.nats.NatsNotifier`, `bufstore.notify.redis.RedisNotifier` (needs the
`redis` extra), `bufstore.notify.postgres.PostgresNotifier`.
"""

from bufstore.errors import NotifyUnavailable
from bufstore.notify.idle import wait_for_work
from bufstore.notify.memory import MemoryBroker, MemoryNotifier
from bufstore.notify.protocol import Event, Notifier, NotifierStatistics, Unlisten

__all__ = [
    "Event",
    "MemoryBroker",
    "MemoryNotifier",
    "Notifier",
    "NotifierStatistics",
    "NotifyUnavailable",
    "Unlisten",
    "wait_for_work",
]
