"""The server's configuration of a stream's storage and of a KV bucket: made from our settings, and read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Placed(Protocol):
    """Settings that say where a stream is kept."""

    @property
    def replicas(self) -> int: ...

    @property
    def placement_tags(self) -> Sequence[str]: ...

    @property
    def placement_cluster(self) -> str | None: ...


def storage(settings: Placed) -> dict[str, Any]:
    """Return the fields that every stream of a log and every bucket has."""
    placement: dict[str, Any] = {}
    if settings.placement_cluster:
        placement["cluster"] = settings.placement_cluster
    if settings.placement_tags:
        placement["tags"] = list(settings.placement_tags)
    return {
        "storage": "file",
        "num_replicas": settings.replicas,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "deny_purge": False,
        **({"placement": placement} if placement else {}),
    }


def placed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say where a stream is kept, from the stream's configuration."""
    placement = found.get("placement") or {}
    return {
        "replicas": found["num_replicas"],
        "placement_tags": tuple(placement.get("tags") or ()),
        "placement_cluster": placement.get("cluster") or None,
    }


def bucket(name: str, settings: Placed, max_bytes: int) -> dict[str, Any]:
    """Return the configuration of a KV bucket: one value per key, optional times to live, no new values when full."""
    return last_values(
        f"KV_{name}",
        [f"$KV.{name}.>"],
        discard="new",
        max_msg_size=-1,
        max_bytes=max_bytes,
        allow_atomic=True,
        allow_msg_ttl=True,
        deny_delete=True,
        **storage(settings),
    )


def last_values(name: str, subjects: Sequence[str], **more: Any) -> dict[str, Any]:
    """Return the configuration of a stream that keeps each subject's last message for ever, unless `more` differs."""
    return {
        "name": name,
        "subjects": list(subjects),
        "retention": "limits",
        "discard": "old",
        "max_age": 0,
        "max_msgs": -1,
        "max_msgs_per_subject": 1,
        "max_bytes": -1,
        "allow_direct": True,
        **more,
    }
