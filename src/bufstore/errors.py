"""Every error that bufstore raises, and what to do about it.

BufstoreError
├── ConfigError                 at construction or setup: fix the configuration
│   ├── NoLog                   there is no log of this name on the server yet
│   └── ConfigDrift             what exists on the server differs from what is configured
├── Rejected                    nothing was stored; the same call will be rejected again unless something changes
│   ├── InvalidId               a thread, run or message id that cannot be stored
│   ├── InvalidRecord           a message or run that does not round-trip exactly
│   ├── InvalidQuery            a query, limit or cursor that makes no sense, alone or together
│   ├── LineageError            a parent that is missing or a descendant; a deletion that would leave children
│   ├── TooLarge                larger than the configured limit for one entry
│   ├── VersionConflict         the thread moved on: load it and decide again
│   ├── AlreadyExists           the id is taken
│   ├── NotFound                no such thread or run
│   ├── IdempotencyConflict     the same idempotency key with other content
│   ├── StaleClaim              the mailbox claim is over: somebody else may hold the thread; stop working
│   │   └── ClaimInterrupted    the thread was interrupted: stop working, then end the claim
│   ├── ThreadQuarantined       the thread's chain is broken until a full checkpoint or a replay heals it
│   ├── ConcurrentWriter        another worker has written to the LangGraph thread since it was read
│   ├── LogFull                 too many bytes are not flushed or still needed: slow down and retry
│   ├── TokenBusy               the key has unfinished work, or another holds the lock
│   └── TokenQueueFull          the key's queue is full
├── Unavailable                 nothing was stored; retry later
│   ├── LogUnavailable          NATS cannot be reached or has no leader
│   ├── StoreUnavailable        Postgres cannot be reached and the call needs it
│   ├── NotifyUnavailable       a notifier's server does not answer; polling goes on
│   └── Closed                  the store is closed or not open yet
├── OutcomeUnknown              the entry may be stored or not; retry with ``idempotency_key=error.token``
├── StepUnknown                 a step of a mailbox may have been done or not; look, or repeat it
├── SubmitUnknown               an item of exclusive work may be submitted or not; a second submit may double it
├── TokenLost                   another holder has the token or lock by now: stop, and change nothing more
├── CallTimeout                 a blocking call took too long; a write may be stored or not
├── ReadNotFresh                the read could not reach its consistency level in time
├── FlushTimeout                the flush did not reach its target in time
├── StoreMisconfigured          Postgres refuses until an operator changes something (login, schema, read-only), or an
│                               app's own store breaks its contract
├── LogRolledBack               the log is older than what Postgres has applied: stop and repair
├── DataLoss                    a reader of the log missed messages that were purged, or an archive is not whole
├── PositionPassed              a job reads what was there at a position, and Postgres is past it: read at a later one
├── ArchiveOvertaken            another run has archived the same range: nothing is lost, the next run goes on there
├── MalformedEntry              bytes in the log that are not an entry (they go to quarantine)
└── EmbeddedError               an embedded development server did not start or stop

Import an error from `bufstore`, or, if only one package raises it, from that package:
`bufstore.mailbox` (StaleClaim, ClaimInterrupted, StepUnknown), `bufstore.tokens` (TokenBusy, TokenQueueFull, TokenLost,
SubmitUnknown), `bufstore.notify` (NotifyUnavailable), `bufstore.spark` (DataLoss, PositionPassed, ArchiveOvertaken),
`bufstore.langgraph` (ConcurrentWriter) and `bufstore.embedded` (EmbeddedError).
"""

from __future__ import annotations


class BufstoreError(Exception):
    """Base of all errors raised by bufstore."""

    def __reduce__(self) -> tuple[object, ...]:
        # The default calls the class with the text alone, but most of these classes take other arguments.
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[BufstoreError], args: tuple[object, ...]) -> BufstoreError:
    """Return a copied or unpickled error, still without its attributes."""
    error = kind.__new__(kind)
    error.args = args
    return error


class ConfigError(BufstoreError):
    """The configuration cannot work. Nothing was done; fix it and start again."""


