"""Which releases of nats-server bufstore works with."""

from __future__ import annotations

from nats.aio.client import Client

from bufstore.errors import ConfigError
from bufstore.log_lines import LogLines

_log = LogLines(__name__)

#: The oldest release that bufstore is tested with, and that `doctor` demands.
VERSION_MIN = (2, 14, 0)
#: The first release with atomic batches. An older server makes a bucket without them, and says nothing.
_WITH_BATCHES = (2, 12, 0)


class ServerTooOld(ConfigError):
    """Nothing works on this release of nats-server."""


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


def too_old(version: tuple[int, int, int]) -> bool:
    """Return whether nothing works on this release; False when the server does not say which it is."""
    return (0, 0, 0) < version < _WITH_BATCHES


def untested(version: tuple[int, int, int]) -> bool:
    """Return whether bufstore goes on on this release, which is older than the oldest that it is tested with."""
    return _WITH_BATCHES <= version < VERSION_MIN


async def check_version(client: Client) -> None:
    """Raise ServerTooOld for a server on which nothing works; log that another is older than those of the tests."""
    version, needed = version_of(client), text_of(VERSION_MIN)
    if too_old(version):
        raise ServerTooOld(f"nats-server {text_of(version)} is too old: bufstore needs {needed} or later, update it")
    if untested(version):
        _log.warning(
            "nats-server %s is older than %s, the oldest that bufstore is tested with: update it",
            text_of(version),
            needed,
            extra={"action": "nats_version"},
        )
