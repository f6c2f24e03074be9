"""The reply of one exchange and its deadlines: `connection.py` fills it as bytes come, forward.py reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway.domain.errors import UpstreamBroken, UpstreamError
from gateway.upstream.fast_path import FastPath
from gateway.upstream.framing import Headers, without_hop_by_hop
from gateway.upstream.transport import Deadlines, late

TIMER_SLACK_S = 0.002  # loop clocks count whole milliseconds; a timer may fire that much early
_CLOSED = "The reply was closed before its end."


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
        "_error",
        "_fast",
        "_first_byte_at",
        "_gap_s",
        "_headers",
        "_is_held",
        "_line",
        "_loop",
        "_silent_since",
        "_take",
        "_total_at",
        "_waiter",
        "body_began",
        "chunks",
        "has_head",
        "head_lines",
        "is_whole",
        "request_sent",
        "response_began",
        "status",
        "unread_bytes",
    )

    def __init__(
        self, line: Line, loop: asyncio.AbstractEventLoop, deadlines: Deadlines, now: float, total_at: float
    ) -> None:
        """`now`, and `total_at`, when the total deadline passes, are on the loop's clock."""
        self.status = 0
        self.head_lines: Headers = []  # as they came, trailers left out
        self._headers: Headers | None = None
        self.has_head = False
        self.is_whole = False
        self.response_began = False  # any byte came, be it of a head that never ended
        self.request_sent = False  # handed over to the kernel, whole
        self.body_began = False
        self.unread_bytes = 0
        self.chunks: list[bytes] = []  # of the body, that nobody has taken yet
        self._error: Exception | None = None  # an UpstreamError, or what a taker raised
        self._line: Line | None = line
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._first_byte_at = min(now + deadlines.first_byte_s, total_at)  # until the body has begun
        self._gap_s = deadlines.gap_s
        self._total_at = total_at
        self._take: Callable[[bytes], bool] | None = None
        self._fast: FastPath | None = None  # beside `_take`
        self._is_held = False  # whoever takes the reads has no room
        self._silent_since = now  # when the last bytes came, or the wait for the next ones began

    # --- for whoever asked ------------------------------------------------------------------------------------------

    @property
    def headers(self) -> Headers:
        if self._headers is None:
            self._headers = without_hop_by_hop([(name.lower(), value) for name, value in self.head_lines])
        return self._headers

    async def read(self) -> bytes:
        while True:
            if self.chunks:
                data = self._taken()
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

    def _taken(self) -> bytes:
        chunks = self.chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self.unread_bytes = 0
        return data

    async def read_all(self, limit_bytes: int) -> bytes:
        if self.is_whole and self._error is None and self.unread_bytes <= limit_bytes:  # came with its head, mostly
            return self._taken()
        parts: list[bytes] = []
        size = 0
        while data := await self.read():
            size += len(data)
            if size > limit_bytes:
                self.close()
                raise UpstreamBroken(f"The engine's reply is longer than {limit_bytes} bytes.", response_began=True)
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def relay(self, take: Callable[[bytes], bool], fast: FastPath | None = None) -> None:
        self._take, self._fast = take, fast
        self._silent_since = self._loop.time()
        try:
            while True:
                self._hand_over()
                if not self.chunks:
                    if self._error is not None:
                        raise self._error
                    if self.is_whole:
                        return
                waiter = self._waiter = self._loop.create_future()
                if self._line is not None:
                    self._line.arm(self.due_at)
                    await waiter
                else:
                    await self._held_at_the_end(waiter)
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._take = self._fast = None

    async def _held_at_the_end(self, waiter: asyncio.Future[None]) -> None:
        """Waits for a taker without room when no connection holds the deadlines any more: to the total one."""
        try:
            async with asyncio.timeout_at(self._total_at):
                await waiter
        except TimeoutError as exc:
            self.chunks.clear()
            raise late("total") from exc

    def resume(self) -> None:
        self._is_held = False
        if self._take is not None:
            self._silent_since = self._loop.time()  # the silence until now was the taker's
            self.deliver()
            if self._line is not None:
                self._line.arm(self.due_at)
                self._line.resume()

    def close(self) -> None:
        if self._line is not None:
            self.fail(_CLOSED)
        elif self.chunks and self._take is not None and self._error is None:  # they wait for a taker without room
            self._error = UpstreamBroken(_CLOSED, response_began=True, request_sent=True)
        self.chunks.clear()
        self.wake()

    # --- for the connection -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises UpstreamTimeout or UpstreamBroken when the reply has failed."""
        if self._error is not None:
            raise self._error

    def progress(self) -> asyncio.Future[None]:
        """Done when something happened: bytes, the end, a failure, room to write. Holds the deadline that applies.

        Only while the connection is held. Not a coroutine, since it runs once for each piece of a stream.
        """
        line = self._line
        assert line is not None
        self._waiter = waiter = self._loop.create_future()
        if self.body_began:
            self._silent_since = self._loop.time()
            line.arm(self.due_at)
        else:
            line.arm(self._first_byte_at)
        return waiter

    def deliver(self) -> None:
        """A read has been taken in: hands it over where it came in, or wakes whoever waits for it."""
        if self._take is None:
            self.wake()
            return
        self._silent_since = self._loop.time()
        self._hand_over()
        if self._line is None:  # the end, or a failure: from here on `relay` looks after the rest
            self.wake()

    def fast_path(self) -> Callable[[bytes], bool] | None:
        """What may be offered the next read, if that begins with a chunk. Holds until a read goes the long way."""
        fast = self._fast
        return None if fast is None or self._is_held or self.chunks or self._line is None else fast.take

    def _hand_over(self) -> None:
        if not self.chunks or self._is_held or self._take is None:
            return
        try:
            self._is_held = not self._take(self._taken())
        except Exception as exc:
            self.spoil(exc)
        if self._line is not None:
            self._line.resume()

    def spoil(self, defect: Exception) -> None:
        """A taker raised, which is a defect of ours: `relay` raises it, where somebody can say so."""
        line, self._line = self._line, None
        self._error = defect
        if line is not None:
            line.finish(False)

    @property
    def due_at(self) -> float:
        """When the deadline passes that holds now; while nobody waits, the total one: a slow reader is no silence."""
        if self._waiter is None or self._is_held:
            return self._total_at
        if not self.body_began:
            return self._first_byte_at
        since = self._silent_since if self._fast is None else max(self._silent_since, self._fast.passed_at)
        return min(since + self._gap_s, self._total_at)

    @property
    def is_over(self) -> bool:
        """The connection has been let go, for better or worse."""
        return self._line is None

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
        self.deliver()

    def fail(self, message: str, cause: BaseException | None = None) -> None:
        """Cuts the connection, unless it was let go before; what came can still be read, then comes the error."""
        error = UpstreamBroken(message, response_began=self.response_began, request_sent=self.request_sent)
        error.__cause__ = cause
        self._cut(error)

    def expire(self) -> None:
        """As `fail`, for the deadline that holds now."""
        if self._is_held:  # the taker had all the time there is
            self.chunks.clear()
        name = "total" if self.due_at >= self._total_at else "gap" if self.body_began else "first byte"
        self._cut(late(name))

    def _cut(self, error: UpstreamError) -> None:
        line, self._line = self._line, None
        if line is not None:
            self._error = error
            line.finish(False)
        self.deliver()
