"""The TLS context that the --tls options ask for."""

from __future__ import annotations

import ssl
from pathlib import Path

from bufstore.errors import ConfigError


def tls_context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The context for these files (PEM); None if there are none. Raises ConfigError, which names the file."""
    if key is not None and certificate is None:
        raise ConfigError("--tls-key is the key of --tls-cert, which is missing")
    if ca is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"--tls-ca {ca} holds no certificates (PEM): {_reason(e)}") from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key, password=_no_passphrase)
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(
                f"--tls-cert {certificate} and its key {key or '(in the same file)'} cannot be used: {_reason(e)}"
            ) from None
    return context


def _no_passphrase() -> str:
    # Without this, OpenSSL would ask for the passphrase on the terminal, where there may be nobody to answer.
    raise ConfigError("the key of --tls-cert has a passphrase: use a key without one, in a file that only you can read")


def _reason(error: OSError) -> str:
    return error.strerror or getattr(error, "reason", None) or type(error).__name__