class NoLog(ConfigError):
    """There is no log of this name on the server. Opening a store on it creates it, and so does `bufstore setup`."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"there is no log {stream!r} on this server; create it by opening a store on it, or with `bufstore setup`"
        )


class ConfigDrift(ConfigError):
    """A stream, bucket, consumer or table exists with settings other than the configured ones."""

    def __init__(self, what: str, field: str, *, expected: object, found: object, way_out: str) -> None:
        super().__init__(f"{what}: {field} is {found!r} but {expected!r} is configured. {way_out}")
        self.what = what
        self.field = field
        self.expected = expected
        self.found = found
        self.way_out = way_out


class Rejected(BufstoreError):
    """The call was refused and nothing was stored."""


class InvalidId(Rejected):
    """An id is empty, longer than 1 KiB of UTF-8, or has a NUL or a lone surrogate."""


class InvalidRecord(Rejected):
    """A message or a run holds a value that would not come back exactly as it was given."""


class InvalidQuery(Rejected):
    """A query that contradicts itself, or a cursor that is invalid or belongs to another query."""


class LineageError(Rejected):
    """The parent is missing, the thread itself or its descendant; or a deletion would leave children without one."""


class TooLarge(Rejected):
    """The entry is larger than ``max_entry_bytes``, or than a log of ``max_bytes`` can hold.

    Also raised for something other than an entry that is larger than one message, or one call, may be.
    """

    def __init__(self, size: int, limit: int, set_by: str = "LogConfig.max_entry_bytes, max_bytes") -> None:
        super().__init__(f"{size} bytes are too much to store at once; the limit is {limit} ({set_by})")
        self.size = size
        self.limit = limit


class VersionConflict(Rejected):
    """The thread's version is not the expected one. Load it, decide again, retry."""

    def __init__(self, thread_id: str, *, expected: int, actual: int) -> None:
        super().__init__(f"thread {thread_id!r} has version {actual}, expected {expected}; load it and decide again")
        self.thread_id = thread_id
        self.expected = expected
        self.actual = actual


class AlreadyExists(Rejected):
    """The id is already in use."""


class NotFound(Rejected):
    """The thread or run does not exist."""


class IdempotencyConflict(Rejected):
    """This idempotency key was already used on the thread with different content."""


class StaleClaim(Rejected):
    """The claim no longer holds its dispatch (expired, taken back, ended): stop working on it."""

    def __init__(self, thread_id: str, dispatch_id: str, token: int) -> None:
        super().__init__(
            f"claim {token} no longer holds dispatch {dispatch_id!r} of thread {thread_id!r}: stop working on it"
        )
        self.thread_id = thread_id
        self.dispatch_id = dispatch_id
        self.token = token


class ClaimInterrupted(StaleClaim):
    """The thread was interrupted while the dispatch was claimed: stop. The holder may still end the claim."""


class ThreadQuarantined(Rejected):
    """The thread has parked entries. A full ``checkpoint`` or a replay heals it."""

    def __init__(self, thread_id: str, since: int) -> None:
        super().__init__(
            f"thread {thread_id!r} has entries in quarantine since thread_seq {since}; "
            "write a full checkpoint to heal it, or see `bufstore quarantine list`"
        )
        self.thread_id = thread_id
        self.since = since


class ConcurrentWriter(Rejected):
    """Another worker has written to the thread since this saver read it: read it again, and decide what to do."""

    def __init__(self, thread_id: str) -> None:
        super().__init__(f"another worker has written to thread {thread_id!r} since it was read; nothing was stored")
        self.thread_id = thread_id


class LogFull(Rejected):
    """The log is full of bytes that are not flushed or still needed; the message gives both numbers.

    Nothing was stored. Slow down, retry later, or raise ``max_bytes``. Where NATS has no storage left for any stream,
    or the shared-state bucket is full, the message says that instead, and where to make room.
    """


class TokenBusy(Rejected):
    """The key has unfinished work and takes no second item, or another holds the lock. Nothing was submitted."""

    def __init__(self, key: str, holder: str = "") -> None:
        by = f" (held by {holder})" if holder else ""
        super().__init__(f"{key!r} is busy{by}: nothing was submitted or acquired")
        self.key = key
        #: The name that the holder of the key gave itself; empty when nobody holds the key, or the name is not known.
        self.holder = holder


class TokenQueueFull(Rejected):
    """The key's queue is full; nothing was submitted. Retry later, or raise ``TokensConfig.waiting_max``."""

    def __init__(self, key: str, limit: int) -> None:
        super().__init__(f"{limit} items already wait for {key!r}: nothing was submitted")
        self.key = key
        self.limit = limit


class Unavailable(BufstoreError):
    """A server that the call needs did not answer. Nothing was stored; retry later."""


class LogUnavailable(Unavailable):
    """NATS JetStream cannot be reached, or the stream has no leader."""


class StoreUnavailable(Unavailable):
    """Postgres cannot be reached, and this call needs it."""


class NotifyUnavailable(Unavailable):
    """The server of a notifier does not answer. Only time is lost: listeners poll as well."""


class Closed(Unavailable):
    """The store is closed, or was not opened."""


