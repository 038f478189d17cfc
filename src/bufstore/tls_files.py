"""Files for TLS to NATS, by path: unlike an SSLContext, paths can be sent to other processes and machines."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path

from bufstore.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files, on each machine that connects. They are read anew for each connection."""

    #: The CA certificates to check the servers' certificates with. None: those that the system trusts.
    ca: str | Path | None = None
    #: Our certificate, for servers that ask for one.
    certificate: str | Path | None = None
    #: The certificate's private key, without a passphrase. None: the certificate's file holds it.
    key: str | Path | None = None

    def __post_init__(self) -> None:
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        for name, value in given.items():
            if not isinstance(value, (str, PathLike)) or not str(value) or "-----BEGIN" in str(value):
                raise ConfigError(f"TlsFiles.{name} must be the path of a file")  # its contents may be a secret
        if not given:
            raise ConfigError("TlsFiles names no file: leave it out to trust what the system trusts")
        if self.key is not None and self.certificate is None:
            raise ConfigError("TlsFiles.key is the key of TlsFiles.certificate, which is missing")

    def context(self) -> ssl.SSLContext:
        """Return a context with what the files hold now. Raises ConfigError, which names the file."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ValueError) as e:
            raise ConfigError(f"{self.ca} holds no CA certificates (PEM): {_reason(e)}") from None
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
            except (OSError, ValueError) as e:
                raise ConfigError(
                    f"certificate {self.certificate} and its key {self.key or '(in the same file)'} cannot be used: "
                    f"{_reason(e)}"
                ) from None
        return context


def _no_passphrase() -> str:
    # Without this, OpenSSL would ask for the passphrase on the terminal, where there may be nobody to answer.
    raise ConfigError("the key has a passphrase: use a key without one, in a file that only you can read")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or type(error).__name__
