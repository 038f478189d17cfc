"""Tells workers that there is work, without waking more of them than needed. See docs/NOTIFY.md.

Adapters: `MemoryNotifier`, `NatsNotifier`, `RedisNotifier` (needs the `redis` extra), `PostgresNotifier`.
"""

from typing import TYPE_CHECKING

from bufstore import _lazy

if TYPE_CHECKING:
    from bufstore.errors import NotifyUnavailable as NotifyUnavailable
    from bufstore.notify.idle import wait_for_work as wait_for_work
    from bufstore.notify.memory import MemoryBroker as MemoryBroker
    from bufstore.notify.memory import MemoryNotifier as MemoryNotifier
    from bufstore.notify.nats import NatsNotifier as NatsNotifier
    from bufstore.notify.nats_hints import Hints as Hints
    from bufstore.notify.notifier import Notifier as Notifier
    from bufstore.notify.postgres import PostgresNotifier as PostgresNotifier
    from bufstore.notify.protocol import Event as Event
    from bufstore.notify.protocol import NotifierStatistics as NotifierStatistics
    from bufstore.notify.protocol import Unlisten as Unlisten
    from bufstore.notify.redis import RedisNotifier as RedisNotifier
else:
    __all__, __getattr__, __dir__ = _lazy.names(
        __name__,
        {
            "bufstore.errors": ("NotifyUnavailable",),
            "bufstore.notify.idle": ("wait_for_work",),
            "bufstore.notify.memory": ("MemoryBroker", "MemoryNotifier"),
            "bufstore.notify.nats": ("NatsNotifier",),
            "bufstore.notify.nats_hints": ("Hints",),
            "bufstore.notify.postgres": ("PostgresNotifier",),
            "bufstore.notify.notifier": ("Notifier",),
            "bufstore.notify.protocol": ("Event", "NotifierStatistics", "Unlisten"),
            "bufstore.notify.redis": ("RedisNotifier",),
        },
    )
