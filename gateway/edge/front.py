"""The HTTP/1.1 protocol of the gateway's port: proxied paths go straight to their handlers, everything else to the app.

Used by server.py in place of uvicorn's own protocol. The proxied paths do without ASGI and Litestar, whose layers cost
as much as all of the gateway's own work on a request (docs/decisions/data-path.md). Heads are bounded in size and time.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.server import ServerState

from gateway.edge.app_cycle import AppCycle, scope_of
from gateway.edge.context import Exchange
from gateway.edge.heads import HeaderList, head_bytes, refusal, without_upgrade
from gateway.edge.lane import Lane
from gateway.edge.timers import Timers
from gateway.edge.turns import Turn, Turns

HEAD_BYTES = 65_536  # request line and headers; one network read may go past it


class Front(asyncio.Protocol):
    """One client connection: reads requests, hands each over to be answered in its turn, and refuses what is none.

    A connection is closed HEAD_S (timers.py) after it was opened, or after a head began, unless the head is complete by
    then. The same time is given to a body whose request has been answered already (no key, too large): nobody reads it.
    A client that takes nothing of what is written for `write_s` is cut. Between requests KEEP_ALIVE_S counts.
    """

    __slots__ = (
        "_app_state",
        "_config",
        "_ended_in_this_read",
        "_feeding",
        "_framing_bytes",
        "_head_bytes",
        "_headers",
        "_is_too_long",
        "_lane",
        "_loop",
        "_moved_in_this_read",
        "_parser",
        "_read_bytes",
        "_server",
        "_timers",
        "_turns",
        "_url",
        "_wants_upgrade",
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
        self._server = server_state
        self._app_state = app_state
        self._lane = lane
        self._loop = _loop or asyncio.get_running_loop()
        self._parser: httptools.HttpRequestParser | None = self._new_parser()
        self._timers: Timers = None  # type: ignore[assignment]  # until connection_made
        self._turns: Turns = None  # type: ignore[assignment]
        self._feeding: Turn | None = None  # whose body the parser reads
        self._url = b""
        self._headers: HeaderList | None = None  # of the head that is being read
        self._wants_upgrade = False
        self._is_too_long = False
        self._ended_in_this_read = False
        self._moved_in_this_read = False
        self._read_bytes = 0  # of the read of the moment
        self._head_bytes = 0  # of the head that is being read
        self._framing_bytes = 0  # of a body, in reads that brought no piece of it

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        line = cast(asyncio.Transport, transport)
        self._timers = Timers(self._loop, line, self._lane.write_s, self._lane.total_s)
        self._turns = Turns(line, self._timers, self._loop, self._server, self._lane)
        self._server.connections.add(self)  # type: ignore[arg-type]
        self._timers.start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._parser = None  # it holds methods of ours: a cycle
        self._feeding = None
        self._turns.lost()

    def data_received(self, data: bytes) -> None:
        parser, turns = self._parser, self._turns
        if parser is None or turns.is_lingering:
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
        if turns.is_receiving:
            self._framing_bytes = 0 if self._moved_in_this_read else self._framing_bytes + len(data)
            if self._framing_bytes > HEAD_BYTES:  # a trailer or a chunk's extension without end: none of it is wanted
                turns.transport.abort()
            return
        if self._ended_in_this_read or turns.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._refuse_too_long()
        elif self._timers.head is None:
            self._timers.start_head()

    def eof_received(self) -> None:
        """A half-close counts as leaving, whatever is still to be written; the transport closes."""
        self._turns.left()

    def pause_writing(self) -> None:
        self._turns.full()

    def resume_writing(self) -> None:
        self._turns.room()

    def shutdown(self) -> None:
        """Called by server.py when it stops."""
        self._turns.stop()

    # --- httptools, inside feed_data --------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self._headers
        if headers is not None:  # else a trailer: it comes too late to decide anything, and there may be any number
            headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        assert parser is not None and headers is not None
        if parser.should_upgrade():
            self._wants_upgrade = True
            return
        if self._head_bytes + self._read_bytes > HEAD_BYTES and head_bytes(self._url, headers) > HEAD_BYTES:
            self._is_too_long = True
            raise ValueError("the head is too long")
        self._headers = None
        self._head_bytes = self._framing_bytes = 0
        turns, timers = self._turns, self._timers
        turns.is_receiving = True
        if timers.head is not None:
            timers.end_head()
        version = parser.get_http_version()
        keep_alive = version != "1.0" and parser.should_keep_alive()
        method = parser.get_method().decode("ascii")
        handler = self._lane.handlers.get(self._url) or self._lane.handler_of(self._url)
        turn: Turn
        if handler is not None:
            turn = Exchange(turns, method, headers, version=version, keep_alive=keep_alive)
        else:
            turn = self._app_cycle(method, version, headers, keep_alive)
        # What is not wanted is read all the same, so that a caller who leaves is noticed
        self._feeding = turn if turns.take(turn, handler) else None

    def on_chunk_header(self) -> None:
        self._moved_in_this_read = True

    def on_body(self, body: bytes) -> None:
        self._moved_in_this_read = True
        turn = self._feeding
        if turn is None or turn.response_complete or turn.feed(body) or self._turns.keeps(turn):
            return
        self._feeding = None

    def on_message_complete(self) -> None:
        if self._wants_upgrade:
            return
        self._turns.is_receiving = False
        self._ended_in_this_read = True
        timers = self._timers
        if timers.head is not None:
            timers.end_head()
        turn, self._feeding = self._feeding, None
        if turn is not None:
            turn.body_ended()

    # --- within -----------------------------------------------------------------------------------------------------

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # the answer to a first request must not depend on what was sent behind it
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _app_cycle(self, method: str, version: str, headers: HeaderList, keep_alive: bool) -> AppCycle:
        turns = self._turns
        return AppCycle(
            self._config.loaded_app,
            scope_of(
                method,
                self._url,
                version,
                headers,
                transport=turns.transport,
                config=self._config,
                state=self._app_state,
            ),
            turns.transport,
            turns.flow,
            keep_alive=keep_alive,
            default_headers=self._server.default_headers,
            on_response=turns.ended,
        )

    def _ignore_upgrade(self, rest: bytes) -> None:
        """The request asks for another protocol too; it is answered as if it did not (RFC 9110, 7.8).

        The parser takes what follows such a head for that other protocol. So a new one reads the request once more,
        without the wish; `rest` is what came behind the head.
        """
        parser, headers = self._parser, self._headers
        assert parser is not None and headers is not None
        self._wants_upgrade = False
        method = parser.get_method()
        if method == b"CONNECT":
            self._refuse(400, "this is no proxy", "invalid_request")
            return
        version, keep_alive = parser.get_http_version(), parser.should_keep_alive()
        self._parser = self._new_parser()
        self.data_received(without_upgrade(method, self._url, version, headers, keep_alive=keep_alive) + rest)

    def _cannot_parse(self) -> None:
        """What comes is no HTTP: the last request ends with it, those before it are answered."""
        feeding = self._feeding
        if self._is_too_long:
            self._refuse_too_long()
        elif isinstance(feeding, Exchange) and not feeding.response_complete:
            self._parser = None
            feeding.keep_alive = False
            feeding.break_body()
        elif feeding is not None and feeding.response_complete:  # it has its answer; nothing can be read behind it
            self._parser = None
            if self._turns.is_busy:
                self._turns.stop_behind_last()
            else:
                self._turns.transport.close()
        else:
            self._refuse(400, "this is not HTTP/1.1", "invalid_request")

    def _refuse_too_long(self) -> None:
        self._refuse(431, f"request line and headers are longer than {HEAD_BYTES} bytes", "request_head_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer without asking anybody, since there is no request to speak of; then close."""
        turns = self._turns
        if turns.is_busy:  # those ahead are answered, and then it ends
            self._parser = None
            turns.stop_behind_last()
            return
        turns.transport.write(refusal(status, message, code, turns.new_id()))
        turns.transport.close()
