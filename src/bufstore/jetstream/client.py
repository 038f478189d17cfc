"""The client of one TCP connection: nats-py's, with its harmful handling of messages and logins replaced."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from importlib.util import find_spec
from typing import Any, NamedTuple

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from bufstore.config import NatsConfig, mask_url
from bufstore.errors import ConfigError
from bufstore.home import owned_here
from bufstore.jetstream import frames, hooks
from bufstore.jetstream.parser import MessageParser
from bufstore.log_lines import LogLines
from bufstore.tasks import spawn, to_the_end

_log = LogLines(__name__)

#: The server's error when a user may not publish or subscribe; nats-py passes it on in lower case.
#: Only of a subscription that a reload takes away, it names the number, too.
_FORBIDDEN = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"( \(sid ")?')
#: The reason that the server gives when it ends a connection.
_ENDED = re.compile(rb"-ERR '([^'\r\n]*)'")
#: The server's error when a connection has as many subscriptions as its account may have.
NO_ROOM = "maximum subscriptions exceeded"
_ERRORS_KEPT = 100
#: How often who waits for a round trip looks whether the connection is still there, in seconds.
_LOOK_S = 0.1
#: The longest pause, in seconds, between two looks whether a stalled link takes what waits.
_STALLED_S = 0.01
#: The smallest limit that is assumed for a message, in bytes: nothing works with less.
_TAKEN_BYTES_MIN = 1024

#: Called with subject, reply subject, payload and raw headers. Its result is awaited.
Listener = Callable[[str, str, bytes, bytes], Awaitable[None] | None]


class ListeningClient(Client):
    """Keeps reading whatever others publish: invalid headers would end nats-py's reading task."""

    def __init__(self) -> None:
        super().__init__()
        if frames.supported:
            self._ps = MessageParser(self)
        #: Subscriptions whose messages do not take nats-py's way; see `listen`.
        self._listeners: dict[int, Listener] = {}
        #: The last errors; nats-py itself keeps one.
        self.errors: deque[Exception] = deque(maxlen=_ERRORS_KEPT)
        #: The last refusal of each subscription that is there, by its subject in lower case.
        self.refused: dict[str, Exception] = {}
        #: A bound, in bytes, of the message for which the server ended the connection; None: it did not.
        self.refused_bytes: int | None = None
        #: How many subscriptions the server refused because there were too many.
        self.no_room = 0
        #: Whether the connection is lost, or the server ends it.
        self._ended = False

    async def connect(self, *args: Any, **options: Any) -> None:
        try:
            await super().connect(*args, **options)
        except ConnectionError as e:
            # The server ended it while nats-py wrote; then nats-py does not read why (max_connections, for one).
            reader = getattr(self._transport, "_io_reader", None)
            if (said := _ENDED.search(getattr(reader, "_buffer", b""))) is not None:
                raise nats.errors.Error(f"nats: '{said[1].decode('utf-8', 'replace')}'") from None
            # With TLS 1.3 a server looks at the client's certificate when the client takes the handshake for done.
            if isinstance(alert := reader.exception() if reader is not None else None, ssl.SSLError):
                raise alert from None
            if isinstance(self, TlsClient) and not isinstance(e, ConnectionRefusedError):
                raise ConnectionError(f"{e}; does the server trust this client's certificate?") from None
            raise

    def _connect_command(self) -> bytes:
        # The connection is over TLS by now, if at all. nats-py begins TLS without telling the stream's protocol, which
        # then lets asyncio warn at the end of each connection.
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and writer.get_extra_info("sslcontext") is not None:
            protocol = writer.transport.get_protocol()
            if hasattr(protocol, "_over_ssl"):
                protocol._over_ssl = True
        command: bytes = super()._connect_command()
        return command

    def fileno(self) -> int:
        """Return the file descriptor of the socket. Any error may come when there is no socket."""
        transport: Any = self._transport
        stream: Any = transport._io_writer if type(transport) is TcpTransport else transport._ws
        found: int = stream.get_extra_info("socket").fileno()
        return found

    def take_at_most(self, size: int) -> None:
        """Send no larger messages than this, whatever limit the server told."""
        self._max_payload = min(self._max_payload, size)

    async def publish(self, subject: str, payload: bytes = b"", *args: Any, **options: Any) -> None:
        if len(payload) <= self._max_payload:  # else it is not sent
            frames.note(self, [len(payload)])
        await super().publish(subject, payload, *args, **options)

    async def listen(self, subject: str, heard: Listener) -> Subscription:
        """Call `heard` with every message on `subject` as it arrives, in the task that reads.

        nats-py first makes a message object, parses its headers as those of an email, and hands it to a task of its
        own: half of what reading the log costs. To avoid that, a private method is replaced, but only with a checked
        version of nats-py. With any other version, messages come through nats-py.
        """

        async def on_message(msg: Msg) -> None:
            raw = msg.headers or {}
            status = f" {raw['Status']} {raw.get('Description', '')}" if "Status" in raw else ""
            lines = "".join(f"{name}: {value}\r\n" for name, value in raw.items())
            headers = f"NATS/1.0{status}\r\n{lines}\r\n".encode("utf-8", "surrogateescape") if raw else b""
            more = heard(msg.subject, msg.reply, msg.data, headers)
            if more is not None:
                await more

        async def subscribe() -> Subscription:
            found = await self.subscribe(subject, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0)
            if frames.supported:
                self._listeners[found._id] = heard
            return found

        return await spawn(subscribe(), apart=True)  # nats-py begins a task that lives as long as the subscription

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        heard = self._listeners.get(sid)
        if heard is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            more = heard(subject.decode("utf-8", "replace"), reply.decode("utf-8", "replace"), data, headers or b"")
            if more is not None:
                await more
        except Exception as e:
            # Anybody may send anything to an inbox: it must not end the task that reads. If the message was ours, its
            # waiter notices that it is missing.
            _log.warning("ignoring an invalid message: %s", type(e).__name__, extra={"action": "nats_message"})

    def _flush_pending(self, force_flush: bool = False) -> Coroutine[Any, Any, Any]:
        # nats-py's method waits for a place in a full queue, and ignores a cancellation of its caller meanwhile. On a
        # stalled link no call would end in time, and the PING that would notice the stall waits, too. Nothing is lost
        # without a place: a flush that has a place in the queue sends everything that waits by then.
        if self._flush_queue is not None and self._flush_queue.full():
            return _nothing()
        return super()._flush_pending(force_flush)

    def note(self, error: Exception) -> None:
        """Remember an error."""
        self.errors.append(error)
        found = violation(error)
        if found is not None and found.verb == "subscription" and self._subscribed(found.subject):
            self.refused[found.subject] = error

    def _subscribed(self, subject: str) -> bool:
        return any(s.subject.lower() == subject for s in self._subs.values())

    def heard(self) -> None:
        """Forget unanswered PINGs: what was sent before them is still on its way, so no answer need be here yet."""
        self._pings_outstanding = 0

    async def _process_err(self, err_msg: str) -> None:
        # Noted here: if the end of the connection was read together with this error, it replaces nats-py's last error.
        if "maximum payload violation" in err_msg.lower():
            self.refused_bytes = frames.largest_sent(self)
        if NO_ROOM in err_msg.lower():  # the server keeps the connection, and nats-py would close it
            self.no_room += 1
            self._err = nats.errors.Error(f"nats: {err_msg}")
            await self._error_cb(self._err)
            return
        self._ended = self._ended or violation(nats.errors.Error(err_msg)) is None
        await super()._process_err(err_msg)

    async def _process_op_err(self, e: Exception) -> None:
        self._ended = True
        await super()._process_op_err(e)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if self._ended:  # nats-py would send what is left, fail, and leave its tasks behind without a word
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)

    def _remove_sub(self, sid: int, *limit: int) -> None:
        # Unsubscribed. Messages on their way still come, and are dropped like those of any unknown subscription.
        self._listeners.pop(sid, None)
        gone = self._subs.get(sid)
        super()._remove_sub(sid, *limit)
        if self.refused and gone is not None and not self._subscribed(subject := gone.subject.lower()):
            self.refused.pop(subject, None)  # whoever subscribes next is not refused by it

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            found: dict[str, str] | None = await super()._process_headers(headers)
        except Exception as e:  # an IndexError for a block without a line, for one
            _log.debug("ignoring invalid headers: %s", type(e).__name__, extra={"action": "nats_headers"})
            return None
        return found


