"""A durable mailbox of dispatches: queues per thread that many workers claim from. See docs/MAILBOX.md.

Three stores with one contract (`MailboxStore`), a `Worker` that works queues off, and a `Sweeper` that keeps order.
"""

from typing import TYPE_CHECKING

from bufstore import _lazy

if TYPE_CHECKING:
    from bufstore.errors import ClaimInterrupted as ClaimInterrupted
    from bufstore.errors import StaleClaim as StaleClaim
    from bufstore.errors import StepUnknown as StepUnknown
    from bufstore.mailbox.config import MailboxConfig as MailboxConfig
    from bufstore.mailbox.config import NatsMailboxNames as NatsMailboxNames
    from bufstore.mailbox.counters import MailboxGauges as MailboxGauges
    from bufstore.mailbox.counters import MailboxStatistics as MailboxStatistics
    from bufstore.mailbox.counters import Timing as Timing
    from bufstore.mailbox.memory import MemoryMailbox as MemoryMailbox
    from bufstore.mailbox.memory import MemoryMailboxStore as MemoryMailboxStore
    from bufstore.mailbox.model import Dispatch as Dispatch
    from bufstore.mailbox.model import Interruption as Interruption
    from bufstore.mailbox.model import Status as Status
    from bufstore.mailbox.nats import NatsMailboxStore as NatsMailboxStore
    from bufstore.mailbox.ports import Live as Live
    from bufstore.mailbox.ports import Signal as Signal
    from bufstore.mailbox.postgres import PostgresMailboxStore as PostgresMailboxStore
    from bufstore.mailbox.store import MailboxStore as MailboxStore
    from bufstore.mailbox.sweeper import Sweeper as Sweeper
    from bufstore.mailbox.worker import Worker as Worker
else:
    __all__, __getattr__, __dir__ = _lazy.names(
        __name__,
        {
            "bufstore.errors": ("ClaimInterrupted", "StaleClaim", "StepUnknown"),
            "bufstore.mailbox.config": ("MailboxConfig", "NatsMailboxNames"),
            "bufstore.mailbox.counters": ("MailboxGauges", "MailboxStatistics", "Timing"),
            "bufstore.mailbox.memory": ("MemoryMailbox", "MemoryMailboxStore"),
            "bufstore.mailbox.model": ("Dispatch", "Interruption", "Status"),
            "bufstore.mailbox.nats": ("NatsMailboxStore",),
            "bufstore.mailbox.ports": ("Live", "Signal"),
            "bufstore.mailbox.postgres": ("PostgresMailboxStore",),
            "bufstore.mailbox.store": ("MailboxStore",),
            "bufstore.mailbox.sweeper": ("Sweeper",),
            "bufstore.mailbox.worker": ("Worker",),
        },
    )
