"""The deadlines of one client connection: for a head, for idleness, for a client that does not read.

Made by front.py for each connection; turns.py and front.py tell it what happens there.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import termios

from gateway.upstream.reply import TIMER_SLACK_S

log = logging.getLogger(__name__)
HEAD_S = 10.0  # from the first byte of a head (or from the connection) to its end
LOOKS = 8  # within `write_s`, at what a client that does not read on has taken
KEEP_ALIVE_S = 75.0  # idle connections of clients; longer than the 60 s for which balancers keep theirs


class Timers:
    """Closes the transport when a head or the next request does not come, aborts it when a client does not read.

    That is one that takes nothing for `write_s`. One that takes little at a time, too little for the next write, has
    `total_s`.

    `head` and `idle` are the running timers, None where there is none: looked at per request, so that a request whose
    connection needs nothing calls nothing. `idle_since` is the loop's time since which nothing is answered, None while
    something is; set by turns.py. `cancel` ends all timers when the connection is lost.
    """

    __slots__ = (
        "_full_since",
        "_left_bytes",
        "_loop",
        "_took_at",
        "_total_s",
        "_transport",
        "_write",
        "_write_s",
        "head",
        "idle",
        "idle_since",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, write_s: float, total_s: float
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._write_s = write_s
        self._total_s = total_s
        self._full_since = 0.0  # while `_write` runs: since when, or since the end of the last reply
        self._left_bytes = 0  # that were untaken when it was looked at last
        self._took_at = 0.0  # when less were left than before
        self.idle_since: float | None = loop.time()
        self.head: asyncio.TimerHandle | None = None
        self.idle: asyncio.TimerHandle | None = None
        self._write: asyncio.TimerHandle | None = None

    def start_head(self) -> None:
        """A head is awaited or has begun, or a body comes that nobody reads: its end has to come within HEAD_S.

        Replaces the deadline that runs: each of several pipelined requests may be answered before its body is there.
        """
        if self.head is not None:
            self.head.cancel()
        self.head = self._loop.call_later(HEAD_S, self._head_expired)

    def end_head(self) -> None:
        """It came. Only while `head` is set."""
        assert self.head is not None
        self.head.cancel()
        self.head = None

    def _head_expired(self) -> None:
        self.head = None
        if self.idle_since is None:  # the head is that of a pipelined request: the reply before it comes first
            self.start_head()
        elif not self._transport.is_closing():
            self._transport.close()

    def start_idle(self) -> None:
        """A reply has ended. Only while `idle` is None: the timer serves many requests and looks at `idle_since`."""
        self.idle = self._loop.call_later(KEEP_ALIVE_S, self._idle_expired)

    def _idle_expired(self) -> None:
        self.idle = None
        if self.idle_since is None:
            return  # the end of that reply counts from there
        left_s = self.idle_since + KEEP_ALIVE_S - self._loop.time()
        if self.head is not None:  # that closes, unless the head comes, or the rest of an unwanted body
            left_s = KEEP_ALIVE_S
        if left_s > 0:
            self.idle = self._loop.call_later(left_s, self._idle_expired)
        else:
            self._transport.close()

    def start_write(self) -> None:
        """The client takes no more."""
        self._full_since = self._took_at = self._loop.time()
        self._left_bytes = untaken_bytes(self._transport)
        self._write = self._loop.call_later(self._write_s / LOOKS, self._look)

    def reply_ended(self, now: float) -> None:
        """All of a reply is written; what the client has not taken of it has `total_s` from now on."""
        self._full_since = now

    def end_write(self) -> None:
        """The client takes more again."""
        if self._write is not None:
            self._write.cancel()
            self._write = None

    def _look(self) -> None:
        now, left_bytes = self._loop.time(), untaken_bytes(self._transport)
        if left_bytes < self._left_bytes:
            self._left_bytes, self._took_at = left_bytes, now
        ends_at = min(self._took_at + self._write_s, self._full_since + self._total_s)
        if now + TIMER_SLACK_S < ends_at:
            self._write = self._loop.call_at(min(now + self._write_s / LOOKS, ends_at), self._look)
            return
        self._write = None
        if now + TIMER_SLACK_S < self._took_at + self._write_s:
            log.warning("gave up a caller that had not taken its reply after %g s", self._total_s)
        else:
            log.warning("gave up a caller that did not read its reply for %g s", self._write_s)
        self._transport.abort()

    def cancel(self) -> None:
        for timer in (self.head, self.idle, self._write):
            if timer is not None:
                timer.cancel()
        self.head = self.idle = self._write = None


def untaken_bytes(transport: asyncio.Transport) -> int:
    """What was written and the client has not confirmed: here and, where there is a socket, in the kernel's queue."""
    waiting = transport.get_write_buffer_size()
    if (line := transport.get_extra_info("socket")) is None:
        return waiting
    sent: int = struct.unpack("i", fcntl.ioctl(line.fileno(), termios.TIOCOUTQ, bytes(4)))[0]  # SIOCOUTQ, tcp(7)
    return waiting + sent
