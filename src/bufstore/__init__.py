"""bufstore: a buffered write-ahead checkpoint store in front of Postgres. See README.md."""

from bufstore.buffer.audit import Finding, Verification
from bufstore.buffer.ports import ParkedInfo
from bufstore.buffer.replay import Outcome, ParkedEntry, Replayed
from bufstore.config import BufferConfig, LogConfig, NatsConfig
from bufstore.errors import (
    AlreadyExists,
    BufstoreError,
    Closed,
    ConfigDrift,
    ConfigError,
    FlushTimeout,
    IdempotencyConflict,
    InvalidId,
    InvalidRecord,
    LogFull,
    LogRolledBack,
    LogUnavailable,
    NotFound,
    OutcomeUnknown,
    ReadNotFresh,
    Rejected,
    StoreMisconfigured,
    StoreUnavailable,
    ThreadQuarantined,
    TooLarge,
    Unavailable,
    VersionConflict,
)
from bufstore.memory.store import MemoryThreadStore
from bufstore.postgres.store import PostgresThreadStore
from bufstore.threads.buffered import BufferedThreadStore, Health, Statistics
from bufstore.threads.model import Checkpoint, Run, RunStatus, Thread, ThreadChange, decode_message, decode_run
from bufstore.threads.protocol import ThreadReader, ThreadRunStore, WrappableStore
from bufstore.types import Consistency, Message, Receipt

__all__ = [
    "AlreadyExists",
    "BufferConfig",
    "BufferedThreadStore",
    "BufstoreError",
    "Checkpoint",
    "Closed",
    "ConfigDrift",
    "ConfigError",
    "Consistency",
    "Finding",
    "FlushTimeout",
    "Health",
    "IdempotencyConflict",
    "InvalidId",
    "InvalidRecord",
    "LogConfig",
    "LogFull",
    "LogRolledBack",
    "LogUnavailable",
    "MemoryThreadStore",
    "Message",
    "NatsConfig",
    "NotFound",
    "Outcome",
    "OutcomeUnknown",
    "ParkedEntry",
    "ParkedInfo",
    "PostgresThreadStore",
    "ReadNotFresh",
    "Receipt",
    "Rejected",
    "Replayed",
    "Run",
    "RunStatus",
    "Statistics",
    "StoreMisconfigured",
    "StoreUnavailable",
    "Thread",
    "ThreadChange",
    "ThreadQuarantined",
    "ThreadReader",
    "ThreadRunStore",
    "TooLarge",
    "Unavailable",
    "Verification",
    "VersionConflict",
    "WrappableStore",
    "decode_message",
    "decode_run",
]
