"""What a path's answers are made of; `run.py` sends them, each path's own file builds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from workers.fake_engine.checks import Job
from workers.fake_engine.options import Options


class Events(Protocol):
    """The events of one stream, in the order of these methods."""

    def opening(self) -> list[bytes]: ...

    def token(self, choice: int, piece: str) -> bytes:
        """One token that is not the last of its choice."""
        ...

    def last(self, choice: int, piece: str, finish: str) -> bytes: ...

    def closing(self) -> list[bytes]: ...

    def done(self) -> bytes:
        """The sign that the stream is whole."""
        ...

    def failed(self) -> bytes | None:
        """What comes when the engine core dies in mid-stream; None: the connection is just cut."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    prefix: str  # of the answer's id
    whole: Callable[[Job, str, Options], bytes]  # the answer that is not streamed
    events: Callable[[Job, str, Options], Events] | None = None
