"""Configuration: frozen values, units in the names, relations checked at construction.

Each option says who sets it: *developer* (writes the app), *operator* (runs it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from ssl import SSLContext
from typing import Any, Self, TypeAlias
from urllib.parse import unquote, urlsplit

from bufstore.errors import ConfigError
from bufstore.tls_files import TlsFiles

#: The most lanes of a log. Each lane has its own connections and flusher in every process.
LANES_MAX = 64

#: The least `LogConfig.max_bytes`.
LOG_BYTES_MIN = 1 << 20

#: More than anybody waits; an int that is larger than a float can be is no time.
SECONDS_MAX = 1e9

#: No failover loses more than this, in seconds. A restore may lose more; archives are for restores.
FAILOVER_WINDOW_MAX_S = 30 * 86_400.0

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_USER = re.compile(r"^([a-z]+://)?.*@", re.DOTALL)
_SCHEME = re.compile(r"(nats|tls|wss?)://", re.IGNORECASE | re.ASCII)
#: What looks like one to whoever wrote it; else its name would be the user.
_ANY_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE | re.ASCII)
#: Between two URLs of one text. A comma in a password is none: an "@" comes behind it, and no scheme.
_BETWEEN = re.compile(r",(?=\s*(?:nats|tls|wss?)://|[^@]*\Z)", re.IGNORECASE)
#: In a login: a server before a comma, or a user and a password that begins with a number.
_HOST_AND_PORT = re.compile(r"[^:]*:[0-9]+,")
#: The part of a URL behind its user.
_ADDRESS = re.compile(r"(?!.*://)[^\s?#,\\\x00-\x1f\x7f]+")
#: Words of a subject: no wildcard, nothing that ends a line of the protocol.
_SUBJECT = re.compile(r"[^\s.*>\x00-\x1f\x7f]+(\.[^\s.*>\x00-\x1f\x7f]+)*\.?")


def check_name(value: object, what: str) -> None:
    """Raise ConfigError unless `value` can be a name on a server. `what` says in words whose name it is."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(f"{what} must be 1 to 64 characters out of A-Z, a-z, 0-9, _ and -")


def large_bytes_max(log_bytes: int) -> int:
    """Return how many bytes of a log entries in parts may fill: the groups behind them need the rest."""
    return log_bytes - log_bytes // 16


def check_failover_window(seconds: float, what: str) -> None:
    """Raise ConfigError for an impossible `LogConfig.failover_window_s`. `what` names the setting in words."""
    if not 0 < seconds <= FAILOVER_WINDOW_MAX_S:
        raise ConfigError(
            f"{what} must be positive and at most 30 days ({FAILOVER_WINDOW_MAX_S:.0f} s): entries stay in the log "
            "and erasures wait that long. If Postgres may lose more, set LogConfig.archive"
        )


def check_kinds(config: Any) -> None:
    """Raise ConfigError if a field of a configuration is of another type, like 8.0 or "8" for an int.

    A field of several texts becomes a tuple; one text alone counts as several.
    """
    for f in fields(config):
        value, kind = getattr(config, f.name), str(f.type)
        if value is None and kind.endswith(" | None"):
            continue
        what = f"{type(config).__name__}.{f.name}"
        match kind.removesuffix(" | None"):
            case "int" if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{what} must be a whole number (an int), not {value!r}")
            case "float":
                try:
                    float(check_number(value, what))
                except OverflowError:
                    raise ConfigError(f"{what} must be a number that a float can hold") from None
            case "bool" if type(value) is not bool:
                raise ConfigError(f"{what} must be True or False, not {value!r}")
            case "str" if not isinstance(value, str):
                raise ConfigError(f"{what} must be a str, not {type(value).__name__}")  # it may be a secret
            case "str | Path" if not isinstance(value, (str, PathLike)):
                raise ConfigError(f"{what} must be a str or a Path, not {type(value).__name__}")
            case "Sequence[str]":
                texts = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
                if not all(isinstance(text, str) for text in texts):
                    raise ConfigError(f"{what} must be {'URLs' if f.metadata.get('url') else 'texts'}, each a str")
                object.__setattr__(config, f.name, texts)
            case "Mapping[str, Any]" if not isinstance(value, Mapping):
                raise ConfigError(f"{what} must be a mapping, not {type(value).__name__}")
            case "SSLContext | TlsFiles" if not isinstance(value, (SSLContext, TlsFiles)):
                raise ConfigError(f"{what} must be an ssl.SSLContext or TlsFiles, not {type(value).__name__}")
            case "LogConfig" if not isinstance(value, LogConfig):
                raise ConfigError(f"{what} must be a LogConfig, not {type(value).__name__}")


