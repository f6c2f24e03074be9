"""An HTTP server whose every byte a test decides: what a replica sends, when, and how its connection ends.

A script is a coroutine that gets one accepted connection. The first connection gets the first script and so on; the
last script serves all that come after. With `tls` it speaks TLS, and a script begins when the handshake is over. Usage:

    async with ScriptedUpstream(script) as upstream:
        reply = await transport.send(upstream.url, …)
        await eventually(lambda: upstream.open_connections == 0)
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

WAIT_S = 10.0  # longest wait of any one step; passing it fails the test, on however slow a machine


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came; header names as they were written."""

    line: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def header(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


class Peer:
    """The server's side of one connection. Reading is by hand too: what is not read stays in the kernel's buffers."""

    def __init__(self, sock: socket.socket, upstream: ScriptedUpstream, tls: Tls | None = None) -> None:
        self._sock = sock
        self._upstream = upstream
        self._tls = tls
        self._buffer = b""
        self.sent_bytes = 0

    async def request(self) -> Received:
        """The next request. Raises ConnectionError when the client closes first."""
        while b"\r\n\r\n" not in self._buffer:
            await self._receive()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        line, *rest = head.split(b"\r\n")
        headers = tuple((name, value.strip()) for name, _, value in (field.partition(b":") for field in rest))
        length = next((int(value) for name, value in headers if name.lower() == b"content-length"), 0)
        while len(self._buffer) < length:
            await self._receive()
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        received = Received(line, headers, body)
        self._upstream.requests.append(received)
        return received

    async def take(self, count: int) -> None:
        """Reads so many bytes, or some more, of whatever comes."""
        while len(self._buffer) < count:
            await self._receive()

    async def send(self, data: bytes) -> None:
        """Returns when the kernel has taken all of it; stalls when the client does not read. `sent_bytes` counts."""
        loop = asyncio.get_running_loop()
        view = memoryview(data)
        for start in range(0, len(view), 65_536):
            piece = view[start : start + 65_536]
            await loop.sock_sendall(self._sock, piece if self._tls is None else self._tls.encrypted(piece))
            self.sent_bytes += len(piece)

    async def trickle(self, data: bytes) -> None:
        """Byte by byte, each with a turn of the loop of its own."""
        for i in range(len(data)):
            await self.send(data[i : i + 1])
            await asyncio.sleep(0)

    async def stalls(self) -> int:
        """Until writes stand still, because the client does not read; how many bytes it took."""
        async with asyncio.timeout(WAIT_S):
            sent = -1
            while sent != self.sent_bytes:
                sent = self.sent_bytes
                await asyncio.sleep(0.2)
        return sent

    async def closed(self) -> None:
        """Until the client has closed or reset its side. Fails when it sends anything instead."""
        try:
            data = await self._recv()
        except TimeoutError as exc:  # an OSError as well
            raise AssertionError("the client neither closed nor reset") from exc
        except OSError:
            return
        assert data == b"", f"the client sent {data[:80]!r} instead of closing"

    @property
    def alpn(self) -> str | None:
        """What was agreed on in the handshake."""
        return None if self._tls is None else self._tls.alpn

    async def end_tls(self) -> None:
        """Says TLS's farewell, if TLS is spoken, and leaves the socket open."""
        if self._tls is not None:
            await asyncio.get_running_loop().sock_sendall(self._sock, self._tls.farewell())

    def reset(self) -> None:
        """Ends the connection with RST, as a killed host or a full backlog does."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    async def _receive(self) -> None:
        data = await self._recv()
        if not data:
            raise ConnectionResetError("the client closed")
        self._buffer += data

    async def _recv(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            if self._tls is not None:
                return await self._tls.receive(self._sock)
            return await asyncio.get_running_loop().sock_recv(self._sock, 65_536)


class Tls:
    """The server's side of TLS on a socket that somebody else reads and writes."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    async def handshake(self, sock: socket.socket) -> None:
        """Raises ConnectionError when the client ends it."""
        while True:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                await self._exchange(sock)
            except ssl.SSLError as exc:
                await asyncio.get_running_loop().sock_sendall(sock, self._outgoing.read())  # the alert says why
                raise ConnectionAbortedError("no handshake") from exc
            else:
                await asyncio.get_running_loop().sock_sendall(sock, self._outgoing.read())
                return

    @property
    def alpn(self) -> str | None:
        return self._object.selected_alpn_protocol()

    def farewell(self) -> bytes:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._object.unwrap()
        return self._outgoing.read()

    def encrypted(self, data: memoryview) -> bytes:
        self._object.write(data)
        return self._outgoing.read()

    async def receive(self, sock: socket.socket) -> bytes:
        while True:
            try:
                return self._object.read(65_536)
            except ssl.SSLWantReadError:
                try:
                    await self._exchange(sock)
                except ConnectionAbortedError:
                    return b""
            except ssl.SSLZeroReturnError:
                return b""

    async def _exchange(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._outgoing.pending:
            await loop.sock_sendall(sock, self._outgoing.read())
        data = await loop.sock_recv(sock, 65_536)
        if not data:
            raise ConnectionAbortedError("the client closed")
        self._incoming.write(data)


Script = Callable[[Peer], Awaitable[None]]


class ScriptedUpstream:
    """Listens on a free loopback port, or on a Unix socket when `socket_path` is given. Closes a connection when its
    script returns; a script may end by ConnectionError, any other exception fails the test at the end."""

    def __init__(self, *scripts: Script, socket_path: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._scripts = scripts
        self._tls = tls
        self._socket_path = socket_path
        self._listener: socket.socket | None = None
        self._acceptor: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self.requests: list[Received] = []
        self.accepted = 0
        self.url = ""

    @property
    def open_connections(self) -> int:
        return len(self._tasks)

    async def __aenter__(self) -> ScriptedUpstream:
        family = socket.AF_INET if self._socket_path is None else socket.AF_UNIX
        self._listener = socket.socket(family)
        self._listener.setblocking(False)
        self._listener.bind(("127.0.0.1", 0) if self._socket_path is None else self._socket_path)
        self._listener.listen(256)
        name = self._listener.getsockname()
        scheme = "http" if self._tls is None else "https"
        self.url = f"unix:{name}" if self._socket_path is not None else f"{scheme}://127.0.0.1:{name[1]}"
        self._acceptor = asyncio.create_task(self._accept(self._listener))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [task for task in (self._acceptor, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if exc is None and self._failures:
            raise self._failures[0]

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            script = self._scripts[min(self.accepted, len(self._scripts) - 1)]
            self.accepted += 1
            task = asyncio.create_task(self._run(script, sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, script: Script, sock: socket.socket) -> None:
        with sock:
            sock.setblocking(False)
            if self._socket_path is None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                tls = None
                if self._tls is not None:
                    tls = Tls(self._tls)
                    async with asyncio.timeout(WAIT_S):
                        await tls.handshake(sock)
                await script(Peer(sock, self, tls))
            except ConnectionError:
                pass
            except Exception as exc:
                self._failures.append(exc)


@contextlib.asynccontextmanager
async def deaf_listener(scheme: str = "http") -> AsyncIterator[str]:
    """The url of a listener whose backlog is full: a connection to it is neither made nor refused (Linux)."""
    with socket.socket() as listener, contextlib.ExitStack() as fillers:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        host, port = listener.getsockname()
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect((host, port))
        yield f"{scheme}://{host}:{port}"


def plain(body: bytes, status: bytes = b"200 OK", *more: bytes) -> bytes:
    """A whole reply with content-length, headers as vLLM's server writes them."""
    lines = [b"HTTP/1.1 " + status, b"server: uvicorn", b"content-length: %d" % len(body), *more]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STREAM_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
