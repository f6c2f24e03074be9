"""What every reader of a stream from the side has: relay.py and taps.py read the kinds, forward.py feeds them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from gateway.domain.outcome import Usage
from gateway.upstream.engine_error import EngineError, normalise
from gateway.upstream.fast_path import FastPath


class Tap(ABC):
    """The facts of one SSE stream. Feed it each read; pass on what it gives back, then what `finish` gives.

    Nearly all reads are plain events, pieces of an answer that goes on. A kind tells them by a few substring counts
    (`_pieces`) and looks closer at the others (`_feed_any`). While one plain event comes after another, `fast_path` is
    open for the next.
    """

    __slots__ = ("_events", "_is_skipping", "_tail", "error", "fast_path", "saw_done", "usage", "was_given_up")

    def __init__(self) -> None:
        self.fast_path: FastPath | None = None  # set once the stream is under way, where it has one
        self.usage: Usage | None = None  # the last that the engine told
        self.saw_done = False  # the event that ends the stream
        self.was_given_up = False  # the engine says that it stopped before the answer was finished
        self.error: EngineError | None = None  # of an error event; the first one's
        self._events = 0  # that did not go the fast path
        self._tail = b""  # of the event that has not ended
        self._is_skipping = False  # it is too long to be read; `_tail` holds only some of it

    @property
    def events(self) -> int:
        """Those that carry a piece of the answer."""
        return self._events if self.fast_path is None else self._events + self.fast_path.events

    def feed(self, data: bytes) -> bytes:
        """Takes a read, gives the bytes to pass on: the same object unless something is held back or taken out."""
        pieces = self._pieces(data)
        if pieces:
            self._events += pieces
            if pieces == 1 and self.fast_path is not None:
                self.fast_path.open(data)
            return data
        if self.fast_path is not None:
            self.fast_path.close()
        return self._feed_any(data)

    @abstractmethod
    def finish(self) -> bytes:
        """To be called when the body has ended: what was held back. Reads an event that lacks only its empty line."""

    @abstractmethod
    def _pieces(self, data: bytes) -> int:
        """How many plain events a read is, where it is nothing else and no event was open before it; 0 where not."""

    @abstractmethod
    def _feed_any(self, data: bytes) -> bytes:
        """As `feed`, for any read."""

    def _note_error(self, told: msgspec.Raw) -> None:
        if self.error is None:
            self.error = normalise(500, b'{"error":%b}' % bytes(told))
