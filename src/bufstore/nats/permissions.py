"""The permissions in NATS that a user of bufstore needs, and no others: for the account's configuration."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from bufstore.buffer.lanes import named_logs
from bufstore.buffer.subjects import Subjects
from bufstore.config import LogConfig


class Role(enum.Enum):
    """What a process does. Each role may do what the roles above it may."""

    #: Writes and reads (`BufferConfig.flusher` False).
    APP = "app"
    #: Flushes as well: an app with a flusher of its own, or a job that reads the log.
    FLUSHER = "flusher"
    #: The command line: setup, doctor, repair, erasing.
    OPERATOR = "operator"


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects, wildcards included."""

    publish: Sequence[str]
    subscribe: Sequence[str]

    def config(self) -> str:
        """Return the same as a block of a nats-server's configuration, to stand in a user."""
        return f"permissions: {{\n  publish: {_lines(self.publish)}\n  subscribe: {_lines(self.subscribe)}\n}}"


def permissions(role: Role, log: LogConfig, api: str = "$JS.API") -> Permissions:
    """Return what the role needs for this log; of the first lane's, for all lanes.

    `api`: the prefix of the JetStream API, without a trailing dot; ``$JS.<domain>.API`` for users of a leaf node (a
    server of the domain checks the subject that this prefix stands for there).
    """
    lanes = [_of_one(role, lane, api) for lane in named_logs(log)]
    return Permissions(
        publish=list(dict.fromkeys(subject for lane in lanes for subject in lane.publish)),
        subscribe=list(dict.fromkeys(subject for lane in lanes for subject in lane.subscribe)),
    )


def _of_one(role: Role, log: LogConfig, api: str) -> Permissions:
    stream, bucket, keys = log.stream, f"KV_{log.bucket}", f"$KV.{log.bucket}"
    # As in `NatsConfig.published_on`: an `api` does not say whether it is a domain's.
    places = [keys] if api == "$JS.API" else [keys, f"{api}.{keys}"]
    calls, parked = f"{log.subject}-flush.*", f"{log.subject}-parked"
    subjects = Subjects(log.subject, log.partitions)
    publish = [
        subjects.groups,
        subjects.parts,
        subjects.proof,
        subjects.writers,
        subjects.refused,
        calls,
        parked,
        *(f"{place}.{key}" for place in places for key in ("run.*", "lineage")),
        *(f"{api}.{verb}.{name}" for name in (stream, bucket) for verb in _READING),
    ]
    # Answers come to the inbox; other processes publish on the other subjects.
    subscribe = ["_INBOX.>", f"{keys}.flushed.*", parked, subjects.writers, subjects.refused]
    if role is not Role.APP or log.replicas > 1:
        # On replicas fresh reads remove old proofs, and `health` asks for a purge of nothing (docs/adr/0028).
        publish += [f"{api}.STREAM.PURGE.{stream}"]
    if role is not Role.APP:
        publish += [
            *(f"{place}.{key}.*" for place in places for key in ("member", "flushed", "floor")),
            *(f"{api}.CONSUMER.{verb}.{stream}.{rest}" for verb, rest in _FOLLOWING.items()),
            # From nats-server 2.16 on with a domain and an account before the stream.
            f"$JS.ACK.{stream}.>",
            f"$JS.ACK.*.*.{stream}.>",
        ]
        subscribe += [calls]
    if role is Role.OPERATOR:
        publish += [
            subjects.erased,
            f"{api}.INFO",
            *(f"{api}.STREAM.{verb}.{name}" for name in (stream, bucket) for verb in ("CREATE", "UPDATE")),
            f"{api}.STREAM.DELETE.{stream}",
            f"{api}.STREAM.MSG.DELETE.{stream}",
        ]
    return Permissions(publish=publish, subscribe=subscribe)


_READING = ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
_FOLLOWING = {"CREATE": ">", "INFO": "*", "DELETE": "*", "MSG.NEXT": "*"}


def _lines(subjects: Sequence[str]) -> str:
    return "[\n" + "".join(f'    "{subject}"\n' for subject in subjects) + "  ]"
