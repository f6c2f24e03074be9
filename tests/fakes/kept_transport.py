"""A transport that keeps what is written, for protocols that are fed by hand. Used by the tests beside it."""

from __future__ import annotations

import asyncio


class KeptTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.is_aborted = True

    def take(self) -> bytes:
        taken, self.written = self.written, b""
        return taken
