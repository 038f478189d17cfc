"""Where a log is flushed to, and whether that is where this process would flush it: the decision.

A log's entries belong in one store in one database. Both say so: the stream in its metadata, the database in its row of
the log. Each has the domain (what entries mean), the kind of the store, and an id that was drawn once for the database.
If all three are the same, log and database belong together. A side that says nothing is either new, or was made by a
release that did not write it down; then it takes a proof to write down the other's name.
"""

from __future__ import annotations

import msgspec

from bufstore.errors import ConfigDrift


class Kind(msgspec.Struct, frozen=True):
    """What a process can flush: entries of a domain, into a kind of store."""

    domain: str
    store: str


class Target(msgspec.Struct, frozen=True):
    """Where a log is flushed to."""

    domain: str
    store: str
    #: The database's id: to be exact, that of its row of the log.
    id: str

    @property
    def kind(self) -> Kind:
        """What a process must flush to use this target."""
        return Kind(self.domain, self.store)


def check_kind(what: str, named: Target | None, ours: Kind, way_out: str = "") -> None:
    """Raise ConfigDrift when `named` is another kind of store than `ours`. `what` names it: a stream or a schema."""
    if named is None or named.kind == ours:
        return
    field = "store" if named.domain == ours.domain else "domain"
    raise ConfigDrift(
        what,
        field,
        expected=getattr(ours, field),
        found=getattr(named, field),
        way_out=way_out
        or "Its entries belong there and nowhere else: open it with that store (if this is it under another name, "
        f"declare `store_kind = {named.store!r}` on its class), or choose another stream, bucket and schema.",
    )


def check_flushable(stream: str, named: Target | None, ours: Kind) -> None:
    """Before a command or a job touches a log: raise ConfigDrift unless the log says that it is for `ours`."""
    what = f"stream {stream}"
    if named is None:
        raise ConfigDrift(
            what,
            "store",
            expected=ours.store,
            found=None,
            way_out="It was made by an earlier release and does not say what it is flushed into: open it once with the "
            "app's store and this release, or say so with `bufstore log adopt`.",
        )
    check_kind(
        what,
        named,
        ours,
        "What comes with bufstore (a command, a job) has no other store: do this in a process that has it "
        "(docs/OPERATIONS.md, A store of your own).",
    )


def check_same(stream: str, named: Target | None, noted: Target | None) -> None:
    """Raise ConfigDrift when log and database name different databases (`named` by the log, `noted` by the other)."""
    if named is not None and noted is not None and named.id != noted.id:
        raise ConfigDrift(
            f"stream {stream}",
            "database",
            expected=noted.id,
            found=named.id,
            way_out="This Postgres (or this schema in it) is not the one that the log is flushed into: give the right "
            "one, or choose another stream and bucket.",
        )


def check_proof(stream: str, named: Target | None, *, proven: bool) -> None:
    """Before a side that says nothing gets the other's name: raise ConfigDrift unless they surely belong together.

    `named`: by the log; None: it is the log that says nothing.
    """
    if proven:
        return
    if named is None:
        raise ConfigDrift(
            f"stream {stream}",
            "database",
            expected="this one",
            found=None,
            way_out="The log has entries of an earlier release, nothing says where they are flushed to, and this "
            "Postgres has flushed none of them. Open it with the right Postgres and schema; if this is the right one, "
            "say so with `bufstore log adopt`.",
        )
    raise ConfigDrift(
        f"stream {stream}",
        "database",
        expected="one that has flushed nothing of this log",
        found=named.id,
        way_out="Give the Postgres and schema that the log is flushed into. If that database is lost for good, "
        "`bufstore repair` moves what the log still has into this one.",
    )


def is_proven(*, known: bool, flushed: bool, log_begun: bool, log_named: bool) -> bool:
    """Whether log and database go together, when one of them does not say so and nothing else speaks against it.

    `known`: the database knows the log's generation. `flushed`: it has flushed some of it, and the log still has the
    entries at its cursors. `log_begun`: the log has had an entry. `log_named`: it says that it has a database.
    """
    if log_named:
        return flushed
    # Earlier release: a database that knew the log before anything was flushed counts as the one it was made with.
    return flushed or known or not log_begun
