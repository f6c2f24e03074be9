"""The one transport that the dispatcher knows: hands each request to the one that speaks its url. Made by `app.py`."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from gateway.upstream.transport import Deadlines, Transport, UpstreamReply, UpstreamRequest


class Transports:
    """Implements `Transport`. Owns both."""

    def __init__(self, plain: Transport, tls: Transport) -> None:
        self._plain = plain
        self._tls = tls

    def send(
        self, url: str, request: UpstreamRequest, deadlines: Deadlines
    ) -> Coroutine[Any, Any, UpstreamReply]:  # no coroutine of its own: it would cost every request one
        chosen = self._tls if url.startswith("https:") else self._plain
        return chosen.send(url, request, deadlines)

    async def aclose(self) -> None:
        try:
            await self._plain.aclose()
        finally:
            await self._tls.aclose()
