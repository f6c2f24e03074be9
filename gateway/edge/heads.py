"""uvicorn's HTTP/1.1 protocol with an end to request heads that are too long or never come. Used by `server.py`.

uvicorn 0.54 on httptools has no limit for either: 20 MB of one header was kept and answered with 200, and a connection
that sends nothing, or a byte now and then, stayed open for as long as we watched (docs/decisions/asgi-server.md).
"""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_S = 10.0  # from the first byte of a head (or from the connection) to its end
HEAD_BYTES = 65_536  # request line and headers; one network read may go past it


class BoundedHeads(HttpToolsProtocol):
    """A connection is closed HEAD_S after it was opened, or after a head began, unless the head is complete by then.

    The same time is given to a body whose request has been answered already (no key, too large): nobody reads it.
    Between requests uvicorn's own keep-alive time counts. One timer per connection, and one per head that does not
    come whole in one read; none per request otherwise.
    """

    _in_head = True  # no request is being read: the next bytes belong to a head
    _ended_in_this_read = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._ended_in_this_read = False
        super().data_received(data)
        if not self._in_head or self._ended_in_this_read or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._refuse(431, f"request line and headers are longer than {HEAD_BYTES} bytes", "request_head_too_large")
        elif self._head_timer is None:
            self._arm()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = self._ended_in_this_read = True
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():  # refused before its body was there: who sends on?
            self._arm()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not HTTP/1.1", "invalid_request")

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._expired)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expired(self) -> None:
        self._head_timer = None
        if self._is_answering():  # the head is that of a pipelined request: the reply before it comes first
            self._arm()
        elif not self.transport.is_closing():
            self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer in OpenAI's envelope without asking the app, which has not seen a request; then close."""
        if not self._is_answering():
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = json.dumps({"error": error}).encode()
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\n"
                b"x-poolgate-error-source: client\r\nconnection: close\r\n\r\n" % len(body)
            )
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
