"""Where a log is flushed to, and whether this process would flush it there: the decision.

A log's entries belong in one store in one database. Both record this: the stream in its metadata, the database in its
row for the log. Each records the domain (what entries mean), the kind of the store, and an id that was drawn once for
the database. If all three are the same, log and database belong together. A database that has no record is either new,
or was made by a release that wrote none; then the log's record is copied to it only with a proof: the database has
flushed some of the log, and the log still has the entries at its cursors.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from bufstore.errors import ConfigDrift, LogRolledBack


class Kind(msgspec.Struct, frozen=True):
    """What a process can flush: the entries of one domain, into one kind of store."""

    domain: str
    store: str


class Target(msgspec.Struct, frozen=True):
    """Where a log is flushed to."""

    domain: str
    store: str
    #: The id of the database; to be exact, of its row for the log. It begins with the stream that it was drawn for.
    id: str

    @property
    def stream(self) -> str:
        """The stream for which the database got its id; empty if an earlier release gave it."""
        return self.id.rpartition("-")[0]

    @property
    def kind(self) -> Kind:
        """The domain and the kind of store that a process must have to flush here."""
        return Kind(self.domain, self.store)


class Made(NamedTuple):
    """A log that has existed, as its database remembers it."""

    epoch: int
    stream: str


def check_kind(what: str, named: Target | None, ours: Kind, way_out: str = "") -> None:
    """Raise ConfigDrift when `named` is another kind of store than `ours`. `what`: the stream or database named so."""
    if named is None or named.kind == ours:
        return
    field = "store" if named.domain == ours.domain else "domain"
    there = "Its entries belong there and nowhere else: open it with that store"
    if field == "store":
        there += f" (if this is it under another name, declare `store_kind = {named.store!r}` on its class)"
    raise ConfigDrift(
        what,
        field,
        expected=getattr(ours, field),
        found=getattr(named, field),
        way_out=way_out
        or f"{there}, or choose another stream, bucket and schema. If it was made by mistake and nothing was ever "
        "written to it, remove the stream, its bucket and the buffer's schema, and start again.",
    )


def check_flushable(stream: str, named: Target, ours: Kind) -> None:
    """Raise ConfigDrift unless the log says that it is for `ours`. A command or job asks before it touches the log."""
    check_kind(
        f"stream {stream}",
        named,
        ours,
        "This command or job has no such store: do it in a process that opens that store (or saver; see "
        "docs/OPERATIONS.md, Where a log is flushed to).",
    )


def check_same(stream: str, named: Target | None, noted: Target | None) -> None:
    """Raise ConfigDrift when the log names another database (`named`) than the database itself does (`noted`)."""
    if named is not None and noted is not None and named.id != noted.id:
        raise ConfigDrift(
            f"stream {stream}",
            "database",
            expected=noted.id,
            found=named.id,
            way_out="This Postgres (or this schema in it) is not the one that the log is flushed into: give the right "
            "one, or choose another stream and bucket.",
        )


def check_stream(stream: str, used: str) -> None:
    """Raise ConfigDrift when a database was used with another stream (empty: with none), which may be in use.

    Both would flush into it, and each would take what the other has flushed for its own.
    """
    if used not in ("", stream):
        raise ConfigDrift(
            "the database",
            "stream",
            expected=stream,
            found=used,
            way_out="Name the stream that it belongs to in LogConfig, or give another database or schema. If that "
            "stream was never written to, and is to have another name, delete the row of table buffer_log.",
        )


def check_proof(stream: str, named: Target, *, proven: bool) -> None:
    """Raise ConfigDrift unless a database that has no record surely belongs to the log, which names `named`."""
    if proven:
        return
    raise ConfigDrift(
        f"stream {stream}",
        "database",
        expected="one that has flushed nothing of this log",
        found=named.id,
        way_out="Give the Postgres and schema that the log is flushed into. If that database is lost for good, "
        "`bufstore repair` moves what the log still has into this one.",
    )


def refusal(error: ConfigDrift | LogRolledBack) -> LogRolledBack:
    """Return why a log that is open already is refused. A ConfigDrift says its own way out."""
    return error if isinstance(error, LogRolledBack) else LogRolledBack(str(error), way_out="")
