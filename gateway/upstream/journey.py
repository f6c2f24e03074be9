"""One admitted request on its way to a replica and back: what it needs there, and how far it came.

Made by dispatch, filled by attempt.py and forward.py, read by dispatch when the request has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from gateway.domain.outcome import Outcome, Usage
from gateway.domain.record import AccessRecord
from gateway.domain.replica import ReplicaRecord
from gateway.domain.request import InferenceRequest
from gateway.upstream.fast_path import FastPath
from gateway.upstream.tap import Tap

Headers = Iterable[tuple[bytes, bytes]]


class Downstream(Protocol):
    """The caller's side of an exchange. Nothing here waits but `drained`."""

    has_started: bool
    on_room: Callable[[], None] | None
    fast_path: FastPath | None  # writes to `chunks` beside `write`; closed when the caller has no room

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole reply."""
        ...

    def start(self, status: int, headers: Headers) -> None:
        """The head of a stream."""
        ...

    def write(self, data: bytes) -> bool:
        """A piece of the stream; whether the caller takes more at once. If not, `on_room` is called when it does."""
        ...

    @property
    def chunks(self) -> asyncio.WriteTransport | None:
        """Where whole HTTP/1.1 chunks of the stream under way can be written as they are; None if it has no chunks."""
        ...

    def finish(self, data: bytes = b"") -> None: ...

    async def drained(self) -> None: ...

    def refuse(self, status: int, message: str, kind: str, param: str | None, code: str | int | None) -> None:
        """The engine's own refusal, in our envelope."""
        ...


@dataclass(slots=True)
class Journey:
    """`settle` takes the first outcome it is given, and is called before the caller can see the end of its reply: its
    next call then finds the slot free."""

    request: InferenceRequest
    caller: Downstream
    record: AccessRecord
    body_for: Callable[[ReplicaRecord], bytes]
    settle: Callable[[Outcome], None]
    prompt_tokens: int  # counted or estimated beforehand; holds where the engine does not tell
    was_clamped: bool
    may_enter: Callable[[str], Awaitable[bool]] | None = None  # is there a slot at that pool? Then it has that now
    was_sent: bool = False  # to an engine, which may have begun to read the prompt
    usage: Usage | None = None  # of a plain reply
    tap: Tap | None = None  # of a stream
    first_byte_at: float | None = None  # monotonic; None: the caller has got nothing of a reply yet

    def sent(self) -> None:
        self.was_sent = True

    def cut_off(self) -> Usage:
        """What an unfinished answer costs: what the engine told, or its prompt and the events relayed."""
        if self.tap is None or not self.request.endpoint.rules.costs_tokens:
            return self.usage or Usage(self.prompt_tokens, 0)
        return self.tap.usage or Usage(self.prompt_tokens, self.tap.events)
