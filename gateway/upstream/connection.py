"""One connection to a replica, one exchange on it at a time; made and pooled by `wire.py`.

The asyncio protocol that feeds `httptools`, holds the deadline timer, and stops reading from a replica whose bytes
nobody takes.
"""

from __future__ import annotations

import asyncio
import math
import os
import ssl
from collections.abc import Callable
from typing import cast

import httptools

from gateway.upstream.framing import ends_with_connection
from gateway.upstream.reply import TIMER_SLACK_S, WireReply
from gateway.upstream.transport import Deadlines

HIGH_WATER_BYTES = 65_536  # unread bytes of a reply at which reading from the replica stops; a read takes all of them
MAX_HEAD_BYTES = 65_536
ONE_WRITE_BYTES = 65_536  # a body up to this size goes out in one write with its head
FAREWELL_S = 1.0  # the loop's bound for an orderly end of TLS, which nobody here asks for


class Connection(asyncio.Protocol):
    """States: not connected yet; free; in an exchange, when `_reply` is set; lost, when `on_lost` has been called."""

    __slots__ = (
        "_expects_body",
        "_head_bytes",
        "_is_between_chunks",
        "_is_read_paused",
        "_is_reusable",
        "_is_write_paused",
        "_loop",
        "_on_free",
        "_on_lost",
        "_parser",
        "_pass_on",
        "_reply",
        "_socket",
        "_timer",
        "_timer_at",
        "_transport",
        "idle_since",
        "url",
    )

    def __init__(
        self,
        url: str,
        loop: asyncio.AbstractEventLoop,
        on_free: Callable[[Connection, bool], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        """`on_free(connection, is_reusable)` ends each exchange; `on_lost(connection)` comes once, when all is over."""
        self.url = url
        self.idle_since = 0.0  # on the loop's clock; the pool's
        self._loop = loop
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        # what lies under `_transport` where that is TLS, else the same: a pause here keeps back the end of the
        # connection too, behind which uvloop drops what it has not yet handed over, and an abort works in the handshake
        self._socket: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reply: WireReply | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._is_read_paused = False
        self._is_write_paused = False
        self._is_reusable = False
        self._expects_body = True
        self._head_bytes = 0
        self._is_between_chunks = False  # of the reply's body, by what the parser has been given
        self._pass_on: Callable[[bytes], bool] | None = None  # the fast path, when it may be offered the next read

    async def start_tls(self, context: ssl.SSLContext, host: str, within_s: float) -> None:
        """The handshake, on a connection just made. Raises OSError, of which ssl.SSLError is one.

        `within_s`: the loop's bound; whoever calls has a deadline of its own and, when this fails, calls `abort`.
        """
        socket, transport = self._socket, None
        if socket is not None and not socket.is_closing():
            transport = await self._loop.start_tls(
                socket,
                self,
                context,
                server_hostname=host,
                ssl_handshake_timeout=within_s,
                ssl_shutdown_timeout=FAREWELL_S,
            )
        if transport is None or transport.is_closing():  # `abort`, or bytes before anybody asked
            raise ConnectionResetError
        self._transport = transport

    async def exchange(
        self, head: bytes, body: bytes, deadlines: Deadlines, now: float, total_at: float, *, expects_body: bool
    ) -> WireReply:
        """Sends a request and returns its reply once the head is there.

        `now` and `total_at` are on the loop's clock. `expects_body`: False for HEAD, whose headers speak of a body that
        never comes. Raises UpstreamTimeout and UpstreamBroken; then, and when cancelled, the connection is cut.
        """
        self._reply = reply = WireReply(self, self._loop, deadlines, now, total_at)
        self._expects_body = expects_body
        self._head_bytes = 0
        self._is_between_chunks = self._is_reusable = False
        try:
            transport = self._transport
            if transport is None or transport.is_closing():
                reply.fail("The engine closed the connection.")
            elif len(body) <= ONE_WRITE_BYTES:
                transport.write(head + body)
                self._is_reusable = reply.request_sent = True
            else:
                await self._write_slowly(transport, reply, head, body)
            while not reply.has_head:
                reply.check()
                await reply.progress()
        except BaseException:
            reply.close()
            raise
        return reply

    async def _write_slowly(self, transport: asyncio.Transport, reply: WireReply, head: bytes, body: bytes) -> None:
        """Hands the body over as fast as the replica takes it; stops when the replica answers before it has all."""
        transport.write(head)
        view = memoryview(body)
        for start in range(0, len(body), ONE_WRITE_BYTES):
            while self._is_write_paused and not reply.has_head and not reply.is_over:
                await reply.progress()
            if reply.has_head or reply.is_over or transport.is_closing():
                return
            transport.write(view[start : start + ONE_WRITE_BYTES])
        # a write that failed is told only in a later turn of the loop; until then the transport is closing
        self._is_reusable = reply.request_sent = not transport.is_closing()

    def arm(self, at: float) -> None:
        """Makes the timer fire at `at` or before. It stays armed between exchanges, so most of them never touch it."""
        if self._timer_at > at:
            self._disarm()
            self._timer_at = at
            self._timer = self._loop.call_at(at, self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        reply = self._reply
        if reply is None:
            return
        if self._loop.time() + TIMER_SLACK_S >= reply.due_at:
            reply.expire()
        else:
            self.arm(reply.due_at)

    def resume(self) -> None:
        if self._is_read_paused and self._socket is not None:
            self._is_read_paused = False
            self._socket.resume_reading()

    def finish(self, is_reusable: bool) -> None:
        """Called by the reply when it lets go, once for each exchange."""
        self._reply = self._pass_on = None
        is_reusable = is_reusable and self._is_reusable
        if not is_reusable:
            self.abort()
        self._on_free(self, is_reusable)

    def abort(self) -> None:
        """Closes the socket now, dropping unsent bytes. Never a half-close: for vLLM that is a disconnect too."""
        if self._socket is not None:
            self._socket.abort()

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = self._socket = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        pass_on = self._pass_on
        if pass_on is not None:
            try:
                if pass_on(data):
                    return
            except Exception as exc:
                if (reply := self._reply) is not None:
                    reply.spoil(exc)
                    reply.wake()
                return
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        self._pass_on = None
        reply, parser = self._reply, self._parser
        if reply is None or parser is None:  # nobody asked for anything
            self.abort()
            return
        reply.response_began = True
        if not reply.has_head:
            self._head_bytes += len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not reply.is_whole:
                reply.fail(f"The engine's reply is malformed: {exc.__context__ or exc}.", exc)
                return
            self._is_reusable = False  # the reply is fine; what came behind it is not
        if reply.is_whole:
            reply.complete(is_reusable=True)
            return
        if not reply.has_head and self._head_bytes > MAX_HEAD_BYTES:
            reply.fail(f"The engine's reply is malformed: {_HEAD_TOO_LONG}.")
            return
        reply.deliver()
        if self._is_between_chunks and data.endswith(b"\r\n"):  # else the next chunk's size line has begun
            self._pass_on = reply.fast_path()
        if reply.unread_bytes > HIGH_WATER_BYTES and not self._is_read_paused and self._socket is not None:
            self._is_read_paused = True
            self._socket.pause_reading()

    def eof_received(self) -> None:
        self._end(None)
        self.abort()  # an idle one; TLS would say its farewells to nobody

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._take_what_is_left()
        self._end(exc)
        self._disarm()
        self._transport = self._socket = self._parser = None  # the parser holds methods of ours: a cycle
        self._on_lost(self)

    def _take_what_is_left(self) -> None:
        """Reads what the kernel still holds of a reply that came before the connection broke.

        An engine that refuses a long body answers, and resets what is still on its way to it. The loop, which then
        fails to write, looks no more for something to read, though Linux keeps it. Not under TLS: it is closed by now.
        """
        transport = self._transport
        if self._reply is None or transport is None or transport is not self._socket:
            return
        try:
            descriptor = transport.get_extra_info("socket").fileno()  # both loops close it when we have returned
            while self._reply is not None and (data := os.read(descriptor, HIGH_WATER_BYTES)):
                self._receive(data)
        except OSError:  # the reset, or nothing more
            return

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if self._reply is not None:
            self._reply.wake()

    def _end(self, exc: Exception | None) -> None:
        reply = self._reply
        if reply is None:
            return
        if exc is None and reply.has_head and ends_with_connection(reply.head_lines):
            reply.complete(is_reusable=False)
        elif exc is None:
            reply.fail("The engine closed the connection before its reply was whole.")
        else:
            reply.fail("The connection to the engine broke before its reply was whole.", exc)

    # --- httptools, inside feed_data; what is raised here leaves it as the context of an HttpParserError -------------

    def on_message_begin(self) -> None:
        if self._reply is None or self._reply.is_whole:
            raise ValueError("bytes behind the end of the reply")

    def on_header(self, name: bytes, value: bytes) -> None:
        reply = self._reply
        if reply is not None and not reply.has_head:  # else a trailer
            reply.head_lines.append((name, value))

    def on_headers_complete(self) -> None:
        reply, parser = self._reply, self._parser
        assert reply is not None and parser is not None
        status = parser.get_status_code()
        if status == 101:
            raise ValueError("it switches protocols, which nobody asked for")
        if status < 200:  # an interim reply: the real one follows
            reply.head_lines.clear()
            return
        # the bytes so far may be those of the body as well
        if self._head_bytes > MAX_HEAD_BYTES and sum(len(n) + len(v) for n, v in reply.head_lines) > MAX_HEAD_BYTES:
            raise ValueError(_HEAD_TOO_LONG)
        reply.status = status
        reply.has_head = True
        if not self._expects_body:
            self._is_reusable = False  # the parser does not know, and waits for the body
            reply.is_whole = True

    def on_body(self, data: bytes) -> None:
        reply = self._reply
        if reply is not None:
            reply.body_began = True
            reply.chunks.append(data)
            reply.unread_bytes += len(data)

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

    def on_message_complete(self) -> None:
        reply, parser = self._reply, self._parser
        if reply is not None and parser is not None and reply.has_head:
            reply.is_whole = True
            if not parser.should_keep_alive():
                self._is_reusable = False


_HEAD_TOO_LONG = f"its head is longer than {MAX_HEAD_BYTES} bytes"
