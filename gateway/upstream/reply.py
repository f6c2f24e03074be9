"""The reply of one exchange and its deadlines: `connection.py` fills it as bytes come, the dispatcher reads it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.domain.errors import UpstreamBroken, UpstreamError, UpstreamTimeout
from gateway.upstream.framing import Headers
from gateway.upstream.transport import Deadlines


class Line(Protocol):
    """The connection as its reply sees it."""

    def resume(self) -> None:
        """Room for more bytes."""

    def arm(self, at: float) -> None:
        """See to it that `WireReply.due_at` is looked at when the loop's clock shows `at`, or before."""

    def finish(self, is_reusable: bool) -> None:
        """The reply lets go; called exactly once."""


class WireReply:
    """Implements `UpstreamReply`. Holds its connection until the last byte came, it failed, or it was closed."""

    __slots__ = (
        "_chunks",
        "_deadline",
        "_due_at",
        "_error",
        "_first_byte_at",
        "_gap_s",
        "_line",
        "_loop",
        "_total_at",
        "_waiter",
        "body_began",
        "has_head",
        "headers",
        "is_whole",
        "response_began",
        "status",
        "unread_bytes",
    )

    def __init__(self, line: Line, loop: asyncio.AbstractEventLoop, deadlines: Deadlines, total_at: float) -> None:
        """`total_at`: when the total deadline passes, on the loop's clock."""
        self.status = 0
        self.headers: Headers = []
        self.has_head = False
        self.is_whole = False
        self.response_began = False  # any byte came, be it of a head that never ended
        self.body_began = False
        self.unread_bytes = 0
        self._due_at = total_at
        self._deadline = "total"  # which one `_due_at` is
        self._chunks: list[bytes] = []
        self._error: UpstreamError | None = None
        self._line: Line | None = line
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._first_byte_at = loop.time() + deadlines.first_byte_s
        self._gap_s = deadlines.gap_s
        self._total_at = total_at

    # --- for the dispatcher -----------------------------------------------------------------------------------------

    async def read(self) -> bytes:
        while True:
            chunks = self._chunks
            if chunks:
                data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
                chunks.clear()
                self.unread_bytes = 0
                if self._line is not None:
                    self._line.resume()
                return data
            if self._error is not None:
                raise self._error
            if self.is_whole:
                return b""
            try:
                await self.progress()
            except asyncio.CancelledError:
                self.close()
                raise

    async def read_all(self, limit_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while data := await self.read():
            size += len(data)
            if size > limit_bytes:
                self.close()
                raise UpstreamBroken(f"The engine's reply is longer than {limit_bytes} bytes.", response_began=True)
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if self._line is not None:
            self.fail("The reply was closed before its end.")
        self._chunks.clear()

    # --- for the connection -----------------------------------------------------------------------------------------

    async def head(self) -> None:
        """Until the head has come. Raises UpstreamTimeout or UpstreamBroken when it does not."""
        while not self.has_head:
            if self._error is not None:
                raise self._error
            await self.progress()

    def progress(self) -> asyncio.Future[None]:
        """Done when something happened: bytes, the end, a failure, room to write. Holds the deadline that applies.

        Only while the connection is held. Not a coroutine, since it runs once for each piece of a stream.
        """
        line = self._line
        assert line is not None
        if self.body_began:
            due_at, self._deadline = self._loop.time() + self._gap_s, "gap"
        else:
            due_at, self._deadline = self._first_byte_at, "first byte"
        if due_at > self._total_at:
            due_at, self._deadline = self._total_at, "total"
        self._due_at = due_at
        line.arm(due_at)
        self._waiter = waiter = self._loop.create_future()
        return waiter

    @property
    def due_at(self) -> float:
        """When the deadline passes that holds now; while nobody waits, the total one: a slow reader is no silence."""
        return self._total_at if self._waiter is None else self._due_at

    @property
    def is_over(self) -> bool:
        """The connection has been let go, for better or worse."""
        return self._line is None

    def add(self, data: bytes) -> None:
        self.body_began = True
        self._chunks.append(data)
        self.unread_bytes += len(data)

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def complete(self, is_reusable: bool) -> None:
        """The last byte has come: lets go of the connection, whether or not everything has been read."""
        self.is_whole = True
        line, self._line = self._line, None
        if line is not None:
            line.finish(is_reusable)
        self.wake()

    def fail(self, message: str, cause: BaseException | None = None) -> None:
        """Cuts the connection, unless it was let go before; what came can still be read, then comes the error."""
        error = UpstreamBroken(message, response_began=self.response_began)
        error.__cause__ = cause
        self._cut(error)

    def expire(self) -> None:
        """As `fail`, for the deadline that holds now."""
        name = "total" if self._waiter is None else self._deadline
        self._cut(UpstreamTimeout(f"The engine passed the {name} deadline.", deadline=name))

    def _cut(self, error: UpstreamError) -> None:
        line, self._line = self._line, None
        if line is not None:
            self._error = error
            line.finish(False)
        self.wake()
