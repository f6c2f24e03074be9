"""One HTTP exchange of a proxied path: the request that incoming.py reads, its reply, and whether its caller is there.

Made by front.py for each request, handed to inference.py; implements the `Downstream` that dispatch writes to. Writing
never waits: the client's transport takes what it is given, and says when it wants no more for now.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus

from gateway.domain.endpoint import ErrorShape
from gateway.domain.request import NO_RATE, RateState
from gateway.edge.comments import COMMENT, Comments
from gateway.edge.incoming import Incoming
from gateway.edge.respond import ENGINE_REFUSED, envelope, event_of, rate_lines
from gateway.upstream.fast_path import FastPath

EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
MARK_BYTES = 4  # of the longest
STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}
Headers = Iterable[tuple[bytes, bytes]]


class Exchange(Incoming):
    """Owned by one handler task, `task`. The connection feeds the body in and tells when the caller is gone.

    Errors have the shape of the path, `errors`, which its handler sets.
    """

    # as in Incoming: what most exchanges never change
    has_started = False
    response_complete = False
    status = 0
    errors = ErrorShape.OPENAI
    rate: RateState = NO_RATE
    queue_s: float | None = None  # waited for a slot
    ended_at = 0.0  # monotonic, when the reply was complete
    is_gone = False
    is_ended = False  # by us: the drain time is over
    task: asyncio.Task[None] | None = None
    on_room: Callable[[], None] | None = None  # called when the client takes more again
    fast_path: FastPath | None = None  # of the stream under way
    _room_waiter: asyncio.Future[None] | None = None
    _head: bytes | None = None  # of a reply that has started, until its first bytes go out
    _is_chunked = False
    _last = b""  # of what was written
    _comments: Comments | None = None

    # --- the caller -------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """The caller is gone, or so slow that it counts as gone: stop working for it."""
        self._stop_comments()
        if not self.is_gone and not self.response_complete:
            self.is_gone = True
            if self.task is not None:
                self.task.cancel()

    def end(self) -> None:
        """The gateway stops: the caller gets an error event, or a 503 if its reply has not begun."""
        if not self.is_gone and not self.is_ended and self.task is not None:
            self.is_ended = True
            self.task.cancel()

    # --- the reply --------------------------------------------------------------------------------------------------

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole reply; its length is written here."""
        self.has_started = True
        self.status = status
        head = self._head_of(status, headers, b"content-length: %d\r\n" % len(body))
        if self.method == "HEAD":
            body = b""
        if len(body) <= 65_536:
            self._line.write(head + body)
        else:
            self._line.write(head)
            self._line.write(body)
        self._complete()

    def start(self, status: int, headers: Headers) -> None:
        """The head of a reply whose length nobody knows; it goes out with the first bytes."""
        if self.has_started:  # a comment was there before
            return
        self.has_started = True
        self.status = status
        self._is_chunked = self.version == "1.1"
        if not self._is_chunked:
            self.keep_alive = False
        self._head = self._head_of(status, headers, b"transfer-encoding: chunked\r\n" if self._is_chunked else b"")

    def write(self, data: bytes) -> bool:
        """Whether the client takes more at once; if not, `on_room` is called when it does."""
        self._last = data if len(data) >= MARK_BYTES else (self._last + data)[-MARK_BYTES:]
        line = self._line
        if self._comments is not None:
            self._comments.wrote()
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head is not None:
            data, self._head = self._head + data, None
        line.write(data)
        return not line.is_full

    @property
    def chunks(self) -> asyncio.WriteTransport | None:
        return self._line.transport if self._is_chunked and self._head is None else None

    def finish(self, data: bytes = b"") -> None:
        """The end of what `start` began."""
        if self._is_chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        if self._head is not None:
            data, self._head = self._head + data, None
        self._line.write(data)
        self._complete()

    def fail(self, status: int, headers: Headers, body: bytes) -> None:
        """An error as the whole reply; where the status is spent, as the last event of the stream.

        That stands on lines of its own even if the stream broke off within an event.
        """
        if not self.has_started:
            self.reply(status, headers, body)
            return
        event = event_of(body, self.errors)
        self.finish(event if self._is_between_events() else b"\n\n" + event)

    def _is_between_events(self) -> bool:
        return not self._last or self._last.endswith(EVENT_ENDS)

    def refuse(self, status: int, message: str, kind: str, param: str | None, code: str | int | None) -> None:
        self.fail(status, ENGINE_REFUSED, envelope(self.errors, status, message, kind, param, code))

    async def drained(self) -> None:
        """Until the client takes more. The connection ends this wait: by its write deadline at the latest."""
        while self._line.is_full and not self.is_gone:
            self._room_waiter = asyncio.get_running_loop().create_future()
            await self._room_waiter

    def full(self) -> None:
        """The client takes no more for now; from the connection."""
        if self.fast_path is not None:
            self.fast_path.close()

    def room(self) -> None:
        """The client takes more again; from the connection."""
        waiter = self._room_waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self.on_room is not None:
            self.on_room()

    def _head_of(self, status: int, headers: Headers, length_line: bytes) -> bytes:
        lines = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, self._line.date_line]
        for name, value in headers:
            if name == b"connection":  # only ever to close
                self.keep_alive = False
            else:
                lines.append(b"%b: %b\r\n" % (name, value))
        if self.rate is not NO_RATE:
            lines.append(rate_lines(self.rate))
        if self.queue_s is not None:
            lines.append(b"x-poolgate-queue-ms: %d\r\n" % round(self.queue_s * 1000))
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"x-request-id: %b\r\n%b\r\n" % (self.request_id.encode(), length_line))
        return b"".join(lines)

    def close(self) -> None:
        """The handler is done. A reply that it did not complete has no end: its connection is cut."""
        self._stop_comments()
        self.on_room = self.fast_path = None
        self._line.handler_ended(self.task)
        self.task = None
        if not self.response_complete:
            self._line.cut()

    def _complete(self) -> None:
        self._stop_comments()
        self.on_room = self.fast_path = None
        self.response_complete = True
        self.ended_at = time.monotonic()
        self._line.ended()

    # --- comments while nothing comes ---------------------------------------------------------------------------------

    def comment_every(self, interval_s: float, headers: Headers) -> None:
        """From now on a silence of that length is broken by a comment. The first one opens the stream, with status 200
        and `headers`."""

        def comment() -> None:
            if self._is_between_events() and not self._line.is_full:
                self.start(200, headers)
                self.write(COMMENT)

        self._comments = Comments(interval_s, self._passed_at, comment)

    def _passed_at(self) -> float:
        return 0.0 if self.fast_path is None else self.fast_path.passed_at

    def _stop_comments(self) -> None:
        if self._comments is not None:
            self._comments.stop()
            self._comments = None
