"""The reply of one exchange over httpx: its buffer, its deadlines, its taker. Filled by `http_line.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.domain.errors import UpstreamBroken, UpstreamError, UpstreamTimeout
from gateway.upstream.framing import Headers
from gateway.upstream.transport import Deadlines

HIGH_WATER_BYTES = 65_536  # unread bytes at which the next piece is not asked for


class HttpReply:
    """Implements `UpstreamReply`. Holds its connection until the last byte came, it failed, or it was closed."""

    __slots__ = (
        "_chunks",
        "_connect_at",
        "_cut_off",
        "_error",
        "_first_byte_at",
        "_first_byte_s",
        "_gap_s",
        "_is_paused",
        "_is_whole",
        "_loop",
        "_room",
        "_silent_since",
        "_taker",
        "_total_at",
        "_total_timer",
        "_unread_bytes",
        "_waiter",
        "body_began",
        "has_head",
        "headers",
        "status",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deadlines: Deadlines, total_at: float, cut_off: Callable[[], None]
    ) -> None:
        """`total_at`: on the loop's clock. `cut_off` is called once, unless the reply comes whole before that."""
        self.status = 0
        self.headers: Headers = []
        self.has_head = False
        self.body_began = False
        self._chunks: list[bytes] = []
        self._unread_bytes = 0
        self._error: UpstreamError | None = None
        self._is_whole = False
        self._loop = loop
        self._cut_off: Callable[[], None] | None = cut_off
        self._connect_at = loop.time() + deadlines.connect_s
        self._first_byte_s = deadlines.first_byte_s
        self._first_byte_at: float | None = None  # known once the connection is there
        self._gap_s = deadlines.gap_s
        self._total_at = total_at
        self._total_timer = loop.call_at(total_at, self._expire, "total")  # holds while nobody waits, too
        self._silent_since = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._taker: Callable[[bytes], bool] | None = None
        self._is_paused = False  # the taker has no room

    # --- for the dispatcher -----------------------------------------------------------------------------------------

    async def read(self) -> bytes:
        self._silent_since = self._loop.time()
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._is_whole:
                return b""
            await self._progress()
        return self._take_all()

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

    async def relay(self, take: Callable[[bytes], bool]) -> None:
        self._taker = take
        self._is_paused = False
        self._silent_since = self._loop.time()
        try:
            self._hand_over()
            while self._chunks or not (self._is_whole or self._error is not None):
                await self._progress()
        finally:
            self._taker = None
            self._is_paused = False
        if self._error is not None:
            raise self._error

    def resume(self) -> None:
        if not self._is_paused:
            return
        self._is_paused = False
        self._silent_since = self._loop.time()
        self._hand_over()
        self._wake()  # the deadline that holds now is another one

    def close(self) -> None:
        self.fail("The reply was closed before its end.", response_began=self.has_head)
        self._drop()

    # --- for the task that fills it ---------------------------------------------------------------------------------

    async def head(self) -> None:
        """Until the head has come. Raises ConnectFailed, UpstreamTimeout or UpstreamBroken when it does not."""
        while not self.has_head:
            if self._error is not None:
                raise self._error
            await self._progress()

    def is_over(self) -> bool:
        """Nobody wants more of it, or there is no more."""
        return self._cut_off is None

    def connected(self) -> None:
        self._first_byte_at = self._loop.time() + self._first_byte_s
        self._wake()

    def begin(self, status: int, headers: Headers) -> None:
        self.status, self.headers, self.has_head = status, headers, True
        self._wake()

    async def add(self, data: bytes) -> None:
        """Takes a piece of the body; returns when there is room for another one, or no need for any."""
        if self.is_over() or not data:
            return
        self.body_began = True
        self._silent_since = self._loop.time()
        self._chunks.append(data)
        self._unread_bytes += len(data)
        if self._taker is None:
            self._wake()
        else:
            self._hand_over()
        while self._unread_bytes > HIGH_WATER_BYTES and not self.is_over():
            self._room = self._loop.create_future()
            await self._room

    def complete(self) -> None:
        """The last byte has come."""
        if self._let_go() is not None:
            self._is_whole = True
            self._wake()

    def fail(self, message: str, cause: BaseException | None = None, *, response_began: bool) -> None:
        """Cuts the connection, unless it was let go before; what came can still be read, then comes the error."""
        error = UpstreamBroken(message, response_began=response_began)
        error.__cause__ = cause
        self.fail_with(error)

    def fail_with(self, error: UpstreamError) -> None:
        cut_off = self._let_go()
        if cut_off is not None:
            self._error = error
            self._wake()
            cut_off()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _let_go(self) -> Callable[[], None] | None:
        cut_off, self._cut_off = self._cut_off, None
        self._total_timer.cancel()
        self._make_room()
        return cut_off

    async def _progress(self) -> None:
        """Until something happened, or the deadline that holds has passed. Closes the reply when cancelled."""
        due_at, name = self._due()
        self._waiter = waiter = self._loop.create_future()
        try:
            async with asyncio.timeout_at(due_at):
                await waiter
        except TimeoutError:
            # pieces that went straight to a taker have put the deadline off without waking us
            if waiter.cancelled() and self._due()[0] <= self._loop.time():
                self._expire(name)
        except asyncio.CancelledError:
            self.close()
            raise

    def _due(self) -> tuple[float, str]:
        """When which deadline passes, for somebody who waits."""
        if self._is_paused:
            return self._total_at, "total"
        if self._first_byte_at is None:
            at, name = self._connect_at, "connect"
        elif not self.body_began:
            at, name = self._first_byte_at, "first byte"
        else:
            at, name = self._silent_since + self._gap_s, "gap"
        return (at, name) if at <= self._total_at else (self._total_at, "total")

    def _expire(self, name: str) -> None:
        error = UpstreamTimeout(f"The engine passed the {name} deadline.", deadline=name)
        if self._is_paused:  # the taker had all the time there is: what waits for it is not worth another wait
            self._drop()
            self._error = error
            self._wake()
        self.fail_with(error)

    def _hand_over(self) -> None:
        while self._chunks and self._taker is not None and not self._is_paused:
            self._is_paused = not self._taker(self._take_all())
        if not self._chunks and (self._is_whole or self._error is not None):
            self._wake()

    def _take_all(self) -> bytes:
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._drop()
        return data

    def _drop(self) -> None:
        self._chunks.clear()
        self._unread_bytes = 0
        self._make_room()

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
