"""Settings of a mailbox: defaults that fit, units in the names, relations checked at construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from bufstore.config import check_kinds, check_name
from bufstore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MailboxConfig:
    """How a mailbox works, on any store. Set by the developer."""

    #: How long a claim holds, unless `claim` is given another `lease_s`.
    lease_s: float = 30.0
    #: How long one call may begin another try. One that is under way then may take some seconds more: on NATS up to 5.
    timeout_s: float = 5.0
    #: How often a sweeper takes back expired claims and signals threads whose delayed work has become due.
    sweep_interval_s: float = 5.0
    #: The largest batch of a sweep, of expired claims, due threads or finished dispatches. A pass handles at most ten
    #: batches of each; the next pass goes on.
    sweep_limit: int = 1000
    #: How long finished dispatches are kept; None: until `purge_finished` is called.
    keep_finished_s: float | None = 7 * 24 * 3600.0
    #: Largest payload of a dispatch, in bytes. Each renewal of a lease writes the payload again.
    payload_max: int = 128 << 10
    #: The most signals that one request asks for.
    signal_batch_size: int = 32
    #: How long a request for signals waits.
    signal_fetch_expires_s: float = 0.5
    #: A signal that found nothing to claim comes back after this long, doubled each time …
    signal_nack_base_delay_s: float = 0.5
    #: … up to this.
    signal_nack_max_delay_s: float = 30.0
    #: The most handlers that a worker runs at once.
    max_concurrent_handlers: int = 32
    #: A signal that is not answered comes to another worker after this long.
    signal_ack_wait_s: float = 30.0
    #: How long a live delivery waits for its answer.
    live_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        check_kinds(self)
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"MailboxConfig.{f.name} must be positive")
        if self.lease_s < 0.001:
            raise ConfigError("MailboxConfig.lease_s must be 0.001 or more")
        if max(self.sweep_limit, self.signal_batch_size) >= 1 << 31:
            raise ConfigError("MailboxConfig.sweep_limit and signal_batch_size must be below 2**31")
        if self.signal_nack_max_delay_s < self.signal_nack_base_delay_s:
            raise ConfigError("MailboxConfig.signal_nack_max_delay_s must not be below signal_nack_base_delay_s")
        if self.signal_fetch_expires_s > self.signal_ack_wait_s:
            raise ConfigError("MailboxConfig.signal_fetch_expires_s must not be above signal_ack_wait_s")
        if self.payload_max > 512 << 10:
            # A claim carries its dispatch, and a server's max_payload is 1 MiB by default.
            raise ConfigError("MailboxConfig.payload_max must not be above 512 KiB")


@dataclass(frozen=True, kw_only=True)
class NatsMailboxNames:
    """The names of a mailbox on NATS, and its placement. They are the same for every instance of a deployment."""

    #: The bucket that holds everything.
    bucket: str = "dispatch-state"
    #: The durable consumer that all workers share.
    consumer: str = "dispatch-worker"
    #: First word of the subjects of live deliveries.
    live_subject: str = "dispatch-live"
    replicas: int = 1
    placement_tags: Sequence[str] = ()
    placement_cluster: str | None = None
    #: Limit of the bucket in bytes, which the server reserves on disk; -1: no limit.
    max_bytes: int = 1 << 30
    #: The most signals that workers may have, or that may wait for their delay, at once, over all instances.
    signals_pending_max: int = 20_000

    def __post_init__(self) -> None:
        for name in ("bucket", "consumer", "live_subject"):
            check_name(getattr(self, name), f"NatsMailboxNames.{name}")
        check_kinds(self)
        if not 1 <= self.replicas <= 5:
            raise ConfigError("NatsMailboxNames.replicas must be 1 to 5")
        if self.max_bytes != -1 and self.max_bytes < 1:
            raise ConfigError("NatsMailboxNames.max_bytes must be positive, or -1 for no limit")
        if self.signals_pending_max < 1:
            raise ConfigError("NatsMailboxNames.signals_pending_max must be positive")