class OutcomeUnknown(BufstoreError):
    """The entry was sent and no answer came: it may or may not be stored.

    A retry is safe: repeat the same call, with ``idempotency_key=error.token`` if it takes one. The store that raised
    this finds the entry again as long as the log holds it (``failover_window_s`` at least). Another process knows only
    the keys of a thread's last 16 entries; if others may have written more since, look before you repeat an append.
    Only Postgres knows what became of a thread's first entry in the log: while it is away, that stays unknown. If a
    retry ends so at once, the error's cause says why nothing will tell: do not repeat that call, look instead.
    """

    def __init__(self, thread_id: str, token: str) -> None:
        super().__init__(
            f"no answer for an entry of thread {thread_id!r}: it may or may not be stored; "
            f"repeat the call, with idempotency_key={token!r} if it takes one"
        )
        self.thread_id = thread_id
        self.token = token


class StepUnknown(BufstoreError):
    """A step of a mailbox was sent, and its outcome is not known.

    Ask `load_dispatch` once the store answers again. You may repeat an enqueue with an id or dedupe key, an ack and an
    interrupt.
    """

    #: The id to ask for after an enqueue, including one that the store chose; None after other steps.
    dispatch_id: str | None = None


class SubmitUnknown(BufstoreError):
    """The item was sent and no answer came, or no worker could be notified: it may or may not be worked on.

    Submit it again if the work may be done twice. It may still arrive, behind items that are submitted later: where the
    newest counts (`Policy.REPLACE`), have the sink refuse what is older than what it has, or submit the newest again.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            f"the item for {key!r} may or may not be submitted, or may arrive behind items that are submitted later: "
            f"{reason}"
        )
        self.key = key


class TokenLost(BufstoreError):
    """The token or lock is no longer ours, or may not be. Stop: the next holder does the rest."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key!r} was lost: {reason}")
        self.key = key
        self.reason = reason


class CallTimeout(BufstoreError):
    """A call of a blocking store did not end in time. A write may be stored: repeat it with its key, or look."""


class ReadNotFresh(BufstoreError):
    """The read could not reach its consistency level in time; nothing older is returned instead."""


class FlushTimeout(BufstoreError):
    """The flush did not reach its target before the deadline.

    Nothing is lost: the entries stay in the log, or wait in Postgres. See ``statistics()`` and ``health()`` for why.
    """

    def __init__(
        self, thread_id: str | None, *, target: int, flushed: int, reason: str = "", partition: int | None = None
    ) -> None:
        """`partition`: the first one not flushed up to its `target`; `reason`: its owner, and what holds it up."""
        who = "all threads" if thread_id is None else f"thread {thread_id!r}"
        where = f", partition {partition}" if partition is not None else ""
        why = f" ({reason})" if reason else ""
        super().__init__(f"{who}{where}: timed out at position {flushed}, the target is {target}{why}")
        self.thread_id = thread_id
        self.partition = partition
        self.reason = reason
        self.target = target
        self.flushed = flushed


class StoreMisconfigured(BufstoreError):
    """Postgres refuses for a reason that only an operator can remove: login, missing table, permission, read-only.

    Also raised when an app's own store breaks its contract.
    """


class LogRolledBack(BufstoreError):
    """The log ends before what Postgres has applied, or is no longer the same log.

    Nothing more is appended or flushed: a new acknowledged entry could not be told from a lost one. Stop all instances
    and run ``bufstore repair`` (`bufstore.repair`), which only looks at first. Where a process that began without
    Postgres learns that the log belongs to another database, the message says what to do instead.
    """

    def __init__(self, reason: str, way_out: str = "stop all instances and see `bufstore repair`") -> None:
        super().__init__(f"{reason}; {way_out}" if way_out else reason)
        self.reason = reason
        self.way_out = way_out


class DataLoss(BufstoreError):
    """A reader of the log (a Spark job, an archive) found that messages which it has not read yet are gone.

    They are in Postgres if they were purged after their flush. With ``failOnDataLoss=false``, or from another position,
    the reader goes on without them.
    """


class PositionPassed(BufstoreError):
    """A job reads threads as they were at a position of the log, and Postgres does not have that state any more."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(
            f"Postgres is already past position {position}: {why}. Read at a later position, or hold it with "
            "hold_position in time"
        )
        self.position = position


class ArchiveOvertaken(BufstoreError):
    """Another archive run was faster with the same range. What this run wrote does not count; nothing is lost."""


class MalformedEntry(BufstoreError):
    """These bytes are not an entry of a version that this release can read."""


class EmbeddedError(BufstoreError):
    """An embedded server did not start, stop or answer in time."""
