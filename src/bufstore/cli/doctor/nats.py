"""What `bufstore doctor` looks at in NATS.

Writes to the log are tried with expectations that cannot hold, so nothing is stored. The shared-state bucket is given a
key that it removes after a second.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rich.filesize import decimal

from bufstore.buffer.flush.flusher_state import told_by_flushers
from bufstore.buffer.lanes import named_logs
from bufstore.buffer.operate.log_fill import FillForecast, look
from bufstore.buffer.subjects import Subjects
from bufstore.buffer.target import Target
from bufstore.buffer.windows import Windows
from bufstore.cli.connect import Endpoints
from bufstore.cli.doctor.diagnosis import CheckResult, Level, Notes
from bufstore.cli.doctor.together import SeenLog
from bufstore.cli.output import lasting
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import BufstoreError, ConfigDrift, ConfigError, LogFull, LogRolledBack, LogUnavailable
from bufstore.jetstream import hooks
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.errors import (
    ConsumerMissing,
    Mirrored,
    NoConsumerNow,
    StorageFailed,
    StorageFull,
    StreamMissing,
)
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing
from bufstore.jetstream.server_version import VERSION_MIN, check_version, text_of, too_old, version_of
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import token
from bufstore.nats.permissions import Role, permissions
from bufstore.nats.session import NatsSession
from bufstore.nats.setup import bucket_stream, check_shared_state, check_stream, windows_of
from bufstore.nats.shared_state import NatsSharedState

_VERSION_ADVISED = (2, 15, 1)
_TIMEOUT_S = 5.0
#: No subject ever has this last sequence.
_IMPOSSIBLE = (1 << 62) + 1
_FULL = 0.95
#: How often a stream is read to find mirrors: chance decides which server answers a read.
_READS = 20
#: Above this fraction, all flushed entries that may go have gone: the rest is not flushed, or may be needed again.
_PRESSED = 0.7
#: The fraction of the bucket above which we warn; when it is a little fuller, it registers no more runs.
_BUCKET_FULL = 0.8


async def check_nats(target: Endpoints, role: Role) -> tuple[list[CheckResult], SeenLog | None]:
    """Return the checks, and the log or None if it could not be seen. `role`: whose permissions the user needs."""
    notes = Notes("NATS")
    connection = Connection(target.nats, target.session)
    try:
        await connection.open()
    except BufstoreError as e:
        notes.say("reachable", Level.BAD, str(e), "see the address, the network and the credentials")
        return notes.checks, None
    if too_old(version_of(connection.client())):
        connection = await _newer(connection, target)
    # A stream that is made before the connection opens refuses an old server as one that cannot be reached.
    stream = NatsStream(connection, target.nats.api, target.stream, 1)
    try:
        return notes.checks, await _look(notes, connection, target, stream, role)
    finally:
        await connection.aclose()


async def _newer(connection: Connection, target: Endpoints) -> Connection:
    """Return a connection to one of the servers that stores work with, as they find it; else the old one."""
    newer = Connection(target.nats, target.session)
    newer.on_connect(check_version)
    try:
        await newer.open()
    except BufstoreError:
        return connection
    await connection.aclose()
    return newer


async def _look(
    notes: Notes, connection: Connection, target: Endpoints, stream: NatsStream, role: Role
) -> SeenLog | None:
    notes.say("reachable", Level.OK, "yes")
    concerns = hooks.concerns()
    notes.require("client", not concerns, "; ".join([hooks.installed(), *concerns]), hooks.advice())
    _version(notes, connection)
    if too_old(version_of(connection.client())):
        return None  # no store opens on this server, so nothing else of it matters
    account: dict[str, Any] = {}
    if role is Role.OPERATOR:
        try:
            account = await stream.api("INFO", timeout_s=_TIMEOUT_S)
        except BufstoreError as e:
            notes.say("JetStream", Level.BAD, str(e), f"enable JetStream; {_advice(role)}")
            return None
        _account(notes, account)
    try:
        info = await stream.api(f"STREAM.INFO.{target.stream}", timeout_s=_TIMEOUT_S)
        found = await target.find_log()
    except StreamMissing:
        # We do not say that the next store makes the log: only Postgres can tell whether there was one before.
        notes.say("log", Level.WARNING, f"there is no {target.stream}", "see the check `log` under Postgres")
        config = LogConfig(stream=target.stream, bucket=target.bucket)
        bucket = await _lacks(stream, bucket_stream(config))
        _room(notes, account, 1 + bucket, LogConfig.max_bytes)
        return SeenLog(config, there=False)
    except ConfigDrift as e:
        notes.say("log", Level.BAD, str(e))
        return None
    except BufstoreError as e:
        notes.say("log", Level.BAD, str(e), "choose another stream, or permit STREAM.INFO")
        return None
    assert found is not None
    config = found.config
    log = SeenLog(config, found.target)
    try:
        _drift(notes, "log", lambda: check_stream(config, info["config"]))
    except LogRolledBack as e:  # out of service: nothing answers on its subjects, so permissions cannot be tried
        notes.say("log settings", Level.BAD, e.reason, "see 'Going back in time' in docs/OPERATIONS.md")
        return log
    _agreed(notes, found.target, windows_of(info["config"]["metadata"]))
    _copies(notes, info)
    await _lanes(notes, stream, config)
    bucket = await _bucket(notes, stream, config, account)
    session = NatsSession(target.nats, BufferConfig.fitting(config, flusher=False), target.session)
    shared = NatsStream(session.connection, target.nats.api, bucket_stream(config), 1)
    await session.open()
    try:
        for each in session.stream, shared:
            await _mirrors(notes, each)
        await _headroom(notes, session)
        await _permissions(notes, session, target.nats.api, config, role, bucket=bucket)
        if bucket:
            await _stores(notes, session, shared, config)
        await _flushers(notes, session.shared)
    finally:
        await session.aclose()
    return log


def _version(notes: Notes, connection: Connection) -> None:
    numbers = version_of(connection.client())
    text = text_of(numbers)
    if numbers < VERSION_MIN:
        notes.say("version", Level.BAD, text, f"nats-server {text_of(VERSION_MIN)} or later is needed")
    else:
        advice = "2.15.1 or later is advised: earlier ones have known data-loss bugs"
        notes.require("version", numbers >= _VERSION_ADVISED, text, advice)


def _account(notes: Notes, info: dict[str, Any]) -> None:
    limits = info.get("limits") or {}
    limit, used = int(limits.get("max_storage", -1)), int(info.get("storage", 0))
    if 0 < limit <= used:  # a limit that was lowered
        found = f"{decimal(used)} of {decimal(limit)}"
        notes.say("account limits", Level.BAD, found, "no write is accepted: raise the account's storage")
    else:
        notes.room("account limits", used, limit, _FULL, "raise the account's storage, or LogFull comes first")


async def _lacks(stream: NatsStream, name: str) -> bool:
    try:
        await stream.api(f"STREAM.INFO.{name}", timeout_s=_TIMEOUT_S)
    except StreamMissing:
        return True
    except BufstoreError:
        pass  # not permitted; a store says what else is wrong with the stream
    return False


def _room(notes: Notes, account: Mapping[str, Any], lacking: int, reserves: int) -> None:
    """Note when the account has no room for the streams that have to be made.

    `lacking`: how many. `reserves`: the bytes that they reserve by LogConfig's default; an app may configure less.
    """
    limits = account.get("limits") or {}
    streams, streams_max = int(account.get("streams", 0)), int(limits.get("max_streams", -1))
    reserved, limit = int(account.get("reserved_storage", 0)), int(limits.get("max_storage", -1))
    if 0 < streams_max < streams + lacking:
        found = f"{streams} of {streams_max} streams are used, and {lacking} must be made"
        notes.say("room", Level.BAD, found, "raise the account's max_streams")
    elif 0 < limit < reserved + max(reserves, 1):
        found = f"{decimal(reserved)} of {decimal(limit)} of storage are reserved"
        advice = "raise the account's storage"
        if reserved < limit:
            found += f", and a log reserves {decimal(reserves)} by default"
            advice += ", or set LogConfig.max_bytes to less than is left: else the log cannot be made"
        notes.say("room", Level.WARNING if reserved < limit else Level.BAD, found, advice)


def _drift(notes: Notes, what: str, compare: Any) -> None:
    try:
        compare()
    except ConfigDrift as e:
        notes.say(f"{what} settings", Level.BAD, str(e), "change it back: see docs/OPERATIONS.md")
    else:
        notes.say(f"{what} settings", Level.OK, "as required")


def _agreed(notes: Notes, target: Target, windows: Windows) -> None:
    """Note what the log says of itself, on which all its processes must agree."""
    notes.say("flushed into", Level.OK, f"{target.store}, database {target.id}")
    window = f"{windows.failover_window_s:g} s{', archived' if windows.archive else ''}"
    if windows.changing:
        window += f", becoming {windows.next_failover_window_s:g} s{', archived' if windows.next_archive else ''}"
    notes.require("windows", not windows.changing, window, "once every process has restarted: `bufstore log settle`")


def _copies(notes: Notes, info: dict[str, Any]) -> None:
    replicas = int(info["config"].get("num_replicas", 1))
    peers = (info.get("cluster") or {}).get("replicas") or []
    away = [p["name"] for p in peers if p.get("offline") or not p.get("current")]
    if away:
        notes.say("replicas", Level.WARNING, f"{replicas}, behind or away: {', '.join(away)}", "see the servers")
    elif replicas == 1:
        notes.say("replicas", Level.OK, "1: what its disk loses is lost, and while it is down nothing is accepted")
    else:
        notes.say("replicas", Level.OK, f"{replicas}, all up to date")
    if info["config"].get("deny_delete"):
        advice = "`erase` cannot work; this setting of the stream cannot be undone"
        notes.say("deletes", Level.WARNING, "denied", advice)
    if info["config"].get("persist_mode") == "async":
        notes.say("persist mode", Level.WARNING, "async", "a crash loses acknowledged entries: recreate the stream")


async def _lanes(notes: Notes, stream: NatsStream, config: LogConfig) -> None:
    """Look for the streams of the other lanes; each lane has a doctor's look of its own (--stream)."""
    for other in named_logs(config)[1:]:
        if await _lacks(stream, other.stream):
            advice = f"see `bufstore repair --stream {other.stream} --lane {other.lane}`"
            notes.say(f"lane {other.lane}", Level.BAD, f"there is no {other.stream}", advice)


