"""The client's connection, as an exchange on it sees it. turns.py implements it for incoming.py and context.py."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Line(Protocol):
    @property
    def date_line(self) -> bytes:
        """Headers of the server's own for every reply, as bytes of a head."""
        ...

    @property
    def is_full(self) -> bool:
        """More is written than the client takes."""
        ...

    @property
    def transport(self) -> asyncio.WriteTransport: ...

    def new_id(self) -> str:
        """A request id that nobody else has."""
        ...

    def write(self, data: bytes) -> None: ...

    def handler_ended(self, task: asyncio.Task[None] | None) -> None: ...

    def ended(self) -> None:
        """The reply is complete; called once."""
        ...

    def cut(self) -> None: ...

    def resume_reading(self) -> None: ...
