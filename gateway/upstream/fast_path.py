"""The short way for most reads of a stream: one whole HTTP chunk with one plain event, handed on as it came.

Made by forward.py for a stream under way. The connection offers it each read that begins at a chunk's beginning, the
tap tells it what plain events look like. Neither is the chunk parsed nor the event searched: comparing is enough. What
does not compare equal goes the long way, through parser, tap and `Downstream.write`. A read that goes this way touches
few objects, which is what counts: with many streams, theirs are no longer in the processor's cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MAX_CHUNK_BYTES = 4096  # with its framing
NO_EVENT = bytes(MAX_CHUNK_BYTES)  # no read that is looked at is long enough to hold it and anything else


def _size_line(chunk_bytes: int) -> bytes:
    """How a chunk of that length, framing and all, begins as engines write it; NO_EVENT when there is no such chunk."""
    for digits in range(1, 4):
        size = chunk_bytes - digits - 4
        line = b"%x\r\n" % max(size, 0)
        if size > 0 and len(line) == digits + 2:
            return line
    return NO_EVENT


_SIZE_LINES = tuple(map(_size_line, range(MAX_CHUNK_BYTES + 1)))


_TEXTS = (b'"content":"', b'"text":"', b'"reasoning":"', b'"reasoning_content":"')  # what a piece of text stands behind


class FastPath:
    """Closed until `open`; whoever learns that reads have to go the long way calls `close`."""

    __slots__ = ("_begins", "_ends", "_now", "_transport", "events", "passed_at")

    def __init__(self, transport: asyncio.WriteTransport, now: Callable[[], float]) -> None:
        """`transport`: the caller's, on which a chunked body is under way; `now`: the loop's clock."""
        self._transport = transport
        self._now = now
        self._begins = self._ends = NO_EVENT
        self.events = 0  # that went this way; each carries a piece of the answer
        self.passed_at = 0.0  # the last one

    def open(self, event: bytes) -> None:
        """For events that differ from this one, which says nothing but a piece of text, in that text alone.

        An event that begins and ends like it, with no quote between, cannot differ in anything else.
        """
        for name in _TEXTS:
            at = event.find(name)
            if at > 0:
                begin = at + len(name)
                end = event.find(b'"', begin)
                if end < 0:  # an engine that writes no JSON
                    break
                self._begins = event[:begin]
                self._ends = event[end:] + b"\r\n"  # of the chunk
                return
        self.close()

    def close(self) -> None:
        self._begins = NO_EVENT

    def take(self, data: bytes) -> bool:
        """Hands on a read that begins where a chunk begins; False: it has to go the long way."""
        size = len(data)
        if size > MAX_CHUNK_BYTES:
            return False
        line, begins, ends = _SIZE_LINES[size], self._begins, self._ends
        if not data.startswith(begins, len(line)) or not data.endswith(ends) or not data.startswith(line):
            return False
        if data.find(b'"', len(line) + len(begins), size - len(ends)) >= 0:
            return False
        transport = self._transport
        if transport.is_closing():
            return False
        self.events += 1
        self.passed_at = self._now()
        transport.write(data)
        return True