def check_number(value: object, what: str) -> float:
    """Return `value` if it is an int or a float. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{what} must be a number, not {value!r}")
    return value


def check_timeout(value: object, what: str) -> None:
    """Raise ConfigError unless `value` is a number of seconds above 0."""
    if not 0 < check_number(value, what) <= SECONDS_MAX and value != float("inf"):
        raise ConfigError(f"{what} must be a positive number of seconds")


def as_seconds(value: object, what: str) -> float:
    """Return a time to wait that any clock can add. Raises ConfigError unless `value` is a number."""
    # A negative time is what is left of a caller's deadline that has passed. `max` also turns NaN, which asyncio
    # cannot handle, into 0.
    return max(0.0, min(check_number(value, what), SECONDS_MAX))


class Secretive:
    """A repr that shows no secret: it masks fields marked ``secret``, and the logins in URLs."""

    def __repr__(self) -> str:
        shown = []
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.metadata.get("secret") and value is not None:
                value = "***"
            elif f.metadata.get("url"):
                value = [mask_url(u) for u in value]
            shown.append(f"{f.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def mask_url(url: str) -> str:
    """Return the URL with any user, password or token in it replaced by ``***``."""
    # urlsplit cannot do this: a password may hold any character, so everything up to the last "@" is secret.
    return _USER.sub(lambda m: (m[1] or "") + "***@", url)


def urls_in(text: str) -> tuple[str, ...]:
    """Return the NATS URLs in a text, where commas separate them. Each is to be checked: see `split_url`.

    They have no space around them, and their schemes are in lower case, as whoever uses a URL looks for them.
    """
    found = []
    for url in filter(None, map(str.strip, _BETWEEN.split(text))):
        scheme = m[0] if (m := _SCHEME.match(url)) else ""
        found.append(scheme.lower() + url[len(scheme) :])
    return tuple(found)


def split_url(url: str) -> tuple[str, str | None, str | None]:
    """Return a NATS URL without its user, the user (a token if it stands alone) and the password, percent-decoded.

    Raises ConfigError, which shows nothing of the URL, when the part behind the user is no address, or when it may be
    several URLs.
    """
    scheme = m[0].lower() if (m := _SCHEME.match(url)) else ""
    # The login ends at the last "@": a password may hold any character.
    login, has_login, address = url[len(scheme) :].rpartition("@")
    # Before a comma, another server may stand: with a login of its own, or as what would be the user.
    if "@" in login.rpartition(",")[0] or "," in login.partition(":")[0] or _HOST_AND_PORT.match(login):
        raise ConfigError(
            "cannot read NATS URLs that are separated by commas: write the scheme (nats://) of each, and in a password "
            "%2C for a comma and %40 for an @"
        )
    bare = scheme + address
    usable = False
    with suppress(ValueError):  # the port is no number
        parts = urlsplit(scheme + address if scheme else f"nats://{address}")
        usable = bool(parts.hostname) and parts.port != 0 and _ADDRESS.fullmatch(address) is not None
        usable = usable and (scheme.startswith("ws") or parts.path in ("", "/"))
        usable = usable and (scheme != "" or _ANY_SCHEME.match(url) is None)
    if not usable:
        raise ConfigError(
            "cannot read a NATS URL: write nats://[user:password@]host[:port], with %XX for special characters"
        )
    user, has_password, password = login.partition(":")
    return bare, unquote(user) if has_login else None, unquote(password) if has_password else None


@dataclass(frozen=True, kw_only=True, repr=False)
class NatsConfig(Secretive):
    """How to reach NATS. Set by the operator.

    At most one way to sign in: `credentials` (a .creds file's path, or its contents), `user` + `password`,
    `token`, or what the URL carries.
    """

    #: One text may hold several URLs, separated by commas (one in a password is written %2C, an @ in one %40).
    #: The other servers of a cluster are learned from these; a process that starts needs one that is there.
    servers: Sequence[str] = field(default=("nats://127.0.0.1:4222",), metadata={"url": True})
    credentials: str | Path | None = field(default=None, metadata={"secret": True})
    user: str | None = None
    password: str | None = field(default=None, metadata={"secret": True})
    token: str | None = field(default=None, metadata={"secret": True})
    #: The next connection uses a CA or client certificate that is loaded into the context later, or what the files hold
    #: then. Only files can be sent to another process.
    tls: SSLContext | TlsFiles | None = None
    tls_hostname: str | None = None
    #: JetStream domain: needed on a leaf node; excludes api_prefix.
    domain: str | None = None
    #: JetStream API prefix, e.g. "$JS.other.API" (an import from another account).
    api_prefix: str | None = None
    connect_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        check_kinds(self)
        object.__setattr__(self, "servers", tuple(url for text in self.servers for url in urls_in(text)))
        if not self.servers:
            raise ConfigError("NatsConfig.servers is empty")
        if (self.user is None) != (self.password is None):
            raise ConfigError("NatsConfig: user and password go together")
        ways = [n for n in ("credentials", "user", "token") if getattr(self, n) is not None]
        if len(ways) > 1:
            raise ConfigError(f"NatsConfig: choose only one of {', '.join(ways)}")
        if self.domain and self.api_prefix:
            raise ConfigError("NatsConfig: domain and api_prefix exclude each other")
        check_timeout(self.connect_timeout_s, "NatsConfig.connect_timeout_s")
        for name in ("domain", "api_prefix"):
            value = getattr(self, name)
            if value is not None and not _SUBJECT.fullmatch(value):
                raise ConfigError(
                    f"NatsConfig.{name} must be subject tokens separated by dots, without wildcards or spaces"
                )
        for url in self.servers:
            split_url(url)

    @property
    def tls_context(self) -> SSLContext | None:
        """What a connection that is made now uses. Raises ConfigError for files that cannot be used."""
        return self.tls.context() if isinstance(self.tls, TlsFiles) else self.tls

    @property
    def api(self) -> str:
        """The subject prefix of the JetStream API, without a trailing dot."""
        if self.domain:
            return f"$JS.{self.domain.rstrip('.')}.API"
        return (self.api_prefix or "$JS.API").rstrip(".")

    def published_on(self, subject: str) -> str:
        """Return the subject on which to publish a message that is stored on `subject`.

        With a `domain`, leaf nodes pass on a bucket's messages only below the API's prefix. An `api_prefix` changes no
        subject: an app that imports the API of another account imports the bucket's subjects as they are.
        """
        return f"{self.api}.{subject}" if self.domain and subject.startswith("$KV.") else subject


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """The stream and the bucket. Set by the operator, the same for every instance of one deployment."""

    stream: str = "THREADLOG"
    bucket: str = "thread-hot"
    #: The first word of the log's subjects.
    subject: str = "thread"
    #: How many partitions the threads are split into; fixed for the life of a stream.
    partitions: int = 8
    #: How many logs the threads are shared among, each with a leader of its own (docs/OPERATIONS.md, Lanes); fixed
    #: for the life of a stream.
    lanes: int = 1
    #: Which of these logs this one is. Leave it at 0: one configuration, the first lane's, stands for all lanes.
    lane: int = 0
    replicas: int = 1
    #: Server tags that the stream and bucket must be placed on.
    placement_tags: Sequence[str] = ()
    placement_cluster: str | None = None
    #: The limit of the log on disk (of each lane's log), which the server reserves. Flushed entries make room for new
    #: ones; when unflushed ones fill the log, a write raises LogFull.
    max_bytes: int = 2 << 30
    #: The largest entry. An entry over the server's max_payload is stored in several messages. At most 15/16 of
    #: max_bytes, which also bounds the default.
    max_entry_bytes: int = 64 << 20
    #: How many seconds of commits Postgres may lose in a failover: entries stay in the log at least this long after
    #: their flush, and no operation takes longer than half of it. 30 days at most. The log keeps this setting;
    #: `change_log` changes it on a running log.
    failover_window_s: float = 60.0
    #: True: nothing leaves the log before `bufstore.spark.archive` has it, and a log that nobody archives fills up
    #: (LogFull). The log keeps this setting; it is changed like `failover_window_s`.
    archive: bool = False

    def __post_init__(self) -> None:
        for name in ("stream", "bucket", "subject"):
            check_name(getattr(self, name), f"LogConfig.{name}")
        check_kinds(self)
        if not 1 <= self.partitions <= 256:
            raise ConfigError("LogConfig.partitions must be 1 to 256")
        if not 1 <= self.lanes <= LANES_MAX:
            raise ConfigError(f"LogConfig.lanes must be 1 to {LANES_MAX}")
        if not 0 <= self.lane < self.lanes:
            raise ConfigError("LogConfig.lane must be one of the lanes")
        if not 1 <= self.replicas <= 5:
            raise ConfigError("LogConfig.replicas must be 1 to 5")
        if self.max_bytes < LOG_BYTES_MIN:
            raise ConfigError("LogConfig.max_bytes must be at least 1 MiB")
        if not 1 << 10 <= self.max_entry_bytes <= 512 << 20:
            raise ConfigError("LogConfig.max_entry_bytes must be 1 KiB to 512 MiB")
        if self.max_entry_bytes > self.entry_bytes_max and self.max_entry_bytes != LogConfig.max_entry_bytes:
            raise ConfigError(
                f"LogConfig.max_entry_bytes ({self.max_entry_bytes}) must be at most 15/16 of LogConfig.max_bytes "
                f"({self.entry_bytes_max}): lower it, or raise max_bytes"
            )
        check_failover_window(self.failover_window_s, "LogConfig.failover_window_s")

    @property
    def entry_bytes_max(self) -> int:
        """The largest entry: `max_entry_bytes`, or what a log of `max_bytes` can hold if that is less."""
        return min(self.max_entry_bytes, large_bytes_max(self.max_bytes))


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """How the buffer works. The defaults fit most apps; each field names who has a reason to change it."""

    log: LogConfig = field(default_factory=LogConfig)
    #: Developer: how long a write may take before OutcomeUnknown, LogUnavailable or LogFull is raised. What comes
    #: before the first write of a run has times of its own, so that the log has all of this one: the run's registration
    #: as long again, and the check of its parent `read_timeout_s`. If a thread that is there gets the parent, both may
    #: take up to four times as long.
    append_timeout_s: float = 10.0
    #: Developer: how long a read may try to reach its consistency level. Where the event loop stands still when a
    #: call's time is over, because the app computes on it or the process was stopped, the call goes on, or begins anew.
    read_timeout_s: float = 10.0
    #: Developer: how long force_flush waits.
    flush_timeout_s: float = 30.0
    #: Developer: False in processes that only write and read, while others flush.
    flusher: bool = True
    #: Operator: how long entries are gathered for one transaction.
    flush_interval_s: float = 0.5
    #: Operator: a transaction starts early at this many entries or payload bytes; also the memory bound of the flusher.
    flush_max_entries: int = 10_000
    flush_max_bytes: int = 64 << 20
    #: Operator: when an owner ends, others flush its partitions within this time.
    lease_s: float = 6
    #: Operator: how long flushed entries stay in the log for readers of the log, if `outage_reserve` leaves the room.
    retain_after_flush_s: float = 24 * 3600.0
    #: Operator: the fraction of max_bytes that is kept free of retained entries for an outage of Postgres. A smaller
    #: fraction allows longer retention; a larger one, longer outages, even when several processes restart.
    outage_reserve: float = 0.75
    #: Operator: with this many entries in quarantine, no more are parked: poison waits in the log (`flush_trouble`).
    quarantine_max: int = 10_000
    #: Developer: how many threads (and runs) have their last state remembered, for writes of one round trip.
    cached_threads: int = 20_000

    def __post_init__(self) -> None:
        check_kinds(self)
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value < float("inf"):
                raise ConfigError(f"BufferConfig.{f.name} must be positive")
        self.check_fits(self.log.failover_window_s)
        if self.retain_after_flush_s < self.log.failover_window_s:
            raise ConfigError("BufferConfig.retain_after_flush_s must be at least LogConfig.failover_window_s")
        if self.outage_reserve >= 1:
            raise ConfigError("BufferConfig.outage_reserve must be less than 1")
        if not 3 <= self.lease_s <= 8:
            raise ConfigError("BufferConfig.lease_s must be 3 to 8")

    def check_fits(self, window_s: float) -> None:
        """Raise ConfigError when an operation may take longer than a log with this failover window allows."""
        # An entry may only leave the log when no operation that began before its commit still runs: a read that
        # took Postgres' answer before the commit must still find the entry in the log.
        for name in ("append_timeout_s", "read_timeout_s"):
            longest = getattr(self, name)
            if window_s < 2 * longest:
                raise ConfigError(
                    f"BufferConfig.{name} ({longest:g} s) must be at most half of the log's failover_window_s "
                    f"({window_s:g} s): lower it, or first raise the log's window (`bufstore log set`)"
                )

    @classmethod
    def fitting(cls, log: LogConfig, **options: Any) -> Self:
        """Return a configuration for a log that others have set up, with the defaults adapted to its window."""
        longest = log.failover_window_s / 2
        fitted: dict[str, Any] = {
            "append_timeout_s": min(cls.append_timeout_s, longest),
            "read_timeout_s": min(cls.read_timeout_s, longest),
            "retain_after_flush_s": max(cls.retain_after_flush_s, log.failover_window_s),
        }
        return cls(**({"log": log} | fitted | options))


#: How to reach NATS, as an app may say it: a URL, several URLs (also in one text, separated by commas), keyword fields
#: of a `NatsConfig`, or one.
ToNats: TypeAlias = str | Sequence[str] | NatsConfig | Mapping[str, Any]


def as_nats_config(value: ToNats) -> NatsConfig:
    """Return `value` as a NatsConfig. Raises ConfigError."""
    if isinstance(value, NatsConfig):
        return value
    if isinstance(value, Mapping):
        if unknown := value.keys() - {f.name for f in fields(NatsConfig)}:
            raise ConfigError(f"NatsConfig has no {', '.join(sorted(map(str, unknown)))}")
        return NatsConfig(**value)
    if not isinstance(value, Iterable):
        raise ConfigError(f"nats must be a URL, a list of URLs or a NatsConfig, not {type(value).__name__}")
    return NatsConfig(servers=(value,) if isinstance(value, str) else tuple(value))
