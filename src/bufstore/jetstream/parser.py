"""Parses the messages that the server sends, with one copy of each.

nats-py keeps what it reads in a buffer that it extends, searches and shortens, 32 KiB at a time. A message of some
hundred KiB, as a group of the log may be, is copied again and again while it arrives.
"""

from __future__ import annotations

from nats.aio.transport import TcpTransport
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

_END = b"\r\n"
_READ_BYTES = 1 << 20


class MessageParser(Parser):
    """Parses messages (MSG and HMSG of the NATS client protocol), and leaves other lines to nats-py's parser."""

    #: Grows when a connection ends: what arrived with the end is not parsed.
    _life = 0

    def reset(self) -> None:
        super().reset()
        self._life += 1
        #: The beginning of a message or line whose rest has not come; its bytes, and those of the whole (0: unknown).
        self._held: list[bytes] = []
        self._size = self._whole = 0

    async def parse(self, data: bytes = b"") -> None:
        """Parse what has come. Raises ProtocolError, and what the client's methods raise."""
        if self._held:
            self._held.append(data)
            self._size += len(data)
            if self._size < self._whole:
                return
            data, self._held = b"".join(self._held), []
        life, at, end = self._life, 0, len(data)
        while at < end and life == self._life:
            line_end = data.find(_END, at)
            if line_end < 0:
                self._hold(data[at:], 0)
                return
            words, behind = data[at:line_end].split(), line_end + 2
            if words and words[0] in (b"MSG", b"HMSG"):
                sid, reply, headers, size = _numbers(words)
                first, last = behind + headers, behind + size
                if last + 2 > end:
                    self._hold(data[at:], last + 2 - at)
                    return
                at = last + 2
                await self.nc._process_msg(sid, words[1], reply, data[first:last], data[behind:first])
            else:
                await super().parse(data[at:behind])
                if self.buf:
                    raise ProtocolError("nats: unknown protocol")
                at = behind

    def _hold(self, data: bytes, whole: int) -> None:
        self._held, self._size, self._whole = [data], len(data), whole


def _numbers(words: list[bytes]) -> tuple[int, bytes, int, int]:
    """Return the subscription, the reply subject, and the bytes of the headers and of all, from a message's line."""
    try:
        if words[0] == b"MSG":
            sid, *reply, size = words[2:]
            headers = b"0"
        else:
            sid, *reply, headers, size = words[2:]
        numbers = int(sid), reply[0] if reply else b"", int(headers), int(size)
    except ValueError:
        raise ProtocolError("nats: malformed MSG") from None
    if len(reply) > 1 or not 0 <= numbers[2] <= numbers[3]:
        raise ProtocolError("nats: malformed MSG")
    return numbers


def read_all(transport: TcpTransport) -> None:
    """Make a new connection read at once whatever has come."""
    if (reader := transport._io_reader) is not None:

        async def read(_: int) -> bytes:
            return await reader.read(_READ_BYTES)

        transport.read = read  # type: ignore[method-assign, assignment]
