"""Credentials files (.creds) for NATS, checked before nats-py uses them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from nats.aio.client import RawCredentials

from bufstore.errors import ConfigError

_JWT = "BEGIN NATS USER JWT"
_SEED = "BEGIN USER NKEY SEED"


def read_credentials(credentials: str | Path) -> RawCredentials:
    """The contents for nats-py, of a file (read anew at each call, for it may be renewed) or as given.

    Raises ConfigError when they cannot be used. The error shows neither them nor the path: contents may have been taken
    for a path.
    """
    if find_spec("nkeys") is None:
        raise ConfigError("NatsConfig.credentials need nkeys, which is not installed: pip install 'bufstore[nkeys]'")
    text = str(credentials)
    if "-----BEGIN" not in text:
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            reason = getattr(e, "strerror", None) or "no text"
            raise ConfigError(f"cannot read the file that NatsConfig.credentials names: {reason}") from None
    # Without these lines nats-py would look for them forever, and the event loop would stand still.
    if _JWT not in text or _SEED not in text:
        raise ConfigError(f"NatsConfig.credentials are invalid: a line with {_JWT!r} or with {_SEED!r} is missing")
    return RawCredentials(text)
