"""The server's side of one ASGI exchange, in memory: what comes in, what went out, who hangs up."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

Headers = list[tuple[bytes, bytes]]
KEY = (b"authorization", b"Bearer sk-test")


class Server:
    """Gives the body in the given pieces, then waits for `hang_up`; keeps every message that was sent."""

    def __init__(
        self,
        body: bytes | Iterable[bytes] = b"",
        *,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        headers: Headers | None = None,
    ) -> None:
        pieces = [body] if isinstance(body, bytes) else list(body)
        self._incoming: deque[dict[str, Any]] = deque(
            {"type": "http.request", "body": piece, "more_body": i < len(pieces) - 1} for i, piece in enumerate(pieces)
        )
        self._gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.stalls_at: int | None = None  # the message with this number is taken only after `hang_up`
        self.stalled = asyncio.Event()
        self.scope: Any = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [KEY] if headers is None else headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

    def hang_up(self) -> None:
        self._gone.set()

    async def receive(self) -> Any:
        if self._incoming:
            await asyncio.sleep(0)  # as between two reads of a socket
            return self._incoming.popleft()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.stalls_at == len(self.sent):
            self.stalled.set()
            await asyncio.Event().wait()
        self.sent.append(message)

    # --- what the caller saw ---------------------------------------------------------------------------------

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"]) if self.sent else 0

    @property
    def headers(self) -> dict[bytes, bytes]:
        given = list(self.sent[0]["headers"])
        assert len(dict(given)) == len(given), f"a header stands there twice: {given}"
        return dict(given)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)

    def error(self) -> dict[str, Any]:
        """The error object of a whole reply, whose length was told."""
        assert self.is_whole and int(self.headers[b"content-length"]) == len(self.body)
        assert self.headers[b"content-type"] == b"application/json"
        document = json.loads(self.body)
        assert set(document) == {"error"} and set(document["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = document["error"]
        return error
