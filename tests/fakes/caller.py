"""A client of the gateway on a socket of its own, which sends, reads and leaves by hand; for tests that count bytes.

async with Caller(gateway.url) as caller:
    await caller.ask(Endpoint.CHAT, json_fields(Endpoint.CHAT, stream=True))
    await caller.read_until(b"\\n\\n")
    caller.reset()
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from fakes.client import Reply, read_reply
from fakes.line import KEY

WITHIN_S = 15.0  # longest wait of one step
_DATE = re.compile(rb"\r\ndate: [^\r]+")


class Caller:
    """One connection. `data` is every byte that was read from it."""

    def __init__(self, url: str, *, receive_buffer: int | None = None) -> None:
        """`receive_buffer` bounds what the kernel takes for a caller that does not read."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.data = b""
        self.is_over = False  # the gateway has closed or reset

    async def __aenter__(self) -> Caller:
        async with asyncio.timeout(WITHIN_S):
            await asyncio.get_running_loop().sock_connect(self.sock, self._address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    async def ask(self, path: str, body: Any, *, key: str = KEY, headers: Sequence[tuple[str, str]] = ()) -> None:
        await self.send(request_bytes(path, body, key=key, headers=headers))

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(WITHIN_S):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def read(self, size: int = 65_536) -> bytes:
        """What is there, or comes next; b"" when the gateway has closed or reset."""
        try:
            async with asyncio.timeout(WITHIN_S):
                data = await asyncio.get_running_loop().sock_recv(self.sock, size)
        except ConnectionResetError:
            data = b""
        self.is_over = self.is_over or not data
        self.data += data
        return data

    async def read_until(self, mark: bytes, count: int = 1) -> None:
        """Until `mark` has come that often."""
        while self.data.count(mark) < count:
            assert await self.read(), f"the gateway closed after {self.data[-300:]!r}"

    async def read_body(self, beginning: bytes) -> None:
        """Until that much of the first reply's body has come."""
        while not self.reply_so_far().body.startswith(beginning):
            assert await self.read(), f"the gateway closed after {self.data[-300:]!r}"

    async def reply(self) -> Reply:
        """The first reply, read to its end."""
        while not (reply := self.reply_so_far()).is_whole:
            assert await self.read(), f"the gateway closed within its reply: {self.data[-300:]!r}"
        return reply

    def reply_so_far(self) -> Reply:
        """The first reply as far as it came; status 0 while its head is not there. Raises AssertionError."""
        replies = replies_so_far(self.data)
        return replies[0] if replies else Reply(0, {})

    def close(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def replies_so_far(data: bytes) -> list[Reply]:
    """All replies in `data`, the last of which may be cut anywhere; what is there has to be HTTP/1.1."""
    found: list[Reply] = []
    while b"\r\n\r\n" in data:
        head, _, rest = data.partition(b"\r\n\r\n")
        reply, _ = read_reply(_DATE.sub(b"", head) + b"\r\n\r\n")
        if reply.status == 100:
            data = rest
            continue
        found.append(reply)
        if reply.headers.get(b"transfer-encoding") == b"chunked":
            data = _chunks(reply, rest)
        else:
            length = int(reply.headers[b"content-length"])
            reply.pieces, data = [rest[:length]], rest[length:]
            reply.is_whole = len(reply.body) == length
        if not reply.is_whole:
            return found
    assert b"HTTP/1.1 ".startswith(data[:9]) or data.startswith(b"HTTP/1.1 "), f"behind a reply: {data[:80]!r}"
    return found


def _chunks(reply: Reply, rest: bytes) -> bytes:
    """Reads whole chunks; gives what is behind the last one."""
    while b"\r\n" in rest:
        size, _, behind = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            assert b"\r\n".startswith(behind[:2]), f"no end: {behind[:80]!r}"
            reply.is_whole = len(behind) >= 2
            return behind[2:]
        reply.pieces += [behind[:length]] if behind else []
        if len(behind) < length + 2:
            return b""
        assert behind[length : length + 2] == b"\r\n", f"a broken chunk: {rest[:80]!r}"
        rest = behind[length + 2 :]
    return rest


def request_bytes(
    path: str, body: Any, *, key: str = KEY, headers: Sequence[tuple[str, str]] = (), method: str = "POST"
) -> bytes:
    """`body` is bytes, or something to be written as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway", f"x-api-key: {key}", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data
