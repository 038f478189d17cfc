"""What one attempt to connect needs: the client for a URL, and the reason why an attempt failed."""

from __future__ import annotations

from importlib.util import find_spec

import nats.errors

from bufstore.config import NatsConfig, mask_url
from bufstore.errors import ConfigError
from bufstore.home import owned_here
from bufstore.jetstream.client import ListeningClient, TlsClient, no_room, text_of, violation


def new_client(config: NatsConfig, url: str) -> ListeningClient:
    """Return a client that is not connected yet. Raises ConfigError."""
    if url.startswith(("ws://", "wss://")) and find_spec("aiohttp") is None:
        raise ConfigError("a ws:// or wss:// URL of NATS needs aiohttp: install it, or use a nats:// or tls:// URL")
    client = TlsClient() if config.tls is not None or url.startswith("tls://") else ListeningClient()
    owned_here(client)
    return client


def why(error: Exception, client: ListeningClient, url: str) -> Exception:
    """Return what to raise for an error of connecting to `url`: a ConfigError when somebody has to mend something."""
    if client.no_room:  # whatever waited for an answer there met a timeout
        return no_room()
    if isinstance(error, nats.errors.NoServersError) and client.errors:
        error = client.errors[-1]  # nats-py raises it when it has given up; it gave the reason before
    last = client.last_error
    if isinstance(error, nats.errors.ConnectionClosedError) and last is not None and violation(last) is None:
        error = last  # why it was closed; what is not permitted closes nothing
    if "authorization violation" in str(error).lower() or isinstance(error, nats.errors.AuthorizationError):
        return ConfigError(f"NATS refused the credentials ({mask_url(url)}): {text_of(error)}")
    if isinstance(error, ValueError) and not isinstance(error, OSError):  # an SSLError is both
        return ConfigError(f"NATS configuration: {text_of(error)}")
    return error
