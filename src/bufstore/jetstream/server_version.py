"""Which releases of nats-server bufstore works with."""

from __future__ import annotations

from nats.aio.client import Client

from bufstore.errors import ConfigError

#: The oldest release that bufstore is tested with, and that `doctor` demands.
VERSION_MIN = (2, 14, 0)
#: The first release with atomic batches. An older server makes a bucket without them, and says nothing.
_WITH_BATCHES = (2, 12, 0)


def version_of(client: Client) -> tuple[int, int, int]:
    """Return the release of the server that a client is connected to; zeros when the server does not say."""
    version = client.connected_server_version
    try:
        return version.major, version.minor, version.patch
    except ValueError:
        return 0, 0, 0


def text_of(version: tuple[int, int, int]) -> str:
    """Return a release as nats-server writes it."""
    return ".".join(map(str, version))


async def check_version(client: Client) -> None:
    """Raise ConfigError for a server on which nothing works."""
    if (0, 0, 0) < (version := version_of(client)) < _WITH_BATCHES:
        needed = text_of(VERSION_MIN)
        raise ConfigError(f"nats-server {text_of(version)} is too old: bufstore needs {needed} or later, update it")
