"""A client of the gateway's port, in memory: its bytes go into a real `Front`, what comes back is read as HTTP/1.1.

client = Client(b"{}", headers=[KEY])
await client.call({b"/v1/chat/completions": handler})
assert client.status == 200
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from gateway.edge.front import Front
from gateway.edge.lane import Handler, Lane

Headers = list[tuple[bytes, bytes]]
KEY = (b"authorization", b"Bearer sk-test")
DATE = (b"date", b"Tue, 01 Jan 2030 00:00:00 GMT")
WITHIN_S = 10.0
TOTAL_S = 600.0  # the longest that a client of the front may take for what was written


@dataclass
class Reply:
    """One reply as it came so far. `headers` are without the server's own `date`."""

    status: int
    headers: dict[bytes, bytes]
    version: bytes = b"1.1"
    pieces: list[bytes] = field(default_factory=list)  # the chunks, or the body as one
    is_whole: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def error(self) -> dict[str, Any]:
        """The error object of a whole reply, whose length was told."""
        assert self.is_whole and int(self.headers[b"content-length"]) == len(self.body)
        assert self.headers[b"content-type"] == b"application/json"
        document = json.loads(self.body)
        assert set(document) == {"error"} and set(document["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = document["error"]
        return error


def read_reply(data: bytes, *, is_head: bool = False, is_closed: bool = False) -> tuple[Reply, bytes]:
    """The first reply in `data` and what is behind it. Asserts what HTTP/1.1 asks of its head and framing.

    `is_head`: the answer to a HEAD, which has no body. `is_closed`: nothing more will come.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    assert end, f"no whole head: {data!r}"
    line, *fields = head.split(b"\r\n")
    version, status = line.split(b" ", 2)[:2]
    pairs = [(name, value.removeprefix(b" ")) for name, _, value in (line.partition(b":") for line in fields)]
    headers = dict(pairs)
    assert len(headers) == len(pairs), f"a header stands there twice: {pairs}"
    assert all(name == name.lower().strip() and value == value.strip() for name, value in pairs), pairs
    reply = Reply(int(status), headers, version.removeprefix(b"HTTP/"))
    if reply.status == 100:
        reply.is_whole = True
        return reply, rest
    assert headers.pop(DATE[0], DATE[1]) == DATE[1]
    assert not {b"content-length", b"transfer-encoding"} <= set(headers), "two lengths"
    if is_head:
        reply.is_whole = True
    elif b"content-length" in headers:
        length = int(headers[b"content-length"])
        reply.pieces, rest = [rest[:length]], rest[length:]
        reply.is_whole = len(reply.body) == length
    elif headers.get(b"transfer-encoding") == b"chunked":
        assert reply.version == b"1.1", "an HTTP/1.0 client knows no chunks"
        rest = _read_chunks(reply, rest)
    else:
        assert headers.get(b"connection") == b"close", "a body whose end nobody can know"
        reply.pieces, rest, reply.is_whole = [rest], b"", is_closed
    return reply, rest


def _read_chunks(reply: Reply, rest: bytes) -> bytes:
    while rest:
        size, end, behind = rest.partition(b"\r\n")
        length = int(size, 16)
        assert end and behind[length : length + 2] == b"\r\n", f"a broken chunk: {rest[:80]!r}"
        rest = behind[length + 2 :]
        if length == 0:
            reply.is_whole = True
            break
        reply.pieces.append(behind[:length])
    return rest


class Timers:
    """A clock and its timers, which go off when `advance` says so. Stands in for the event loop that holds them."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, (), cast(Any, self))
        heapq.heappush(self._due, (when, next(self._number), timer))
        return timer

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback)

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, timer = heapq.heappop(self._due)
            if not timer.cancelled():
                timer._run()
        self.now = until

    @property
    def pending(self) -> int:
        return sum(not timer.cancelled() for _, _, timer in self._due)

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, _: asyncio.TimerHandle) -> None:
        """The loop's own book-keeping: none here."""


