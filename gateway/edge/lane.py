"""The proxied paths with their handlers, and what all connections share. Made by serve.py, looked up by front.py."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools

from gateway.edge.context import Exchange
from gateway.edge.request_ids import RequestIds

Handler = Callable[[Exchange], Coroutine[Any, Any, None]]


class DateLine:
    """The server's own headers as bytes of a head: the date alone. Made anew for each list of them, once a second."""

    __slots__ = ("_headers", "_line")

    def __init__(self) -> None:
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._line = b""

    def of(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        if headers is not self._headers:
            self._headers = headers
            self._line = b"".join(b"%b: %b\r\n" % header for header in headers)
        return self._line


@dataclass(frozen=True, slots=True)
class Lane:
    """The proxied paths, and for how long a client may take nothing (`write_s`) or too little (`total_s`), in seconds.

    One for all connections.
    """

    handlers: Mapping[bytes, Handler]
    write_s: float
    total_s: float
    date: DateLine = field(default_factory=DateLine)
    ids: RequestIds = field(default_factory=RequestIds)

    def handler_of(self, url: bytes) -> Handler | None:
        """For a path that is not written plainly: with a query, a slash at its end, escapes, or a whole URL."""
        if not url.startswith(b"/"):
            try:
                url = httptools.parse_url(url).path or b""
            except httptools.HttpParserInvalidURLError:
                return None
        path = url.partition(b"?")[0].rstrip(b"/")
        return self.handlers.get(unquote_to_bytes(path) if b"%" in path else path)
