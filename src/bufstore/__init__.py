"""bufstore: a buffered write-ahead checkpoint store in front of Postgres. See README.md."""

from typing import TYPE_CHECKING

import bufstore.at_exit  # noqa: F401 (its handler is to be registered before the app's)
from bufstore import _lazy

if TYPE_CHECKING:
    from bufstore.blocking import BlockingBufferedStore as BlockingBufferedStore
    from bufstore.blocking import BlockingThreadStore as BlockingThreadStore
    from bufstore.buffer.operate.audit import Finding as Finding
    from bufstore.buffer.operate.audit import Verification as Verification
    from bufstore.buffer.operate.health import Health as Health
    from bufstore.buffer.operate.health import Statistics as Statistics
    from bufstore.buffer.operate.repair import Repaired as Repaired
    from bufstore.buffer.operate.replay import Outcome as Outcome
    from bufstore.buffer.operate.replay import ParkedEntry as ParkedEntry
    from bufstore.buffer.operate.replay import Replayed as Replayed
    from bufstore.buffer.ports.ledger import ParkedInfo as ParkedInfo
    from bufstore.buffer.windows import Windows as Windows
    from bufstore.config import BufferConfig as BufferConfig
    from bufstore.config import LogConfig as LogConfig
    from bufstore.config import NatsConfig as NatsConfig
    from bufstore.errors import AlreadyExists as AlreadyExists
    from bufstore.errors import BufstoreError as BufstoreError
    from bufstore.errors import CallTimeout as CallTimeout
    from bufstore.errors import Closed as Closed
    from bufstore.errors import ConfigDrift as ConfigDrift
    from bufstore.errors import ConfigError as ConfigError
    from bufstore.errors import FlushTimeout as FlushTimeout
    from bufstore.errors import IdempotencyConflict as IdempotencyConflict
    from bufstore.errors import InvalidId as InvalidId
    from bufstore.errors import InvalidQuery as InvalidQuery
    from bufstore.errors import InvalidRecord as InvalidRecord
    from bufstore.errors import LineageError as LineageError
    from bufstore.errors import LogFull as LogFull
    from bufstore.errors import LogRolledBack as LogRolledBack
    from bufstore.errors import LogUnavailable as LogUnavailable
    from bufstore.errors import MalformedEntry as MalformedEntry
    from bufstore.errors import NoLog as NoLog
    from bufstore.errors import NotFound as NotFound
    from bufstore.errors import OutcomeUnknown as OutcomeUnknown
    from bufstore.errors import ReadNotFresh as ReadNotFresh
    from bufstore.errors import Rejected as Rejected
    from bufstore.errors import StoreMisconfigured as StoreMisconfigured
    from bufstore.errors import StoreUnavailable as StoreUnavailable
    from bufstore.errors import ThreadQuarantined as ThreadQuarantined
    from bufstore.errors import TooLarge as TooLarge
    from bufstore.errors import Unavailable as Unavailable
    from bufstore.errors import VersionConflict as VersionConflict
    from bufstore.nats.change_log import change_log as change_log
    from bufstore.threads.buffered import BufferedThreadStore as BufferedThreadStore
    from bufstore.threads.erasing import Erasure as Erasure
    from bufstore.threads.lineage import Children as Children
    from bufstore.threads.memory_store import MemoryThreadStore as MemoryThreadStore
    from bufstore.threads.model import Checkpoint as Checkpoint
    from bufstore.threads.model import Run as Run
    from bufstore.threads.model import RunStatus as RunStatus
    from bufstore.threads.model import Thread as Thread
    from bufstore.threads.model import ThreadChange as ThreadChange
    from bufstore.threads.model import ThreadMetadata as ThreadMetadata
    from bufstore.threads.model import decode_message as decode_message
    from bufstore.threads.model import decode_metadata as decode_metadata
    from bufstore.threads.model import decode_run as decode_run
    from bufstore.threads.postgres.store import PostgresThreadStore as PostgresThreadStore
    from bufstore.threads.protocol import Queryable as Queryable
    from bufstore.threads.protocol import ThreadReader as ThreadReader
    from bufstore.threads.protocol import ThreadRunStore as ThreadRunStore
    from bufstore.threads.protocol import WrappableStore as WrappableStore
    from bufstore.threads.queries import MessagePage as MessagePage
    from bufstore.threads.queries import MessageQuery as MessageQuery
    from bufstore.threads.queries import MessageRecord as MessageRecord
    from bufstore.threads.queries import Order as Order
    from bufstore.threads.queries import RunPage as RunPage
    from bufstore.threads.queries import RunQuery as RunQuery
    from bufstore.threads.queries import ThreadPage as ThreadPage
    from bufstore.threads.queries import ThreadQuery as ThreadQuery
    from bufstore.threads.queries import Visibility as Visibility
    from bufstore.threads.repairing import repair as repair
    from bufstore.tls_files import TlsFiles as TlsFiles
    from bufstore.types import Consistency as Consistency
    from bufstore.types import Message as Message
    from bufstore.types import ProducerSequence as ProducerSequence
    from bufstore.types import Receipt as Receipt
else:
    __all__, __getattr__, __dir__ = _lazy.names(
        __name__,
        {
            "bufstore.blocking": ("BlockingBufferedStore", "BlockingThreadStore"),
            "bufstore.buffer.operate.audit": ("Finding", "Verification"),
            "bufstore.buffer.operate.repair": ("Repaired",),
            "bufstore.buffer.operate.replay": ("Outcome", "ParkedEntry", "Replayed"),
            "bufstore.buffer.ports.ledger": ("ParkedInfo",),
            "bufstore.buffer.windows": ("Windows",),
            "bufstore.config": ("BufferConfig", "LogConfig", "NatsConfig"),
            "bufstore.errors": (
                "AlreadyExists", "BufstoreError", "CallTimeout", "Closed", "ConfigDrift", "ConfigError",
                "FlushTimeout", "IdempotencyConflict", "InvalidId", "InvalidQuery", "InvalidRecord", "LineageError",
                "LogFull", "LogRolledBack", "LogUnavailable", "MalformedEntry", "NoLog", "NotFound", "OutcomeUnknown",
                "ReadNotFresh", "Rejected", "StoreMisconfigured", "StoreUnavailable", "ThreadQuarantined", "TooLarge",
                "Unavailable", "VersionConflict",
            ),
            "bufstore.threads.buffered": ("BufferedThreadStore",),
            "bufstore.nats.change_log": ("change_log",),
            "bufstore.threads.erasing": ("Erasure",),
            "bufstore.buffer.operate.health": ("Health", "Statistics"),
            "bufstore.threads.lineage": ("Children",),
            "bufstore.threads.memory_store": ("MemoryThreadStore",),
            "bufstore.threads.model": (
                "Checkpoint", "Run", "RunStatus", "Thread", "ThreadChange", "ThreadMetadata", "decode_message",
                "decode_metadata", "decode_run",
            ),
            "bufstore.threads.postgres.store": ("PostgresThreadStore",),
            "bufstore.threads.protocol": ("Queryable", "ThreadReader", "ThreadRunStore", "WrappableStore"),
            "bufstore.threads.queries": (
                "MessagePage", "MessageQuery", "MessageRecord", "Order", "RunPage", "RunQuery", "ThreadPage",
                "ThreadQuery", "Visibility",
            ),
            "bufstore.threads.repairing": ("repair",),
            "bufstore.tls_files": ("TlsFiles",),
            "bufstore.types": ("Consistency", "Message", "ProducerSequence", "Receipt"),
        },
    )  # fmt: skip
