"""One TLS connection on httpx, and one exchange on it at a time; made and pooled by `http.py`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx

from gateway.upstream.framing import ends_with_connection, without_hop_by_hop
from gateway.upstream.http_reply import HttpReply

WRITE_BYTES = 65_536


class Line:
    """One connection: an httpx transport that may have no more than one, and what its trace tells."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self.url = url
        self.idle_since = 0.0  # on the loop's clock
        self.task: asyncio.Task[None] | None = None  # of the exchange
        self.is_waiting = False  # that task waits for the network: only then may it be cancelled
        self.is_fresh = False  # connected for this exchange
        self.is_connected = False
        self.received = 0  # bytes of the exchange's reply
        self._stream: Any = None  # httpcore's network stream; closed here, whatever state httpcore is in
        self._http = httpx.AsyncHTTPTransport(
            verify=context, trust_env=False, http2=False, limits=httpx.Limits(max_connections=1), retries=0
        )

    async def run(self, reply: HttpReply, outgoing: httpx.Request) -> bool:
        """Fills the reply; whether the connection can be used again. Raises httpx.HTTPError."""
        self.is_fresh = self.is_connected = False
        self.received = 0
        outgoing.extensions = {"trace": partial(self._trace, reply)}
        if reply.is_over():
            return False
        response = await self._wait(self._http.handle_async_request(outgoing))
        if response.status_code == 101:
            reply.fail("The engine's reply switches protocols, which nobody asked for.", response_began=True)
        elif self.received == 0:  # it stood in the buffer already: bytes behind the reply before
            reply.fail("The engine sent bytes that belong to no reply.", response_began=False)
        headers = [(name.lower(), value) for name, value in response.headers.raw]
        if not reply.is_over():
            reply.begin(response.status_code, without_hop_by_hop(headers))
        assert isinstance(response.stream, httpx.AsyncByteStream)
        pieces = aiter(response.stream)
        while not reply.is_over():
            piece = await self._wait(_next(pieces))
            if piece is None:
                await response.stream.aclose()  # httpcore: done, and idle
                return is_kept(response, headers, outgoing.method)
            await reply.add(piece)
        # whoever had it let go while this task was not waiting: the dead connection ends httpx's iterators in order
        await self.cut()
        while await self._wait(_next(pieces)) is not None:
            pass  # only what httpcore had read before
        return False

    async def cut(self) -> None:
        """Closes the socket now, without a TLS farewell."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()
        await self._http.aclose()

    async def _wait(self, coroutine: Any) -> Any:
        self.is_waiting = True
        try:
            return await coroutine
        finally:
            self.is_waiting = False

    async def _trace(self, reply: HttpReply, event: str, info: dict[str, Any]) -> None:
        """httpcore's trace extension: the socket as soon as there is one, and when which phase begins."""
        match event:
            case "connection.connect_tcp.started":
                self.is_fresh = True
            case "connection.connect_tcp.complete":
                self._stream = info["return_value"]
            case "connection.start_tls.complete":
                self._stream = stream = info["return_value"]
                stream.read = partial(self._read, stream.read)
            case "http11.send_request_headers.started":
                self.is_connected = True
                reply.connected()

    async def _read(self, read: Any, max_bytes: int, timeout: float | None = None) -> bytes:
        """The stream's own read, counted: httpcore does not tell whether a byte of a reply has come."""
        data: bytes = await read(max_bytes, timeout)
        self.received += len(data)
        return data


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)


class Body(httpx.AsyncByteStream):
    """A request's body in pieces, so that TLS holds no second copy of all of it."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Pieces(self._body)


class _Pieces:
    """Not a generator: one that is left half-way is closed by a task of its own some time later."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._at >= len(self._body):
            raise StopAsyncIteration
        piece = self._body[self._at : self._at + WRITE_BYTES]
        self._at += WRITE_BYTES
        return piece


def is_kept(response: httpx.Response, headers: list[tuple[bytes, bytes]], method: str) -> bool:
    """Whether httpcore keeps the connection of a reply that has come whole."""
    closes = any(name == b"connection" and b"close" in value.lower() for name, value in headers)
    has_end = method == "HEAD" or response.status_code in (204, 304) or not ends_with_connection(headers)
    return response.http_version == "HTTP/1.1" and has_end and not closes
