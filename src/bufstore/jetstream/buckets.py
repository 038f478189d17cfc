"""A stream's storage and a KV bucket as the server's configuration has them, and what such a configuration says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Placed(Protocol):
    """Settings of where a stream is kept."""

    @property
    def replicas(self) -> int: ...

    @property
    def placement_tags(self) -> Sequence[str]: ...

    @property
    def placement_cluster(self) -> str | None: ...


def storage(settings: Placed) -> dict[str, Any]:
    """What every stream of a log and every bucket has."""
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
    """The settings of where a stream is kept, as its configuration has them."""
    placement = found.get("placement") or {}
    return {
        "replicas": found["num_replicas"],
        "placement_tags": tuple(placement.get("tags") or ()),
        "placement_cluster": placement.get("cluster") or None,
    }


def bucket(name: str, settings: Placed, max_bytes: int) -> dict[str, Any]:
    """A KV bucket: one value per key, whose keys may have a time to live, and which refuses what is new when full."""
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
    """A stream that keeps the last message of each subject for ever, as far as `more` does not say otherwise."""
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
