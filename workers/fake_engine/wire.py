"""HTTP/1.1 server of the fake engine, byte by byte under our control; `process.py` starts it, `api.py` answers.

Behaves as uvicorn does under vLLM: one chunk per event, idle connections closed after the keep-alive time, a
half-closed connection is a client that left. The handler's task is cancelled when the client leaves.
"""

from __future__ import annotations

import asyncio
import email.utils
import http
import os
import socket
import struct
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import httptools

Headers = list[tuple[str, str]]


@dataclass(slots=True)
class Request:
    """A request as received; header names as the client wrote them."""

    method: str
    path: str
    headers: Headers
    body: bytes
    keep_alive: bool

    def header(self, name: str) -> str | None:
        """First value of a header, by its lower-case name."""
        return next((value for key, value in self.headers if key.lower() == name), None)


Handler = Callable[[Request, "Reply"], Awaitable[None]]


class Server:
    """What all connections share; `connections` are the open ones."""

    def __init__(self, handle: Handler, keep_alive_s: float) -> None:
        self.handle = handle
        self.keep_alive_s = keep_alive_s
        self.connections: set[Connection] = set()
        self._date = (0, b"")
        self.stopping = False
        self._none_open = asyncio.Event()

    def connection(self) -> Connection:
        """Protocol factory for `loop.create_server`."""
        return Connection(self)

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self.stopping and not self.connections:
            self._none_open.set()

    async def stop(self) -> None:
        """Closes idle connections now and busy ones after their answer; returns when none is open."""
        self.stopping = True
        if not self.connections:
            return
        for connection in list(self.connections):
            connection.close_if_idle()
        await self._none_open.wait()

    def date(self) -> bytes:
        """The Date header, made once a second."""
        now = int(time.time())
        if self._date[0] != now:
            self._date = (now, f"date: {email.utils.formatdate(now, usegmt=True)}\r\n".encode())
        return self._date[1]


class Connection(asyncio.Protocol):
    """One client. Requests on it are answered one after the other, each in a task that `connection_lost` cancels."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None
        self._url, self._headers, self._body = b"", Headers(), bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none of asyncio's classes
        self.server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.closed(self)
        self._waiting.clear()
        self._stop_idle_timer()
        self.resume_writing()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._stop_idle_timer()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request received.")
            self.transport.close()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    async def writable(self) -> None:
        """Returns when the client has read enough for more to be written."""
        if self._writable is not None:
            await asyncio.shield(self._writable)

    def close_if_idle(self) -> None:
        if self._task is None:
            self.transport.close()

    # called by the parser
    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", [], bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1"), value.decode("latin-1")))
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = httptools.parse_url(self._url).path.decode("latin-1")
        method = self._parser.get_method().decode("latin-1")
        keep_alive = self._parser.should_keep_alive()
        self._waiting.append(Request(method, path, self._headers, bytes(self._body), keep_alive))
        if self._task is None:
            self._next()

    def _next(self) -> None:
        if self._waiting:
            self._task = self._loop.create_task(self._answer(self._waiting.popleft()))
        elif not self.transport.is_closing():
            self._idle = self._loop.call_later(self.server.keep_alive_s, self.transport.close)

    async def _answer(self, request: Request) -> None:
        reply = Reply(self, request)
        try:
            await self.server.handle(request, reply)
        except Exception:
            traceback.print_exc()
            request.keep_alive = False
        finally:
            self._task = None
            if not request.keep_alive or self.server.stopping:
                self.transport.close()
            self._next()

    def _stop_idle_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


class Reply:
    """The answer to one request: either `whole`, or `start`, `chunk` …, `finish`; or one of the bad ends."""

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._pending = bytearray()
        self.byte_by_byte = False
        self.chunk_bytes = 0

    @property
    def client_left(self) -> bool:
        return self._connection.transport.is_closing()

    def head(self, status: int, headers: Headers, length: int | None) -> bytes:
        """Status line and headers; a length of None means a chunked body."""
        phrase = http.HTTPStatus(status).phrase if status in http.HTTPStatus._value2member_map_ else ""
        lines = [f"HTTP/1.1 {status} {phrase}\r\n".encode(), self._connection.server.date(), b"server: uvicorn\r\n"]
        lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers]
        if not self._request.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"transfer-encoding: chunked\r\n\r\n" if length is None else b"\r\n")
        return b"".join(lines)

    async def whole(self, status: int, headers: Headers, body: bytes, share: float = 1.0) -> None:
        """Headers and body; a share below 1 sends only that part of the body."""
        sized = [("content-length", str(len(body))), *headers]
        head = self.head(status, sized, len(body))
        await self.raw(head if self._request.method == "HEAD" else head + body[: int(len(body) * share)])

    async def start(self, status: int, headers: Headers) -> None:
        await self.raw(self.head(status, headers, None))

    async def chunk(self, data: bytes) -> None:
        """One HTTP chunk, or as many as `chunk_bytes` makes of it."""
        if not self.chunk_bytes:
            await self.raw(b"%x\r\n%b\r\n" % (len(data), data))
            return
        self._pending += data
        while len(self._pending) >= self.chunk_bytes:
            part, self._pending = bytes(self._pending[: self.chunk_bytes]), self._pending[self.chunk_bytes :]
            await self.raw(b"%x\r\n%b\r\n" % (len(part), part))

    async def flush(self) -> None:
        """Sends what `chunk_bytes` held back."""
        if self._pending:
            part, self._pending = bytes(self._pending), bytearray()
            await self.raw(b"%x\r\n%b\r\n" % (len(part), part))

    async def finish(self) -> None:
        await self.flush()
        await self.raw(b"0\r\n\r\n")

    async def raw(self, data: bytes) -> None:
        """Bytes onto the socket; waits while the client does not read."""
        transport = self._connection.transport
        if self.byte_by_byte:
            for at in range(len(data)):
                transport.write(data[at : at + 1])
                await asyncio.sleep(0)
        else:
            transport.write(data)
        await self._connection.writable()

    async def cut(self) -> None:
        """Closes the socket as it is, once what was written has gone out."""
        await self.flush()
        self._request.keep_alive = False

    async def reset(self) -> None:
        """TCP reset at once."""
        connected = self._connection.transport.get_extra_info("socket")
        twin = socket.socket(fileno=os.dup(connected.fileno()))
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        twin.close()
        self._connection.transport.abort()

    async def silence(self) -> None:
        """Nothing more until the client leaves (then the task is cancelled)."""
        await self.flush()
        await asyncio.get_running_loop().create_future()