async def _mirrors(notes: Notes, stream: NatsStream) -> None:
    try:
        with contextlib.suppress(LogUnavailable):  # the stream is missing, which another check says
            for _ in range(_READS):
                await stream.read(">", 0, _TIMEOUT_S, 1)
    except Mirrored as e:
        advice = "do what the message says; see 'What must be configured' in docs/OPERATIONS.md"
        notes.say("mirrors", Level.BAD, str(e), advice)
    except ConfigError:
        pass  # not permitted, which the check of permissions says


async def _headroom(notes: Notes, session: NatsSession) -> None:
    try:
        fill, full_in_s = await FillForecast(lambda: look(session.log, session.shared, {})).measured()
    except BufstoreError as e:
        notes.say("headroom of the log", Level.UNKNOWN, str(e))
        return
    part = fill.held.bytes / fill.held.limit
    used = f"{decimal(fill.held.bytes)} of {decimal(fill.held.limit)} ({part:.0%})"
    full = "" if full_in_s is None else f", full in {lasting(full_in_s)} at this rate"
    notes.require(
        "headroom of the log",
        part < _PRESSED and full_in_s is None,
        f"{used}, about {decimal(fill.unflushed)} not flushed{full}",
        "see why the flusher lags (`bufstore status`), or raise LogConfig.max_bytes: a full log refuses writes",
    )


