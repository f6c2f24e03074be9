"""One HTTP exchange of a proxied path: its headers, its body under a limit, its reply, and whether its caller is there.

Made by front.py for each request, handed to inference.py; implements the `Downstream` that dispatch writes to. Writing
never waits: the client's transport takes what it is given, and says when it wants no more for now.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from itertools import count
from typing import Protocol

from gateway.domain.endpoint import ErrorShape
from gateway.domain.errors import BadRequest, BodyTimeout, BodyTooLarge
from gateway.domain.request import NO_RATE, RateState
from gateway.edge.encoding import coding_of, decode_body
from gateway.edge.respond import ENGINE_REFUSED, envelope, event_of, rate_lines
from gateway.upstream.fast_path import FastPath

REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
MARK_BYTES = 4  # of the longest
EARLY_BODY_BYTES = 65_536  # of a body that nobody has asked for yet; then its caller has to wait
STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}
COMMENT = b": keep-alive\n\n"
TIMER_SLACK_S = 0.002  # loop clocks count whole milliseconds; a timer may fire that much early
Headers = Iterable[tuple[bytes, bytes]]


class Line(Protocol):
    """The client's connection, as an exchange on it sees it."""

    @property
    def date_line(self) -> bytes:
        """Headers of the server's own for every reply, as bytes of a head."""
        ...

    @property
    def is_full(self) -> bool:
        """More is written than the client takes."""
        ...

    @property
    def transport(self) -> asyncio.WriteTransport: ...

    def new_id(self) -> str:
        """A request id that nobody else has."""
        ...

    def write(self, data: bytes) -> None: ...

    def handler_ended(self, task: asyncio.Task[None] | None) -> None: ...

    def ended(self) -> None:
        """The reply is complete; called once."""
        ...

    def cut(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class RequestIds:
    """New ids: random in front, so that no two processes make the same, and counted behind, which is cheap."""

    __slots__ = ("_numbers", "_prefix")

    def __init__(self) -> None:
        self._prefix = "req-" + os.urandom(8).hex()
        self._numbers = count(int.from_bytes(os.urandom(3), "big"))

    def new(self) -> str:
        return f"{self._prefix}{next(self._numbers):08x}"


def request_id_of(headers: Headers, new: Callable[[], str]) -> str:
    """The caller's X-Request-Id when it is sane and there is just one, else a new one."""
    given = [value for name, value in headers if name == b"x-request-id"]
    if given and len(given) == 1 and REQUEST_ID.fullmatch(given[0]):
        return given[0].decode("ascii")
    return new()


class Exchange:
    """Owned by one handler task, `task`. The connection feeds the body in and tells when the caller is gone.

    Errors have the shape of the path, `errors`, which its handler sets.
    """

    # what most exchanges never change stands here: setting it for each of them costs more than all the rest
    has_started = False
    response_complete = False
    status = 0
    errors = ErrorShape.OPENAI
    rate: RateState = NO_RATE
    is_gone = False
    is_ended = False  # by us: the drain time is over
    task: asyncio.Task[None] | None = None
    on_room: Callable[[], None] | None = None  # called when the client takes more again
    fast_path: FastPath | None = None  # of the stream under way
    _has_more_body = True
    _body_bytes = 0
    _is_reading = False
    _is_broken = False
    _body_waiter: asyncio.Future[None] | None = None
    _room_waiter: asyncio.Future[None] | None = None
    _head: bytes | None = None  # of a reply that has started, until its first bytes go out
    _is_chunked = False
    _last = b""  # of what was written
    _comment_timer: asyncio.TimerHandle | None = None
    _wrote_at = 0.0

    def __init__(
        self,
        line: Line,
        method: str,
        headers: list[tuple[bytes, bytes]],
        *,
        version: str = "1.1",
        keep_alive: bool = True,
    ) -> None:
        """`headers` have lower-case names, in their order; `keep_alive` is what the request asks for."""
        self.method = method
        self.headers = headers
        self.version = version
        self.keep_alive = keep_alive
        self._line = line
        self._fields = fields = dict(reversed(headers))  # the first of a name counts
        self.request_id = request_id_of(headers, line.new_id) if b"x-request-id" in fields else line.new_id()
        self._body: list[bytes] = []

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        return self._fields.get(name)

    def headers_of(self, names: frozenset[bytes]) -> tuple[tuple[bytes, bytes], ...]:
        """All headers of those names, in their order."""
        if names.isdisjoint(self._fields):
            return ()
        return tuple(header for header in self.headers if header[0] in names)

    # --- the body ---------------------------------------------------------------------------------------------------

    async def read_body(self, limit_bytes: int, silence_s: float, total_s: float) -> bytes:
        """The whole body, decoded. Counts what arrives and does not believe Content-Length, except to refuse early.

        The limit holds for what is sent and for what it becomes. Raises BodyTooLarge, BodyTimeout (silence for
        `silence_s`, or not whole after `total_s`), UnsupportedEncoding, BadRequest (broken compression or framing).
        """
        coding = None
        if b"content-encoding" in self._fields:
            coding = coding_of(b",".join(value for name, value in self.headers if name == b"content-encoding"))
        declared = self._fields.get(b"content-length")
        if declared is not None and declared.isdigit() and (len(declared) > 18 or int(declared) > limit_bytes):
            raise too_large(limit_bytes)
        if self._has_more_body:
            await self._rest_of_body(limit_bytes, silence_s, total_s)
        elif self._body_bytes > EARLY_BODY_BYTES:  # reading was paused, and the end of the body was there already
            self._line.resume_reading()  # for the caller's own end
        if self._body_bytes > limit_bytes:
            raise too_large(limit_bytes)
        if self._is_broken:
            raise BadRequest("The body is broken: its chunks are not framed as HTTP/1.1 wants it.")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body if coding is None else await decode_body(body, coding, limit_bytes)

    async def _rest_of_body(self, limit_bytes: int, silence_s: float, total_s: float) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + total_s
        self._is_reading = True
        self._line.resume_reading()
        if not self._body and (self._fields.get(b"expect") or b"").lower() == b"100-continue":
            self._line.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while self._has_more_body and self._body_bytes <= limit_bytes:
            self._body_waiter = loop.create_future()
            try:
                async with asyncio.timeout_at(min(loop.time() + silence_s, ends_at)):
                    await self._body_waiter
            except TimeoutError as exc:
                if loop.time() >= ends_at:
                    raise BodyTimeout(f"The body was not whole after {total_s:g} s.") from exc
                raise BodyTimeout(f"The body stopped arriving for {silence_s:g} s.") from exc

    def feed(self, data: bytes) -> None:
        """A piece of the body, from the connection."""
        self._body.append(data)
        self._body_bytes += len(data)
        if not self._is_reading and self._body_bytes > EARLY_BODY_BYTES:
            self._line.pause_reading()
        self._wake_body()

    def break_body(self) -> None:
        """The body cannot be read to its end: its framing is broken."""
        self._is_broken = True
        self.body_ended()

    def body_ended(self) -> None:
        self._has_more_body = False
        self._wake_body()

    def _wake_body(self) -> None:
        waiter = self._body_waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

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
        if self._comment_timer is not None:
            self._wrote_at = asyncio.get_running_loop().time()
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
        self._line.ended()

    # --- comments while nothing comes ---------------------------------------------------------------------------------

    def comment_every(self, interval_s: float, headers: Headers) -> None:
        """From now on a silence of that length is broken by an SSE comment, which no client shows.

        The first one opens the stream, with status 200 and `headers`.
        """
        loop = asyncio.get_running_loop()
        self._wrote_at = loop.time()

        def tick() -> None:
            now = loop.time()
            if self.fast_path is not None:
                self._wrote_at = max(self._wrote_at, self.fast_path.passed_at)
            if self._wrote_at + interval_s <= now + TIMER_SLACK_S:
                self._wrote_at = now
                if self._is_between_events() and not self._line.is_full:
                    self.start(200, headers)
                    self.write(COMMENT)
            self._comment_timer = loop.call_at(self._wrote_at + interval_s, tick)

        self._comment_timer = loop.call_later(interval_s, tick)

    def _stop_comments(self) -> None:
        if self._comment_timer is not None:
            self._comment_timer.cancel()
            self._comment_timer = None


def too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit_bytes} bytes, the limit of this gateway (max_body_bytes).")
