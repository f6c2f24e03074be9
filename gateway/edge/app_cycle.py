"""A request of the app's paths as ASGI: its scope, and uvicorn's cycle with the calls that a connection makes on it.

Made by front.py for what is not proxied; turns.py runs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

from gateway.edge.incoming import EARLY_BODY_BYTES


class AppCycle(RequestResponseCycle):
    """Stands beside `Exchange`: fed by its connection, told when the caller is gone. `app` answers it."""

    def __init__(
        self,
        app: Any,
        scope: Any,
        transport: asyncio.Transport,
        flow: FlowControl,
        *,
        keep_alive: bool,
        default_headers: list[tuple[bytes, bytes]],
        on_response: Callable[[], None],
    ) -> None:
        """`on_response` is called when the reply is complete."""
        self.app = app
        super().__init__(
            scope=scope,
            transport=transport,
            flow=flow,
            logger=logging.getLogger("uvicorn.error"),
            access_logger=logging.getLogger("uvicorn.access"),
            access_log=False,
            default_headers=default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=(dict(scope["headers"]).get(b"expect") or b"").lower() == b"100-continue",
            keep_alive=keep_alive,
            on_response=on_response,
        )

    def feed(self, data: bytes) -> bool:
        """A piece of the body. False: the app has not taken what came before."""
        self.body += data
        self.message_event.set()
        return len(self.body) <= EARLY_BODY_BYTES

    def body_ended(self) -> None:
        self.more_body = False
        self.message_event.set()

    def abandon(self) -> None:
        """The caller is gone: the app hears of it from its `receive`."""
        self.disconnected = not self.response_complete
        self.message_event.set()


def scope_of(
    method: str,
    url: bytes,
    version: str,
    headers: list[tuple[bytes, bytes]],
    *,
    transport: asyncio.Transport,
    config: uvicorn.Config,
    state: dict[str, Any],
) -> dict[str, Any]:
    """The ASGI scope (spec 2.3). `state` is the app's own, of which each request has a copy.

    Raises httptools.HttpParserInvalidURLError for a target that is no URL, or not in ASCII.
    """
    parsed = httptools.parse_url(url)
    raw_path = parsed.path or b"/"
    return {
        "type": "http",
        "asgi": {"version": config.asgi_version, "spec_version": "2.3"},
        "http_version": version,
        "server": get_local_addr(transport),
        "client": get_remote_addr(transport),
        "scheme": "http",
        "method": method,
        "root_path": "",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": parsed.query or b"",
        "headers": headers,
        "state": state.copy(),
    }