class Line(asyncio.Transport):
    """The gateway's end of a connection."""

    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})
        self.protocol: asyncio.Protocol
        self.written = bytearray()
        self.writes = 0
        self.is_closed = False
        self.has_ended = False  # nothing more will be written; what comes is still read
        self.was_cut = False
        self.is_reading = True
        self.untaken = 0  # bytes that the client has not taken; whoever tests that sets it

    def write(self, data: Any) -> None:
        assert not self.is_closed and not self.has_ended, f"written to a closed connection: {bytes(data)!r}"
        self.written += data
        self.writes += 1

    def get_write_buffer_size(self) -> int:
        return self.untaken

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def write_eof(self) -> None:
        self.has_ended = True

    def abort(self) -> None:
        self.was_cut = self.was_cut or not self.is_closed
        self.close()

    def pause_reading(self) -> None:
        assert self.is_reading
        self.is_reading = False

    def resume_reading(self) -> None:
        assert not self.is_reading
        self.is_reading = True


class Client:
    """One connection, with one request to send on it. More bytes can be sent by hand."""

    def __init__(
        self,
        body: bytes | Iterable[bytes] = b"",
        *,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        headers: Headers | None = None,
        version: str = "1.1",
    ) -> None:
        """A body in pieces goes out in chunks, each of them in a read of its own."""
        self._method = method
        self._pieces = request_pieces(body, method, path, [KEY] if headers is None else headers, version)
        self.line = Line()
        self.state = ServerState()
        self.state.default_headers = [DATE]
        self.front: Front

    def connect(
        self,
        handlers: Mapping[bytes, Handler],
        *,
        app: Any = None,
        write_s: float = 60.0,
        timers: Timers | None = None,
    ) -> None:
        """`handlers` by path; `app` is the ASGI application for all others. `timers` replace those of the loop."""
        config: Any = SimpleNamespace(loaded_app=app, asgi_version="3.0")
        loop: Any = timers
        self.front = Front(cast(uvicorn.Config, config), self.state, {}, loop, lane=Lane(handlers, write_s, TOTAL_S))
        self.line.protocol = self.front
        self.front.connection_made(self.line)

    def send(self, data: bytes) -> None:
        self.front.data_received(data)

    def ask(self, *, but_the_last: int = 0) -> None:
        """Sends the request, or all but its last pieces."""
        for piece in self._pieces[: len(self._pieces) - but_the_last]:
            self.send(piece)

    async def call(self, handlers: Mapping[bytes, Handler], *, app: Any = None) -> None:
        """Connects, asks, and returns when the request has been answered."""
        self.connect(handlers, app=app)
        self.ask()
        await self.idle()

    async def idle(self) -> None:
        """Until no handler runs, those of the requests that waited included."""
        async with asyncio.timeout(WITHIN_S):
            while self.state.tasks:
                await asyncio.wait(set(self.state.tasks))
                await asyncio.sleep(0)  # a connection that was closed is lost in the next turn

    def hang_up(self) -> None:
        """The client leaves."""
        self.line.is_closed = True
        self.front.connection_lost(None)

    def stop_reading(self) -> None:
        self.front.pause_writing()

    def read_on(self) -> None:
        self.front.resume_writing()

    # --- what the client saw --------------------------------------------------------------------------------------

    def replies(self) -> list[Reply]:
        """Every reply so far; all are to requests of the same method."""
        rest, found = bytes(self.line.written), []
        while rest:
            reply, rest = read_reply(rest, is_head=self._method == "HEAD", is_closed=self.line.is_closed)
            found.append(reply)
        return found

    @property
    def reply(self) -> Reply:
        """The only one."""
        (reply,) = self.replies()
        return reply

    @property
    def status(self) -> int:
        return self.reply.status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return self.reply.headers

    @property
    def body(self) -> bytes:
        return self.reply.body

    @property
    def is_whole(self) -> bool:
        return self.reply.is_whole

    def error(self) -> dict[str, Any]:
        return self.reply.error()


def request_pieces(
    body: bytes | Iterable[bytes], method: str, path: str, headers: Headers, version: str = "1.1"
) -> list[bytes]:
    """A request as bytes, in as many reads as the body has pieces (and one more for the end of a chunked one)."""
    pieces = [body] if isinstance(body, bytes) else list(body)
    lines = [b"%b %b HTTP/%b" % (method.encode(), path.encode(), version.encode()), b"Host: x"]
    lines += [name + b": " + value for name, value in headers]
    if not any(name == b"content-length" for name, _ in headers):
        whole = isinstance(body, bytes)
        lines.append(b"Content-Length: %d" % len(pieces[0]) if whole else b"Transfer-Encoding: chunked")
        if not whole:
            pieces = [*(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece), b"0\r\n\r\n"]
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    return [head + pieces[0], *pieces[1:]]