async def _bucket(notes: Notes, stream: NatsStream, config: LogConfig, account: Mapping[str, Any]) -> bool:
    """Check the bucket; return whether there is one."""
    try:
        info = await stream.api(f"STREAM.INFO.{bucket_stream(config)}", timeout_s=_TIMEOUT_S)
    except StreamMissing:
        notes.say("bucket", Level.WARNING, f"there is no bucket {config.bucket}", "the next store that opens makes it")
        _room(notes, account, 1, 0)
    except BufstoreError as e:
        notes.say("bucket", Level.BAD, str(e), "permit STREAM.INFO")
    else:
        _drift(notes, "bucket", lambda: check_shared_state(config, info["config"]))
        used, limit = info["state"]["bytes"], info["config"].get("max_bytes", -1)
        if limit > 0:
            advice = (
                f"raise it: `nats stream edit {bucket_stream(config)} --max-bytes BYTES`; nearly full, it takes no runs"
            )
            notes.require("bucket room", used <= _BUCKET_FULL * limit, f"{decimal(used)} of {decimal(limit)}", advice)
        return True
    return False


async def _permissions(
    notes: Notes, session: NatsSession, api: str, config: LogConfig, role: Role, *, bucket: bool
) -> None:
    log, subjects = session.stream, Subjects(config.subject, config.partitions)
    nothing = subjects.of(f"doctor-{secrets.token_hex(8)}")  # a thread that does not exist
    name = f"{config.subject}-doctor-{secrets.token_hex(8)}"
    consumer = {"name": name, "ack_policy": "all", "filter_subject": nothing, "inactive_threshold": 5_000_000_000}
    create = {"stream_name": config.stream, "config": consumer}

    def write(subject: str) -> Callable[[], Awaitable[Any]]:
        return lambda: log.publish(Outgoing(subject, b"", None, _IMPOSSIBLE), _TIMEOUT_S)

    def ask(verb: str, body: dict[str, Any] | None) -> Callable[[], Awaitable[Any]]:
        return lambda: log.api(verb, body, _TIMEOUT_S)

    key = f"$KV.{config.bucket}.lineage"
    possible: dict[str, Callable[[], Awaitable[Any]]] = {
        subjects.groups: write(subjects.groups),
        subjects.parts: write(subjects.parts),
        key: write(key),
        f"{api}.STREAM.MSG.GET.{config.stream}": lambda: log.ends([nothing], _TIMEOUT_S),
        f"{api}.DIRECT.GET.{config.stream}": lambda: log.last([nothing], _TIMEOUT_S),
        f"{api}.CONSUMER.CREATE.{config.stream}.>": ask(f"CONSUMER.CREATE.{config.stream}.{name}.{nothing}", create),
        f"{api}.CONSUMER.DELETE.{config.stream}.*": ask(f"CONSUMER.DELETE.{config.stream}.{name}", None),
        f"{api}.STREAM.PURGE.{config.stream}": ask(f"STREAM.PURGE.{config.stream}", {"filter": nothing}),
    }
    if not bucket:
        del possible[key]
    tries = {s: attempt for s, attempt in possible.items() if s in permissions(role, config, api).publish}
    refused, failed = [], ""
    for subject, attempt in tries.items():
        try:
            await attempt()
        except (Conflict, ConsumerMissing):
            pass  # permitted and nothing stored, as it should be; a consumer that could not be made is already noted
        except NoConsumerNow as e:
            notes.say("consumer", Level.BAD, str(e), "wait, or start the nodes of the cluster that are missing")
        except (LogFull, StorageFailed) as e:
            failed = str(e)
        except (BufstoreError, AppendUnknown) as e:
            refused.append(f"{subject} ({e})")
            with contextlib.suppress(BufstoreError):  # a write without an answer costs the connection
                await session.connection.wait_up(_TIMEOUT_S)
    notes.require(
        "permissions",
        not refused,
        f"those of {role.value}, as far as they can be tested" if not refused else f"no answer on {'; '.join(refused)}",
        _advice(role),
        Level.BAD,
    )
    if failed:
        notes.say("storage", Level.BAD, f"the log takes no writes: {failed}", "free the disk, restart nats-server")


