"""The HTTP/1.1 protocol of the gateway's port: proxied paths go straight to their handlers, everything else to the app.

Used by server.py in place of uvicorn's own protocol. The proxied paths do without ASGI and Litestar, whose layers cost
as much as all of the gateway's own work on a request (docs/decisions/data-path.md). Heads are bounded in size and time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import unquote, unquote_to_bytes

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from gateway.edge.context import STATUS_LINES, Exchange, RequestIds

log = logging.getLogger(__name__)
HEAD_S = 10.0  # from the first byte of a head (or from the connection) to its end
HEAD_BYTES = 65_536  # request line and headers; one network read may go past it
KEEP_ALIVE_S = 75.0  # idle connections of clients; longer than the 60 s for which balancers keep theirs
MAX_PIPELINED = 32  # requests that wait for the replies to those ahead of them
UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})

Handler = Callable[[Exchange], Coroutine[Any, Any, None]]
Turn = Exchange | RequestResponseCycle


class DateLine:
    """The server's own headers as bytes of a head: the date alone. Made anew for each list of them, once a second."""

    __slots__ = ("_headers", "_line")

    def __init__(self) -> None:
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._line = b""

    def of(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        if headers is not self._headers:
            self._headers = headers
            self._line = b"".join(b"%b: %b\r\n" % header for header in headers)
        return self._line


@dataclass(frozen=True, slots=True)
class Lane:
    """The proxied paths, and how long a client may refuse to read, in seconds. One for all connections."""

    handlers: Mapping[bytes, Handler]
    write_s: float
    date: DateLine = field(default_factory=DateLine)
    ids: RequestIds = field(default_factory=RequestIds)


class Front(asyncio.Protocol):
    """One client connection: parses requests, lets one after the other be answered, ends what takes too long.

    A connection is closed HEAD_S after it was opened, or after a head began, unless the head is complete by then. The
    same time is given to a body whose request has been answered already (no key, too large): nobody reads it. A client
    that does not take what is written for `write_s` is cut. Between requests KEEP_ALIVE_S counts.
    """

    __slots__ = (
        "_app_state",
        "_config",
        "_current",
        "_ended_in_this_read",
        "_feeding",
        "_flow",
        "_framing_bytes",
        "_head_bytes",
        "_head_timer",
        "_headers",
        "_idle_since",
        "_idle_timer",
        "_in_head",
        "_is_too_long",
        "_lane",
        "_loop",
        "_moved_in_this_read",
        "_parser",
        "_queue",
        "_read_bytes",
        "_state",
        "_url",
        "_wants_upgrade",
        "_write_timer",
        "is_full",
        "transport",
    )

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        lane: Lane,
    ) -> None:
        """Called by uvicorn's server, which gives all but `lane`."""
        self._config = config
        self._state = server_state
        self._app_state = app_state
        self._lane = lane
        self._loop = _loop or asyncio.get_running_loop()
        self._parser: httptools.HttpRequestParser | None = self._new_parser()
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until connection_made
        self._flow: FlowControl = None  # type: ignore[assignment]
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head = True  # no request is being read: the next bytes belong to a head
        self._ended_in_this_read = False
        self._head_bytes = 0
        self._read_bytes = 0  # of the read of the moment
        self._framing_bytes = 0  # of a body, in reads that brought no piece of it
        self._moved_in_this_read = False
        self._is_too_long = False
        self._wants_upgrade = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._write_timer: asyncio.TimerHandle | None = None
        self._feeding: Turn | None = None  # whose body the parser reads
        self._current: Turn | None = None  # who may write
        self._queue: deque[tuple[Turn, Handler | None]] = deque()  # who waits for that
        self.is_full = False

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._flow = FlowControl(self.transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._arm_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        for timer in (self._head_timer, self._idle_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._idle_timer = self._write_timer = None
        self._queue.clear()  # those have not begun
        self._parser = None  # it holds methods of ours: a cycle
        self._feeding = None
        self.is_full = False
        self._flow.resume_writing()
        current, self._current = self._current, None
        if isinstance(current, Exchange):
            if current.task is not None:  # one that is cancelled before it began cannot say that it has ended
                current.task.add_done_callback(self._state.tasks.discard)
            current.abandon()
        elif current is not None:
            current.disconnected = not current.response_complete
            current.message_event.set()

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            return
        self._ended_in_this_read = self._moved_in_this_read = False
        self._read_bytes = len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            self._cannot_parse()
            return
        except httptools.HttpParserUpgrade as exc:
            self._ignore_upgrade(data[exc.args[0] :])
            return
        if not self._in_head:
            self._framing_bytes = 0 if self._moved_in_this_read else self._framing_bytes + len(data)
            if self._framing_bytes > HEAD_BYTES:  # a trailer or a chunk's extension without end: none of it is wanted
                self.transport.abort()
            return
        if self._ended_in_this_read or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._refuse(431, f"request line and headers are longer than {HEAD_BYTES} bytes", "request_head_too_large")
        elif self._head_timer is None:
            self._arm_head()

    def eof_received(self) -> None:
        """A half-close counts as leaving; the transport closes."""

    def pause_writing(self) -> None:
        self.is_full = True
        self._flow.pause_writing()
        if isinstance(self._current, Exchange):
            self._current.full()
        self._write_timer = self._loop.call_later(self._lane.write_s, self._give_up)

    def resume_writing(self) -> None:
        self.is_full = False
        self._flow.resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if isinstance(self._current, Exchange):
            self._current.room()

    def shutdown(self) -> None:
        """The server stops: idle connections close now, others after the reply of the moment."""
        if self._current is None:
            self.transport.close()
        else:
            self._current.keep_alive = False

    # --- httptools, inside feed_data --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else a trailer: it came too late to decide anything, and there may be any number
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        if parser.should_upgrade():
            self._wants_upgrade = True
            return
        if self._head_bytes + self._read_bytes > HEAD_BYTES and self._head_size() > HEAD_BYTES:
            self._is_too_long = True
            raise ValueError("the head is too long")
        self._in_head = False
        self._head_bytes = self._framing_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        version = parser.get_http_version()
        keep_alive = version != "1.0" and parser.should_keep_alive()
        method = parser.get_method().decode("ascii")
        handler = self._lane.handlers.get(self._url) or self._handler_for(self._url)
        turn: Turn
        if handler is not None:
            turn = Exchange(
                self,
                method,
                self._headers,
                version=version,
                keep_alive=keep_alive,
            )
        else:
            turn = self._app_cycle(method, version, keep_alive)
        self._feeding = turn
        if self._current is None:
            self._begin(turn, handler)
            return
        # It is read on, so that a caller who leaves is noticed, but no more requests are kept than this
        if len(self._queue) < MAX_PIPELINED:
            self._queue.append((turn, handler))
            return
        self._feeding = None
        self._queue[-1][0].keep_alive = False  # its reply is the last one, and tells so

    def on_chunk_header(self) -> None:
        self._moved_in_this_read = True

    def on_body(self, body: bytes) -> None:
        self._moved_in_this_read = True
        turn = self._feeding
        if turn is None or turn.response_complete:
            return
        if isinstance(turn, Exchange):
            turn.feed(body)
            return
        turn.body += body
        if len(turn.body) > HEAD_BYTES:
            self._flow.pause_reading()
        turn.message_event.set()

    def on_message_complete(self) -> None:
        if self._wants_upgrade:
            return
        self._in_head = self._ended_in_this_read = True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        turn, self._feeding = self._feeding, None
        if isinstance(turn, Exchange):
            turn.body_ended()
        elif turn is not None:
            turn.more_body = False
            turn.message_event.set()

    # --- for the exchange -------------------------------------------------------------------------------------------

    @property
    def date_line(self) -> bytes:
        return self._lane.date.of(self._state.default_headers)

    def new_id(self) -> str:
        return self._lane.ids.new()

    def handler_ended(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._state.tasks.discard(task)

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def ended(self) -> None:
        self._state.total_requests += 1
        current, self._current = self._current, None
        if self.transport.is_closing():
            return
        if current is not None and not current.keep_alive:
            if self._in_head:
                self.transport.close()
            else:
                self._linger()
            return
        self._flow.resume_reading()
        if not self._in_head:  # refused before its body was there: who sends on?
            self._arm_head()
        if self._queue:
            self._begin(*self._queue.popleft())
            return
        self._idle_since = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(KEEP_ALIVE_S, self._idle)

    def cut(self) -> None:
        self.transport.abort()

    def pause_reading(self) -> None:
        self._flow.pause_reading()

    def resume_reading(self) -> None:
        self._flow.resume_reading()

    # --- within -----------------------------------------------------------------------------------------------------

    def _head_size(self) -> int:
        """Of the head that has been read, without what came behind it in the same read."""
        return len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # the answer to a first request must not depend on what was sent behind it
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _ignore_upgrade(self, rest: bytes) -> None:
        """The request asks for another protocol too; it is answered as if it did not (RFC 9110, 7.8).

        The parser takes what follows such a head for that other protocol. So a new one reads the request once more,
        without the wish; `rest` is what came behind the head.
        """
        parser = self._parser
        assert parser is not None
        self._wants_upgrade = False
        method = parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "this is no proxy", "invalid_request")
            return
        lines = [b"%b %b HTTP/%b" % (method, self._url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self._headers if header[0] not in UPGRADE_HEADERS]
        if not parser.should_keep_alive():
            lines.append(b"connection: close")
        self._parser = self._new_parser()
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _cannot_parse(self) -> None:
        """What comes is no HTTP: the last request ends with it, those before it are answered."""
        feeding = self._feeding
        if self._is_too_long:
            self._refuse(431, f"request line and headers are longer than {HEAD_BYTES} bytes", "request_head_too_large")
        elif isinstance(feeding, Exchange) and not feeding.response_complete:
            self._parser = None
            feeding.keep_alive = False
            feeding.break_body()
        elif feeding is None and self._current is not None:
            self._parser = None
            last = self._queue[-1][0] if self._queue else self._current
            last.keep_alive = False
        else:
            self._refuse(400, "this is not HTTP/1.1", "invalid_request")

    def _begin(self, turn: Turn, handler: Handler | None) -> None:
        self._current = turn
        tasks = self._state.tasks
        if isinstance(turn, Exchange):
            assert handler is not None
            turn.task = task = self._loop.create_task(handler(turn))
        else:
            task = self._loop.create_task(turn.run_asgi(self._config.loaded_app))
            task.add_done_callback(tasks.discard)
        tasks.add(task)

    def _handler_for(self, url: bytes) -> Handler | None:
        """For a path that is not written plainly: with a query, a slash at its end, escapes, or a whole URL."""
        if not url.startswith(b"/"):
            try:
                url = httptools.parse_url(url).path or b""
            except httptools.HttpParserInvalidURLError:
                return None
        path = url.partition(b"?")[0].rstrip(b"/")
        return self._lane.handlers.get(unquote_to_bytes(path) if b"%" in path else path)

    def _app_cycle(self, method: str, version: str, keep_alive: bool) -> RequestResponseCycle:
        parsed = httptools.parse_url(self._url)
        raw_path = parsed.path or b"/"
        scope: Any = {
            "type": "http",
            "asgi": {"version": self._config.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": get_local_addr(self.transport),
            "client": get_remote_addr(self.transport),
            "scheme": "http",
            "method": method,
            "root_path": "",
            "path": unquote(raw_path.decode("ascii")),
            "raw_path": raw_path,
            "query_string": parsed.query or b"",
            "headers": self._headers,
            "state": self._app_state.copy(),
        }
        return RequestResponseCycle(
            scope=scope,
            transport=self.transport,
            flow=self._flow,
            logger=logging.getLogger("uvicorn.error"),
            access_logger=logging.getLogger("uvicorn.access"),
            access_log=False,
            default_headers=self._state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=(dict(self._headers).get(b"expect") or b"").lower() == b"100-continue",
            keep_alive=keep_alive,
            on_response=self.ended,
        )

    def _arm_head(self) -> None:
        self._head_timer = self._loop.call_later(HEAD_S, self._head_expired)

    def _head_expired(self) -> None:
        self._head_timer = None
        if self._current is not None:  # the head is that of a pipelined request: the reply before it comes first
            self._arm_head()
        elif not self.transport.is_closing():
            self.transport.close()

    def _idle(self) -> None:
        """One timer for many requests: it looks how long the last reply is ago."""
        self._idle_timer = None
        if self._current is not None:
            return  # the end of that reply counts from there
        left_s = self._idle_since + KEEP_ALIVE_S - self._loop.time()
        if self._head_timer is not None:  # that closes, unless the head comes, or the rest of an unwanted body
            left_s = KEEP_ALIVE_S
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._idle)
        else:
            self.transport.close()

    def _linger(self) -> None:
        """The reply is the last one, and its caller still sends: drop that for HEAD_S, or until the caller closes.

        Closed at once, the connection would be reset, and most clients then never look at the reply.
        """
        self._parser = self._feeding = None
        self._queue.clear()
        self.transport.write_eof()
        self._flow.resume_reading()
        self._arm_head()

    def _give_up(self) -> None:
        self._write_timer = None
        log.warning("gave up a caller that did not read its reply for %g s", self._lane.write_s)
        self.transport.abort()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer in OpenAI's envelope without asking anybody, since there is no request to speak of; then close."""
        if self._current is None:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = json.dumps({"error": error}).encode()
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\n"
                b"x-poolgate-error-source: client\r\nx-request-id: %b\r\nconnection: close\r\n\r\n"
                % (len(body), self.new_id().encode())
            )
            self.transport.write(STATUS_LINES[status] + head + body)
        self.transport.close()
