"""HTTP/1.1 to replicas over kept-alive connections, plain or in TLS: the hot path's transport, made by `app.py`.

Our own pool on `httptools`, since a general HTTP client costs a multiple of all the gateway's other work.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import ssl
import time
from collections.abc import Callable

from gateway.domain.errors import ConnectFailed, OutOfDescriptors, ShuttingDown, UpstreamBroken, UpstreamTimeout
from gateway.upstream.connect_reason import reason
from gateway.upstream.connection import Connection
from gateway.upstream.framing import Address, parse_address, request_head
from gateway.upstream.reply import WireReply
from gateway.upstream.transport import Deadlines, UpstreamRequest, late

log = logging.getLogger(__name__)
IDLE_S = 4.0  # vLLM closes a connection that was idle for 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 0.32)
IDLE_TLS_S = 30.0  # a handshake is dear, and clouds and proxies wait 60 s and more
SWEEP_S = 0.5
STALE_S = 0.1  # an idle connection that the replica closed as we wrote breaks within a round trip
TELL_FULL_S = 60.0  # a line in the log at most so often
CLOSE_S = 1.0  # how long `aclose` waits for the loop to close its sockets


class WireTransport:
    """Implements `Transport` for `http[s]://host[:port][/prefix]` and `unix:/path/of.sock`. One event loop only.

    No proxies, no redirects.
    """

    def __init__(
        self,
        trust: Callable[[str], ssl.SSLContext],
        *,
        max_idle_per_replica: int = 256,
        max_idle_replicas: int = 1024,
    ) -> None:
        """`trust`: with which certificates a url is spoken to. A connection that comes free over the bounds is closed
        instead of kept."""
        self._trust = trust
        self._max_idle_per_replica = max_idle_per_replica
        self._max_idle_replicas = max_idle_replicas
        self._idle: dict[str, list[Connection]] = {}  # by url; longest idle first; no empty lists
        self._open: set[Connection] = set()
        self._active = 0
        self._loop: asyncio.AbstractEventLoop | None = (
            None  # known at the first send; asking each time is a system call
        )
        self._sweeper: asyncio.TimerHandle | None = None
        self._told_full_at = -math.inf
        self._is_closed = False
        self._all_lost: asyncio.Event | None = None

    @property
    def active(self) -> int:
        """Exchanges that hold a connection, or are making one. A reply that has come whole holds none."""
        return self._active

    @property
    def idle(self) -> int:
        """Connections that wait for their next request."""
        return sum(map(len, self._idle.values()))

    async def send(self, url: str, request: UpstreamRequest, deadlines: Deadlines) -> WireReply:
        address = parse_address(url)
        head = request_head(address, request)
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        now = loop.time()
        total_at = now + deadlines.total_s
        expects_body = request.method != b"HEAD"
        connection = self._take(url, now)
        stale: UpstreamBroken | None = None
        on_send = request.on_send
        if connection is not None:
            if on_send is not None:
                on_send()
            try:
                return await connection.exchange(
                    head, request.body, deadlines, now, total_at, expects_body=expects_body
                )
            except UpstreamBroken as exc:
                # 1. A reply had begun: the replica works on it. 2. Not a byte, and at once: it had most likely closed
                # the idle connection just as we wrote, so a new one may be tried, once. 3. Not a byte, after a while:
                # it had the request, which may be what it died of.
                if exc.response_began or loop.time() - now > STALE_S:
                    raise
                stale = exc
        try:
            connection = await self._connect(url, address, loop, deadlines, total_at)
        except (ConnectFailed, UpstreamTimeout, OutOfDescriptors) as exc:
            if stale is not None and stale.request_sent:  # the request may be what it died of: not to be called unseen
                raise stale from exc
            raise
        if on_send is not None:
            on_send()
        now = loop.time()
        return await connection.exchange(head, request.body, deadlines, now, total_at, expects_body=expects_body)

    async def aclose(self) -> None:
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self._idle.clear()
        if not self._open:
            return
        self._all_lost = asyncio.Event()
        for connection in list(self._open):
            connection.abort()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._all_lost.wait()
        except TimeoutError:
            pass  # the sockets are closed; only the loop's own farewell is late

    async def _connect(
        self, url: str, address: Address, loop: asyncio.AbstractEventLoop, deadlines: Deadlines, total_at: float
    ) -> Connection:
        """A new connection, counted as active. Raises as `send` does; then nothing is left open."""
        if self._is_closed:
            raise ShuttingDown("This gateway is shutting down.", retry_after_s=1.0)
        connection = Connection(url, loop, self._on_free, self._on_lost)
        connect_at = loop.time() + deadlines.connect_s
        context = self._trust(url) if address.is_tls else None
        is_connected = False
        self._active += 1
        self._open.add(connection)
        try:
            async with asyncio.timeout_at(min(connect_at, total_at)):
                if address.socket_path is not None:
                    await loop.create_unix_connection(lambda: connection, address.socket_path)
                else:
                    await loop.create_connection(lambda: connection, address.host, address.port)
                if context is not None:
                    await connection.start_tls(context, address.host, deadlines.connect_s)
            if self._is_closed:
                raise ShuttingDown("This gateway is shutting down.", retry_after_s=1.0)
            is_connected = True
            return connection
        except TimeoutError as exc:
            deadline = "connect" if connect_at <= total_at else "total"
            raise late(deadline, "took no connection before") from exc
        except (OSError, UnicodeError) as exc:  # UnicodeError: a host name that IDNA cannot encode
            if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
                self._tell_full()
                raise OutOfDescriptors("This gateway takes no more connections for now.", retry_after_s=1.0) from exc
            raise ConnectFailed(f"No connection to the engine: {reason(exc)}.") from exc
        finally:
            if not is_connected:
                self._active -= 1
                connection.abort()
                self._on_lost(connection)

    def _tell_full(self) -> None:
        now = time.monotonic()
        if now - self._told_full_at > TELL_FULL_S:
            self._told_full_at = now
            log.error(
                "no free file descriptor for a connection to an engine: every stream takes two; "
                "raise the limit of open files (ulimit -n), or gateway.processes"
            )

    def _take(self, url: str, now: float) -> Connection | None:
        """The connection that was in use last, which the replica is least likely to have closed; counted as active."""
        idle = self._idle.get(url)
        while idle:
            connection = idle.pop()
            if not idle:
                del self._idle[url]
            if now - connection.idle_since < _idle_s(url):
                self._active += 1
                return connection
            connection.abort()
        return None

    def _on_free(self, connection: Connection, is_reusable: bool) -> None:
        self._active -= 1
        if not is_reusable:
            return
        idle = self._idle.get(connection.url)
        if idle is None and len(self._idle) < self._max_idle_replicas:
            idle = self._idle[connection.url] = []
        if idle is None or len(idle) >= self._max_idle_per_replica or self._is_closed:
            connection.abort()
            return
        loop = self._loop
        assert loop is not None  # a connection was made
        connection.idle_since = loop.time()
        idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(SWEEP_S, self._sweep)

    def _on_lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.url)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.url]
        if self._all_lost is not None and not self._open:
            self._all_lost.set()

    def _sweep(self) -> None:
        """Closes what was idle too long; one timer for all of them, and none while nothing is idle."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for url, idle in list(self._idle.items()):
            horizon = now - _idle_s(url)
            kept = [connection for connection in idle if connection.idle_since > horizon]
            for connection in idle[: len(idle) - len(kept)]:
                connection.abort()
            if kept:
                self._idle[url] = kept
            else:
                del self._idle[url]
        self._sweeper = loop.call_later(SWEEP_S, self._sweep) if self._idle else None


def _idle_s(url: str) -> float:
    return IDLE_TLS_S if url.startswith("https:") else IDLE_S