def new_client(config: NatsConfig, url: str) -> ListeningClient:
    """Return a client that is not connected yet. Raises ConfigError."""
    if url.startswith("ws://") and config.tls is not None:
        raise ConfigError("NatsConfig.tls is given, but a ws:// URL of NATS is one without TLS: use wss://, or no tls")
    if url.startswith(("ws://", "wss://")) and find_spec("aiohttp") is None:
        raise ConfigError("a ws:// or wss:// URL of NATS needs aiohttp: install it, or use a nats:// or tls:// URL")
    client = TlsClient() if config.tls is not None or url.startswith("tls://") else ListeningClient()
    owned_here(client)
    return client


class TlsClient(ListeningClient):
    """Sends no credentials in the clear: nats-py uses TLS only when the server asks for it.

    Raises ConfigError when the installed nats-py would not call `_connect_command` before it sends the credentials.
    """

    def __init__(self) -> None:
        if hooks.GUARD in hooks.changed():
            raise ConfigError(
                f"{hooks.installed()} cannot guarantee that credentials go over TLS only: {hooks.advice()}"
            )
        super().__init__()

    def _connect_command(self) -> bytes:
        if not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server does not ask for TLS, although TLS is configured")
        return super()._connect_command()


async def round_trip(client: Client, timeout_s: float = 10) -> None:
    """Make a round trip behind everything that was published and subscribed so far. Raises nats-py's errors.

    nats-py's `flush` alone may come before it: its PING goes to the socket at once, and overtakes what still waits for
    the writing task. And when a caller gives `flush` up, a PONG that comes later answers a cancelled future, which ends
    the task that reads, for all who use the client. So this function never cancels its future. Nor does nats-py end it
    when the connection is lost; so this function looks.
    """
    loop, pause_s = asyncio.get_running_loop(), 0.0
    until = loop.time() + timeout_s
    while client.is_connected and client.pending_data_size:
        if loop.time() >= until:
            raise nats.errors.FlushTimeoutError
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s + _STALLED_S / 100, _STALLED_S)
    if not frames.supported:
        await client.flush(max(1, round(timeout_s)))
        return
    if client.is_closed:
        raise nats.errors.ConnectionClosedError
    pong = loop.create_future()
    await client._send_ping(pong)
    while not (await asyncio.wait([pong], timeout=max(min(until - loop.time(), _LOOK_S), 0)))[0]:
        if not client.is_connected:
            raise nats.errors.ConnectionClosedError
        if loop.time() >= until:
            raise nats.errors.FlushTimeoutError


