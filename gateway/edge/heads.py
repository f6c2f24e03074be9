"""Request heads as bytes: how long one is, one without its wish for another protocol, and the refusal of a bad one.

Called by front.py, which holds the parser.
"""

from __future__ import annotations

import json

from gateway.edge.context import STATUS_LINES

UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})

HeaderList = list[tuple[bytes, bytes]]


def head_bytes(url: bytes, headers: HeaderList) -> int:
    """Length of a head that has been read, in bytes; method, version and blanks around values do not count."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


def without_upgrade(method: bytes, url: bytes, version: str, headers: HeaderList, *, keep_alive: bool) -> bytes:
    """The same head, asking for no other protocol, for a parser that reads it once more.

    `headers` have lower-case names. `keep_alive` is what the request asks of its connection: the header that said
    it named the upgrade as well.
    """
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] not in UPGRADE_HEADERS]
    if not keep_alive:
        lines.append(b"connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def refusal(status: int, message: str, code: str, request_id: str) -> bytes:
    """A whole reply in OpenAI's envelope to what is no request; the connection is to be closed behind it."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    head = (
        b"content-type: application/json\r\ncontent-length: %d\r\n"
        b"x-poolgate-error-source: client\r\nx-request-id: %b\r\nconnection: close\r\n\r\n"
        % (len(body), request_id.encode())
    )
    return STATUS_LINES[status] + head + body