async def _stores(notes: Notes, session: NatsSession, bucket: NatsStream, config: LogConfig) -> None:
    """Note a bucket that stores nothing. One that met a full disk still refuses what an expectation forbids."""
    key = f"$KV.{config.bucket}.run.{token(f'doctor-{secrets.token_hex(8)}')}"
    try:
        await bucket.publish(Outgoing(key, b"", ttl_s=1), _TIMEOUT_S)
        return
    except (ConfigError, LogFull) as e:
        found, advice = str(e), "see what the other checks of the bucket say"
        if isinstance(e, StorageFull):
            advice = "make room"
    except (BufstoreError, AppendUnknown) as e:
        found, advice = f"it takes no writes: {e}", "free the disk, restart nats-server"
        with contextlib.suppress(BufstoreError):  # a write without an answer costs the connection
            await session.connection.wait_up(_TIMEOUT_S)
    notes.say("bucket storage", Level.BAD, f"{bucket_stream(config)}: {found}", advice)


def _advice(role: Role) -> str:
    return f"permit bufstore's user what `bufstore permissions {role.value}` prints (or see --role)"


async def _flushers(notes: Notes, shared: NatsSharedState) -> None:
    try:
        members, troubles = await shared.members(), await shared.troubles()
    except BufstoreError as e:
        notes.say("flushers", Level.UNKNOWN, str(e))
        return
    found = f"{len(members)} alive" if members else "none alive"
    notes.require("flushers", bool(members), found, "acknowledged entries wait in the log until a store is open")
    trouble = told_by_flushers(troubles)
    notes.require("flushing", not trouble, trouble or "no trouble", "acknowledged entries wait in the log meanwhile")
