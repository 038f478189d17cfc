"""A durable mailbox of dispatches: queues per thread that many workers claim from. See docs/MAILBOX.md.

Three stores with one contract (`MailboxStore`), a `Worker` that works queues off, and a `Sweeper` that keeps order.
"""

from bufstore.mailbox.config import MailboxConfig, NatsMailboxNames
from bufstore.mailbox.counters import MailboxStatistics, Timing
from bufstore.mailbox.memory import MemoryMailbox, MemoryMailboxStore
from bufstore.mailbox.model import Dispatch, Interruption, Status
from bufstore.mailbox.nats import NatsMailboxStore
from bufstore.mailbox.ports import Live, Signal
from bufstore.mailbox.postgres import PostgresMailboxStore
from bufstore.mailbox.protocol import MailboxStore
from bufstore.mailbox.sweeper import Sweeper
from bufstore.mailbox.worker import Worker

__all__ = [
    "Dispatch",
    "Interruption",
    "Live",
    "MailboxConfig",
    "MailboxStatistics",
    "MailboxStore",
    "MemoryMailbox",
    "MemoryMailboxStore",
    "NatsMailboxNames",
    "NatsMailboxStore",
    "PostgresMailboxStore",
    "Signal",
    "Status",
    "Sweeper",
    "Timing",
    "Worker",
]
