"""The request of one exchange: its headers, and its body under a limit. context.py adds the reply to it."""

from __future__ import annotations

import asyncio

from gateway.domain.errors import BadRequest, BodyTimeout, BodyTooLarge
from gateway.edge.encoding import coding_of, decode_body
from gateway.edge.line import Line
from gateway.edge.request_ids import request_id_of

EARLY_BODY_BYTES = 65_536  # of a body that nobody has asked for yet; then its caller has to wait


class Incoming:
    """Fed by the connection, read by one handler."""

    # what most requests never change stands here: setting it for each of them costs more than all the rest
    _has_more_body = True
    _body_bytes = 0
    _is_reading = False
    _is_broken = False
    _body_waiter: asyncio.Future[None] | None = None

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

    def feed(self, data: bytes) -> bool:
        """A piece of the body, from the connection. False: nobody has asked for so much yet."""
        self._body.append(data)
        self._body_bytes += len(data)
        self._wake_body()
        return self._is_reading or self._body_bytes <= EARLY_BODY_BYTES

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


def too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit_bytes} bytes, the limit of this gateway (max_body_bytes).")
