"""How a client signs in to NATS. Credentials files (.creds) are checked before nats-py uses them."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from nats.aio.client import RawCredentials

from bufstore.config import NatsConfig, split_url
from bufstore.errors import ConfigError
from bufstore.jetstream.server_choice import Server

_JWT = "BEGIN NATS USER JWT"
_SEED = "BEGIN USER NKEY SEED"
#: Seconds between two PINGs. A dead server is noticed after at most two such intervals.
_PING_INTERVAL_S = 5


def read_credentials(credentials: str | Path) -> RawCredentials:
    """Return the credentials for nats-py: a file's contents (read anew, for it may be renewed) or as given.

    Raises ConfigError when they cannot be used. The error shows neither the contents nor the path: contents may have
    been taken for a path.
    """
    if find_spec("nkeys") is None:
        raise ConfigError("NatsConfig.credentials need nkeys, which is not installed: pip install 'bufstore[nkeys]'")
    import nkeys  # type: ignore[import-untyped]

    text = str(credentials)
    if "-----BEGIN" not in text:
        try:
            text = Path(text).read_text(encoding="utf-8")  # with any ends of lines
        except (OSError, ValueError) as e:
            reason = getattr(e, "strerror", None) or "it is not a text file, or its path is invalid"
            raise ConfigError(f"cannot read the file that NatsConfig.credentials names: {reason}") from None
    # Without these lines nats-py would look for them forever, and block the event loop.
    if _JWT not in text or _SEED not in text:
        raise ConfigError(f"NatsConfig.credentials are invalid: they need a line with {_JWT!r} and one with {_SEED!r}")
    lines = text.splitlines()
    seed = next((after for line, after in pairwise(lines) if _SEED in line), "")
    try:
        nkeys.from_seed(bytearray(seed.encode())).wipe()
    except Exception:
        raise ConfigError("NatsConfig.credentials are invalid: their seed is damaged") from None
    return RawCredentials("\n".join(lines) + "\n")


def expiry(credentials: str | Path | None) -> str:
    """Return when the user's JWT expired, to be added to an error; "" if it has not, or if that cannot be found out.

    The server refuses such a JWT without saying why.
    """
    if credentials is None:
        return ""
    try:
        lines = str(read_credentials(credentials)).splitlines()
        jwt = next(after for line, after in pairwise(lines) if _JWT in line)
        claims = jwt.split(".")[1]
        exp = json.loads(urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"]
        ends = datetime.fromtimestamp(exp, UTC)
    except Exception:  # whatever is in there
        return ""
    if exp <= 0 or ends > datetime.now(UTC):  # 0: it never ends
        return ""
    return f"; the JWT in NatsConfig.credentials expired at {ends:%Y-%m-%dT%H:%M:%SZ}: renew it"


def sign_in(config: NatsConfig, server: Server) -> dict[str, Any]:
    """Return nats-py's options to connect to one server, once, and to sign in.

    The login in the server's URL counts when no other way to sign in is configured. Raises as `read_credentials`.
    """
    bare, user, password = split_url(server.url)
    explicit = any(way is not None for way in (config.credentials, config.user, config.token))
    token = config.token if explicit or password is not None else user
    options: dict[str, Any] = {
        "servers": [bare],
        "allow_reconnect": False,
        # nats-py tries one server, and does not wait: `Connection` tries the next server, and waits in between.
        "max_reconnect_attempts": 1,
        "reconnect_time_wait": 0,
        "pending_size": 0,
        "ping_interval": _PING_INTERVAL_S,
        "max_outstanding_pings": 1,
        "connect_timeout": config.connect_timeout_s,
        "user": config.user if explicit or password is None else user,
        "password": config.password if explicit else password,
        "token": token,
    }
    if config.credentials is not None:
        options["user_credentials"] = read_credentials(config.credentials)
    if (tls := config.tls_context) is not None:
        options["tls"] = tls
    if (name := config.tls_hostname or server.tls_name) is not None:
        options["tls_hostname"] = name
    return options