def taken_bytes(told: int, refused: int | None) -> int:
    """Return the size of the largest message that a server takes, as far as is known, in bytes.

    The server told the limit `told`, and refused a message of `refused` bytes (None: none). It does not tell an
    account's limit. If its own limit explains the refusal, that limit is believed.
    """
    return told if refused is None or told < refused else max(refused // 2, _TAKEN_BYTES_MIN)


class Violation(NamedTuple):
    """What NATS does not permit: "publish" or "subscription" to a subject, in lower case.

    `taken`: a subscription that it had permitted.
    """

    verb: str
    subject: str
    taken: bool


def violation(error: Exception | None) -> Violation | None:
    """Return what the error forbids; None: it is another error."""
    found = _FORBIDDEN.search(str(error).lower())
    return None if found is None else Violation(found[1], found[2], found[3] is not None)


def refusal(client: Client, verb: str, subject: str) -> Exception | None:
    """Return the last such violation that the client was told of; an app's client remembers only its last error."""
    if isinstance(client, ListeningClient) and verb == "subscription":
        return client.refused.get(subject.lower())
    errors = client.errors if isinstance(client, ListeningClient) else [client.last_error]
    wanted = (verb, subject.lower())
    return next((e for e in reversed(errors) if (found := violation(e)) is not None and found[:2] == wanted), None)


def refused_ack(client: Client, consumer: str) -> Exception | None:
    """Return the last violation that says that an answer to a delivery of this consumer was refused."""
    errors = client.errors if isinstance(client, ListeningClient) else [client.last_error]
    acks, name = ("publish", "$js.ack."), f".{consumer.lower()}."
    for error in reversed(errors):
        found = violation(error)
        if found is not None and (found.verb, found.subject[:8]) == acks and name in found.subject:
            return error
    return None


async def check_room(client: ListeningClient, before: int, timeout_s: float = 10) -> None:
    """Raise ConfigError if NATS has refused a subscription for want of room since `no_room` was `before`."""
    await round_trip(client, timeout_s)
    if client.no_room > before:
        raise no_room()


def no_room() -> ConfigError:
    """Return the error for a subscription that was refused because there were too many."""
    return ConfigError(
        "NATS permits this user no further subscription on a connection: raise max_subs (`subs`) of its account"
    )


async def _nothing() -> None:
    pass


def forget_unsent(client: Client) -> None:
    """Drop what the client has not sent, and end its connection at once: closing it would send the rest first.

    On a stalled link the rest would arrive when the link is back, long after others have checked what was stored.
    """
    client._pending, client._pending_data_size = [], 0
    transport = client._transport
    if type(transport) is TcpTransport and transport._io_writer is not None:
        transport._io_writer.transport.abort()


async def close_client(client: Client) -> None:
    """Close the client within two seconds, whatever error it raises, even if the caller is cancelled meanwhile."""
    await to_the_end(_close(client), name="bufstore-close-client")


async def _close(client: Client) -> None:
    try:
        async with asyncio.timeout(2):
            await client.close()
    except Exception as e:
        _log.debug("closing a nats client: %s", text_of(e), extra={"action": "nats_close"})
    finally:
        # nats-py ends the tasks of its subscriptions last, and not where the connection was aborted (`forget_unsent`).
        for subscription in client._subs.values():
            if (task := getattr(subscription, "_wait_for_msgs_task", None)) is not None:
                task.cancel()


def told_by(client: Client) -> list[str]:
    """Return the addresses ("host:port") of the cluster that the client's server has told so far."""
    return [uri.netloc for uri in client.discovered_servers]


def why_closed(client: Client) -> str:
    """Return why a client is not connected any more, for a log line or a message of ours."""
    return text_of(client.last_error) if client.last_error else "the connection was closed"


def text_of(error: BaseException | None) -> str:
    """Return the error's text for a log line or a message of ours, without any password."""
    # nats-py puts URLs into some messages; a URL may carry a password.
    words = f"{type(error).__name__}: {error}".split(" ")
    return " ".join(w[: -len(url)] + mask_url(url) if "@" in w and (url := w.lstrip("(")) else w for w in words)
