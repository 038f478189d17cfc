"""Why no connection could be made, and whether a later attempt may succeed. No I/O."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from bufstore.printable import printable

#: What the server, or libpq itself, says to a client that will never get in. Only the text says so, if it is English:
#: libpq gives no SQLSTATE here, and psycopg does not have libpq put it into the text (PQsetErrorVerbosity).
_REFUSED = re.compile(
    r"authentication failed|pg_hba\.conf (entry|rejects)|(role|database) \".*\" does not exist|permission denied|"
    r"not permitted to log in|cannot connect to invalid database|no password supplied|certificate verify failed|"
    r"server does not support SSL|SSL engine|(valid client|request an SSL) certificate|requirepeer|"
    r" alert ((\w+ )?certificate|unknown ca|protocol version|access denied|handshake failure)|"
    r"does not match host name|channel binding (is )?required|authentication method requirement|"
    r"(mechanisms are|authentication( method \d+)? not) supported|requires OAuth|GSSAPI encryption, but|"
    r"unrecognized configuration parameter|invalid value for parameter|invalid command-line argument|"
    r"unsupported startup parameter|requires a (Boolean )?value|without restarting the server|"
    r"(certificate|private key) file|no such (database|user)|frontend protocol|min_protocol_version|"
    r"without a valid SSL certificate|ALPN protocol|no application protocol|unrecognized name|no protocols available|"
    r"could not find digest|server certificate signature algorithm|host name must be specified|"
    # what listens there is no Postgres
    r"invalid response to SSL negotiation|expected authentication request|"
    # PgBouncer's own; the rest of what it refuses has Postgres' words. Not "bouncer config error": it says that also
    # when Postgres ends the session in which it asks for the password (`auth_query`), as each restart does.
    r"FATAL:  SSL required|login rejected|no authentication method is found|"
    # from here on, libpq did not even try
    r"invalid (\S+|integer|port|SCRAM \S+|SSL protocol) (value|number|key|version)|could not match|weak sslmode|"
    r"could not parse network address|support is not compiled in|service file|definition of service|"
    r"GSSAPI encryption required|local user with ID|require_auth method|setsockopt\(\w+\) failed: Invalid argument|"
    r"is too long \(maximum",
    re.IGNORECASE | re.DOTALL,
)
#: What a standby refuses because its primary does, too: logins, roles and databases are copied, settings are not.
_REFUSED_BY_ALL = re.compile(
    r"password authentication failed|(role|database) \".*\" does not exist|permission denied for database|"
    r"not permitted to log in|no password supplied",
    re.IGNORECASE | re.DOTALL,
)
#: What to look at, where a reason does not say it. OpenSSL does not say more either.
_ADVICE = (
    (r"certificate verify failed$", "its issuer is not in sslrootcert, or a certificate is out of date"),
    (
        r" alert certificate required|valid client certificate",
        "the server asks for a client's certificate: set sslcert; libpq passes over a file that is not there",
    ),
    (r" alert (unknown ca|(\w+ )?certificate)", "the server refuses the client's certificate, sslcert"),
    (r"bad decrypt", "sslpassword is missing or wrong"),
    (
        r"could not find digest|server certificate signature algorithm",
        "SCRAM cannot be bound to the server's certificate, as to one with an Ed25519 key: set "
        "channel_binding=disable, or give the server a certificate with an RSA or ECDSA key",
    ),
    (r"response to SSL negotiation|authentication request from", "no Postgres listens there"),
    # An outage, as a Postgres that cannot fork says why without TLS. Only with sslnegotiation=direct.
    (
        r"wrong version number",
        "what answers there does not speak TLS at once: a Postgres before 17, or one that can begin no session, a "
        "pooler, or no Postgres at all",
    ),
)
#: Where psycopg tells of an attempt; a host may have several addresses.
_ATTEMPT = re.compile(r"^- (host: .*, port: .*), hostaddr: ", re.MULTILINE)
#: A reason is one line, but a quoted name in it may have several.
_REASON = re.compile(
    r"failed: ((?:\"[^\"]*\"|.)*)|connection is bad: ((?:\"[^\"]*\"|.)*)|"
    r"(connection timeout.*)|(failed to resolve.*)|(could not match.*)"
)
#: A parameter's value in a reason. It may be anything that somebody wrote into the wrong place.
_VALUE = re.compile(
    r"(: )\".*\"|(integer value |require_auth method |requirepeer specifies )\".*\"(?= (?:for connection option|is "
    r"specified|cannot be)|, but)|(command-line argument[^:]*: ).*",
    re.DOTALL,
)


def reason_in(text: str) -> str:
    """Return why libpq could not connect, as psycopg's error says it, in one line and without a parameter's value.

    Where that does not say what to look at, advice follows.

    Of several servers, one that is away may be the primary, and would let this client in. So if one refuses it for what
    may be a setting of its own, that is not the reason. The text names host, user, database and service, never a
    password.
    """
    _, *attempts = _ATTEMPT.split(text)
    reasons = [_reason_of(attempt) for attempt in _by_server(attempts).values()] or [_reason_of(text)]
    by_all = filter(_REFUSED_BY_ALL.search, reasons)
    away = itertools.filterfalse(_REFUSED.search, reversed(reasons))
    reason = _VALUE.sub(r"\1\2\3***", next(itertools.chain(by_all, away, reasons)))
    advice = [f" ({what})" for pattern, what in _ADVICE if re.search(pattern, reason)]
    return printable("".join([reason, *advice[:1]]))


def _by_server(attempts: Sequence[str]) -> dict[str, str]:
    """Return what failed, by server; `attempts` are pairs of a server and how an attempt at it ended."""
    found: dict[str, str] = {}
    for server, failed in zip(attempts[::2], attempts[1::2], strict=True):
        found[server] = found.get(server, "") + failed
    return found


def _reason_of(text: str) -> str:
    """Return why a server was not connected to. If one of its addresses answers with a refusal, the server does."""
    reasons = ["".join(found) for found in _REASON.findall(text)] or ["connection failed"]
    return next(filter(_REFUSED.search, reasons), reasons[-1])


def is_refusal(reason: str) -> bool:
    """Return whether this client will never get in, unless somebody mends what the reason says."""
    return _REFUSED.search(reason) is not None
