"""One HTTP exchange on raw ASGI: headers in, body in under its limit, reply out, and whether the caller is still there.

Used by inference.py; implements the `Downstream` that dispatch writes to.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable
from typing import Any

from litestar.types import Receive, Scope, Send

from gateway.domain.errors import BodyTimeout, BodyTooLarge, ClientGone, UnsupportedEncoding
from gateway.domain.request import NO_RATE, RateState
from gateway.edge.respond import envelope, rate_headers, refusal_headers

REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
Headers = Iterable[tuple[bytes, bytes]]


def request_id_of(scope: Scope) -> str:
    """The caller's X-Request-Id when it is sane and there is just one, else a new one."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and REQUEST_ID.fullmatch(given[0]):
        return given[0].decode("ascii")
    return "req-" + os.urandom(12).hex()


class Exchange:
    """Owned by one handler task. `request_id` goes onto every reply."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.request_id = request_id_of(scope)
        self.has_started = False
        self.status = 0
        self.rate: RateState = NO_RATE
        self.is_gone = False
        self.is_ended = False  # by us: the drain time is over
        self.writing_since: float | None = None  # loop time; read by the write-deadline sweep
        self._is_between_events = True
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for key, value in self.scope["headers"]:
            if key == name:
                return value
        return None

    async def read_body(self, limit_bytes: int, silence_s: float, total_s: float) -> bytes:
        """The whole body. Counts what arrives and does not believe Content-Length, except to refuse early.

        Raises BodyTooLarge, BodyTimeout (silence for `silence_s`, or not whole after `total_s`), ClientGone,
        UnsupportedEncoding.
        """
        encoding = self.header(b"content-encoding")
        if encoding is not None and encoding.strip().lower() != b"identity":
            raise UnsupportedEncoding("Compressed bodies are not accepted; send the body without Content-Encoding.")
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and (len(declared) > 18 or int(declared) > limit_bytes):
            raise too_large(limit_bytes)
        chunks: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + total_s
        while True:
            try:
                async with asyncio.timeout_at(min(loop.time() + silence_s, ends_at)):
                    message: Any = await self._receive()
            except TimeoutError as exc:
                if loop.time() >= ends_at:
                    raise BodyTimeout(f"The body was not whole after {total_s:g} s.") from exc
                raise BodyTimeout(f"The body stopped arriving for {silence_s:g} s.") from exc
            if message["type"] == "http.disconnect":
                raise ClientGone("The caller left while sending its body.")
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit_bytes:
                raise too_large(limit_bytes)
            if not message.get("more_body", False):
                return chunk if not chunks else b"".join((*chunks, chunk))
            chunks.append(chunk)

    def watch(self) -> None:
        """From here on the handler's task is cancelled when the caller hangs up (after the body was read)."""
        self._watcher = asyncio.create_task(self._await_disconnect())

    async def _await_disconnect(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.abandon()
                return

    def abandon(self) -> None:
        """The caller is gone, or so slow that it counts as gone: stop working for it."""
        if not self.is_gone and self._task is not None:
            self.is_gone = True
            self._task.cancel()

    def end(self) -> None:
        """The gateway stops: the caller gets an error event, or a 503 if its reply has not begun."""
        if not self.is_gone and not self.is_ended and self._task is not None:
            self.is_ended = True
            self._task.cancel()

    def unwatch(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    # --- Downstream ---------------------------------------------------------------------------------------------------

    async def start(self, status: int, headers: Headers) -> None:
        self.has_started = True
        self.status = status
        await self._write(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *rate_headers(self.rate), (b"x-request-id", self.request_id.encode())],
            }
        )

    async def write(self, data: bytes) -> None:
        self._is_between_events = data.endswith(EVENT_ENDS)
        await self._write({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        # the server answers our pending receive() with "disconnect" once the reply is whole: that is no hang-up
        self.unwatch()
        await self._write({"type": "http.response.body", "body": data, "more_body": False})

    async def end_with(self, event: bytes) -> None:
        """The last event of a stream that failed, on lines of its own even if the stream broke off within an event."""
        await self.finish(event if self._is_between_events else b"\n\n" + event)

    async def refuse(
        self, status: int, message: str, kind: str, param: str | None, code: str | int | None, retry_after_s: int | None
    ) -> None:
        body = envelope(message, kind, param, code)
        await self.start(status, refusal_headers(body, retry_after_s))
        await self.finish(body)

    async def _write(self, message: Any) -> None:
        self.writing_since = asyncio.get_running_loop().time()
        await self._send(message)
        self.writing_since = None


def too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit_bytes} bytes, the limit of this gateway (max_body_bytes).")
