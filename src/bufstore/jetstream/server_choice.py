"""Which of several servers to connect to, and when to leave one. Pure: no I/O, no clock.

A node that is cut off from its cluster takes connections and answers PINGs, but no node that it reaches leads a stream:
requests get an error, or no answer. The other nodes may do well, so after some time without a success the next one is
tried. When no server does better, the cluster has no leaders; then each server gets more time than the one before.
A single server is left, too: its address may stand for several nodes, and a new connection reaches another one.

A server tells its clients the addresses of its cluster. They help where the given ones do not. But they may be good for
nothing (a network that translates addresses, pods that are long gone), and each may cost a whole timeout. So they come
behind the given ones, one at a time, and only after some seconds without a connection, or when the only address that
was given is left again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

from bufstore.config import Secretive, split_url
from bufstore.errors import ConfigError

#: Seconds for which a server may serve nothing, at first and at most.
_PATIENCE_S, _PATIENCE_MAX_S = 3.0, 60.0
#: A failure longer ago than this says nothing about now.
_GAP_S = 10.0
#: A process that has left no server for so long (and may only read) begins with the first patience again.
_CALM_S = 600.0
_NEVER = float("-inf")
#: How many addresses that servers have told are remembered.
_TOLD_MAX = 32
#: JetStream's errors for "no leader", or no known leader: 10008 and 10009. An answer with such an error is short.
_UNAVAILABLE, _NO_LEADER = b'"err_code":10008', b'"err_code":10009'
_ERROR_BYTES_MAX = 512


def leaderless(answer: bytes) -> bool:
    """Return whether JetStream says that no node leads, instead of answering."""
    return len(answer) < _ERROR_BYTES_MAX and (_UNAVAILABLE in answer or _NO_LEADER in answer)


@dataclass(frozen=True, repr=False)
class Server(Secretive):
    """Where to connect to."""

    #: With the login, if there is one in the URLs that were given.
    url: str = field(metadata={"secret": True})
    #: The name that its certificate must have; None: the one in the URL, or that of `NatsConfig.tls_hostname`.
    tls_name: str | None = None


@dataclass(slots=True)
class ServerChoice:
    """The choice among the servers that were given, and those that they have told."""

    given: Sequence[Server]
    #: The number of the given server that was connected to last; at first a random one, so that a restarted process may
    #: begin with another.
    _at: int
    #: The server that was connected to last.
    _last: Server | None = None
    #: The servers that others have told, in the order in which to try them.
    _told: list[Server] = field(default_factory=list)
    #: Whether the last server was left, because it served nothing; and how many were since a write was answered.
    _left: bool = False
    _leaves: int = 0
    #: Whether a server that was told has ever accepted us.
    _reached: bool = False
    #: When the first round since the last connection was made; None: not yet.
    _away_since: float | None = None
    #: When it began to serve nothing, when that was last noticed, when it last took a write, when one was last left.
    _failing_since: float = _NEVER
    _failed_at: float = _NEVER
    _wrote_at: float = _NEVER
    _left_at: float = float("inf")
    _patience_s: float = _PATIENCE_S

    def round(self, now: float) -> list[Server]:
        """Return the servers of the next round, in the order in which to try them.

        Those given begin behind the one that was lost. One that was told comes behind them, in each round another one,
        if there has been no connection for some seconds. One that was left comes last of all; a single given one, whose
        address may stand for several nodes, only from the second time on.
        """
        if self._away_since is None:
            self._away_since = now
        count = len(self.given)
        tried = [self.given[(self._at + 1 + n) % count] for n in range(count)]
        left = self._left and self._leaves >= (1 if count > 1 else 2)
        if left or now - self._away_since >= _PATIENCE_S:
            tried += self._told[:1]
            self._told = self._told[1:] + self._told[:1]
        return sorted(tried, key=lambda server: left and server == self._last)

    @property
    def single(self) -> bool:
        """Whether a single address is known to be any good."""
        return len(self.given) == 1 and not self._reached

    def connected(self, server: Server, told: Iterable[str] = ()) -> None:
        """Note that this server is the connected one from now on, and the addresses that it has told so far."""
        self._last, self._left, self._failed_at, self._away_since = server, False, _NEVER, None
        if server in self.given:
            self._at = self.given.index(server)
        else:
            self._reached = True
        self.told(told)

    def told(self, addresses: Iterable[str]) -> None:
        """Note addresses ("host:port") of the cluster, as the connected server tells them."""
        if self._last is not None:
            known = {server.url for server in (*self.given, *self._told)}
            new = [server for server in _servers_at(addresses, self._last) if server.url not in known]
            self._told = [*new, *self._told][:_TOLD_MAX]

    def wrote(self, now: float) -> None:
        """Note that a write was answered. A leader needs others for a write; one that was left answers reads, too."""
        self._failed_at, self._wrote_at, self._patience_s, self._leaves = _NEVER, now, _PATIENCE_S, 0

    def failed(self, since: float, now: float) -> bool:
        """Note that the server did not serve a request that was sent at `since`; return whether to leave the server."""
        if since < self._wrote_at:
            return False
        if since - self._failed_at > _GAP_S:
            self._failing_since = since
        self._failed_at = now
        if now - self._left_at > _CALM_S:
            self._patience_s = _PATIENCE_S
        if now - self._failing_since < self._patience_s:
            return False
        self._left, self._failed_at, self._left_at = True, _NEVER, now
        self._leaves += 1
        self._patience_s = min(2 * self._patience_s, _PATIENCE_MAX_S)
        return True


def _servers_at(addresses: Iterable[str], told_by: Server) -> list[Server]:
    """Return the servers at these addresses, with the login, protocol and name of the one that has told them."""
    bare, *login = split_url(told_by.url)
    begin = told_by.url.removesuffix(bare.rpartition("//")[2])
    name = told_by.tls_name or _host(bare)
    found = []
    for address in addresses:
        with suppress(ConfigError):  # not an address
            url = begin + address
            at, *as_told = split_url(url)
            if as_told == login:
                found.append(Server(url, name if _is_number(_host(at)) and not _is_number(name) else None))
    return found


def _host(url: str) -> str:
    return urlsplit(url if "//" in url else f"nats://{url}").hostname or ""


def _is_number(host: str) -> bool:
    with suppress(ValueError):
        ip_address(host)
        return True
    return False
