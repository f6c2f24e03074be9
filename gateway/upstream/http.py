"""HTTP/1.1 over TLS on httpx, for replicas with an `https://` url: clouds and servers of others. Made by `app.py`.

Not the hot path: a request costs about half a millisecond of CPU here. Each connection has an httpx transport of
its own and a task that fills its reply: httpx's own pool loses count of connections whose requests are cancelled, and a
TLS handshake that is cancelled leaves its socket open, so a connection that is not known to be idle is closed here.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from gateway.domain.errors import ConnectFailed, InternalError, ShuttingDown, UpstreamBroken
from gateway.upstream.framing import sent_headers
from gateway.upstream.http_errors import failure_of
from gateway.upstream.http_line import Body, Line
from gateway.upstream.http_reply import HttpReply
from gateway.upstream.transport import Deadlines, UpstreamRequest

log = logging.getLogger(__name__)
IDLE_S = 30.0  # below the 60 s and more of clouds and proxies; one that closes earlier is noticed before the next use
SWEEP_S = 1.0
CLOSE_S = 1.0  # how long `aclose` waits for its tasks


class HttpTransport:
    """Implements `Transport` for `https://host[:port][/prefix]`. One event loop only. No proxies, no redirects."""

    def __init__(
        self, trust: Callable[[str], ssl.SSLContext], *, max_connections: int = 1024, max_idle_per_replica: int = 64
    ) -> None:
        """`trust`: which certificates are accepted at a url. Over `max_connections` in use a request is refused."""
        self._trust = trust
        self._max_connections = max_connections
        self._max_idle_per_replica = max_idle_per_replica
        self._idle: dict[str, list[Line]] = {}  # by url; longest idle first; no empty lists
        self._busy: set[HttpReply] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def active(self) -> int:
        """Exchanges that hold a connection, or are making one."""
        return len(self._busy)

    @property
    def idle(self) -> int:
        """Connections that wait for their next request."""
        return sum(map(len, self._idle.values()))

    async def send(self, url: str, request: UpstreamRequest, deadlines: Deadlines) -> HttpReply:
        total_at = asyncio.get_running_loop().time() + deadlines.total_s
        outgoing = request_of(url, request)
        line = self._take(url)
        if line is not None:
            try:
                return await self._exchange(line, outgoing, deadlines, total_at)
            except UpstreamBroken as exc:
                # a used connection that dies without a byte was most likely closed just as we wrote: one new one
                if exc.response_began or line.is_fresh or self._is_closed:
                    raise
        return await self._exchange(Line(url, self._trust(url)), outgoing, deadlines, total_at)

    async def aclose(self) -> None:
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for reply in list(self._busy):
            reply.close()
        for line in [line for lines in self._idle.values() for line in lines]:
            self._own(line.cut())
        self._idle.clear()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    async def _exchange(self, line: Line, outgoing: httpx.Request, deadlines: Deadlines, total_at: float) -> HttpReply:
        if self._is_closed:
            raise ShuttingDown("This gateway is shutting down.", retry_after_s=1.0)
        if len(self._busy) >= self._max_connections:
            self._own(line.cut())
            raise ConnectFailed("No connection to the engine: the gateway has as many open as it may.")
        reply = HttpReply(asyncio.get_running_loop(), deadlines, total_at, lambda: self._cut(line, reply))
        self._busy.add(reply)
        line.task = self._own(self._fill(line, reply, outgoing))
        try:
            await reply.head()
        except BaseException:
            reply.close()
            raise
        return reply

    def _cut(self, line: Line, reply: HttpReply) -> None:
        self._busy.discard(reply)
        if line.is_waiting and line.task is not None:
            line.task.cancel()
        # else that task is about to look at the reply, or we run in it

    async def _fill(self, line: Line, reply: HttpReply, outgoing: httpx.Request) -> None:
        """The task of one exchange: from the connection to the last byte, or to the cut."""
        is_reusable = False
        try:
            is_reusable = await line.run(reply, outgoing)
        except asyncio.CancelledError:
            if not reply.is_over():  # not by us: the loop ends
                reply.close()
                raise
        except httpx.HTTPError as exc:
            reply.fail_with(failure_of(exc, line.is_connected, line.received > 0))
        except Exception:
            log.exception("an exchange over TLS failed")
            reply.fail("The reply could not be read.", response_began=line.received > 0)
        finally:
            if is_reusable and not self._is_closed:
                self._busy.discard(reply)
                self._keep(line)
            else:
                await line.cut()
                self._busy.discard(reply)
            reply.complete()

    def _own(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- idle connections -------------------------------------------------------------------------------------------

    def _take(self, url: str) -> Line | None:
        lines = self._idle.get(url)
        if not lines:
            return None
        line = lines.pop()
        if not lines:
            del self._idle[url]
        return line

    def _keep(self, line: Line) -> None:
        loop = asyncio.get_running_loop()
        line.idle_since = loop.time()
        lines = self._idle.setdefault(line.url, [])
        lines.append(line)
        if len(lines) > self._max_idle_per_replica:
            self._own(lines.pop(0).cut())
        if self._sweeper is None:
            self._sweeper = loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        horizon = loop.time() - IDLE_S
        for url, lines in list(self._idle.items()):
            while lines and lines[0].idle_since <= horizon:
                self._own(lines.pop(0).cut())
            if not lines:
                del self._idle[url]
        self._sweeper = loop.call_later(SWEEP_S, self._sweep) if self._idle else None


def request_of(url: str, request: UpstreamRequest) -> httpx.Request:
    """Raises ConnectFailed for a url of another form, InternalError for a line break in a header or the path."""
    target, host = target_of(url, request.path)
    headers = [
        (b"host", host),
        (b"accept-encoding", b"identity"),
        (b"content-length", b"%d" % len(request.body)),
        *sent_headers(request),
    ]
    text = b"".join(name + value for name, value in headers) + request.path
    if b"\n" in text or b"\r" in text or b"\0" in text:
        raise InternalError("A header for the engine holds a line break.")
    return httpx.Request(request.method.decode("ascii"), target, headers=headers, stream=Body(request.body))


@lru_cache(maxsize=1024)
def target_of(url: str, path: bytes) -> tuple[httpx.URL, bytes]:
    """Where a request goes, and its Host header."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError; httpx takes any number
        if parts.scheme == "https" and parts.hostname and parts.username is None and not parts.query:
            base = httpx.URL(f"https://{parts.netloc}")
            return base.copy_with(raw_path=parts.path.rstrip("/").encode("ascii") + path), base.netloc
    except (ValueError, httpx.InvalidURL) as exc:  # port out of range, a bracket too few, a name outside ASCII
        raise ConnectFailed("The engine's url cannot be read; use https://host.") from exc
    raise ConnectFailed("The engine's url is of no form this gateway speaks; use https://host.")
