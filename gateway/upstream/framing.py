"""An address, the head of a request, and which headers travel. Pure; called by wire.py, connection.py and reply.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from gateway.domain.errors import ConnectFailed, InternalError
from gateway.upstream.transport import UpstreamRequest

# RFC 9110 §7.6.1, and the older ones that still go about
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
USUAL = frozenset({b"content-type", b"x-request-id", b"authorization"})  # sent with every request: asked first
# what this transport writes itself, or never wants: with `expect` the engine would wait for a body that is on its way
NOT_SENT = HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect"}

Headers = list[tuple[bytes, bytes]]
_FORMS = "http://host:port, https://host or unix:/path"


@dataclass(frozen=True, slots=True)
class Address:
    """Where to connect (`host` and `port`, or a Unix socket) and what the requests there begin with."""

    host: str
    port: int
    socket_path: str | None
    host_header: bytes
    base_path: bytes  # "" or "/prefix" without a slash at its end
    is_tls: bool = False


@lru_cache(maxsize=1024)
def parse_address(url: str) -> Address:
    """Reads `http[s]://host[:port][/prefix]` or `unix:/path/of.sock`. Raises ConnectFailed for any other form."""
    try:
        if url.startswith("unix:/"):
            return Address("", 0, "/" + url.removeprefix("unix:").lstrip("/"), b"localhost", b"")
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        if (is_tls or parts.scheme == "http") and parts.hostname and parts.username is None and not parts.query:
            authority = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            usual = 443 if is_tls else 80
            port = parts.port or usual
            host_header = authority if port == usual else f"{authority}:{port}"
            base_path = parts.path.rstrip("/").encode("ascii")
            return Address(parts.hostname, port, None, host_header.encode("ascii"), base_path, is_tls)
    except ValueError as exc:  # port out of range, a bracket too few, a name outside ASCII
        raise ConnectFailed(f"The engine's url cannot be read; use {_FORMS}.") from exc
    raise ConnectFailed(f"The engine's url is of no form this gateway speaks; use {_FORMS}.")


def request_head(address: Address, request: UpstreamRequest) -> bytes:
    """Request line and headers with the empty line at their end.

    Raises InternalError when a line break hides in a name, value or path: it would let a caller write headers, or
    a request, of its own.
    """
    lines = [
        _opening(request.method, address.base_path, request.path, address.host_header),
        b"content-length: %d" % len(request.body),
    ]
    for header in request.headers:
        if header[0] not in USUAL and not _travels(header[0]):
            headers = _travelling(request.headers)
            lines[2:] = [b"%b: %b" % header for header in headers]
            break
        lines.append(b"%b: %b" % header)
    head = b"\r\n".join(lines)
    breaks = len(lines) + 1  # the opening has three lines
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
        raise InternalError("A header for the engine holds a line break.")
    return head + b"\r\n\r\n"


def _travelling(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Without those that end here, and those that `connection` names beside them."""
    named = {token for name, value in headers if name.lower() == b"connection" for token in _tokens(value)}
    return [header for header in headers if _travels(header[0]) and header[0].lower() not in named]


@lru_cache(maxsize=256)
def _travels(name: bytes) -> bool:
    return name.lower() not in NOT_SENT


@lru_cache(maxsize=4096)
def _opening(method: bytes, base_path: bytes, path: bytes, host_header: bytes) -> bytes:
    """The lines that are the same for all requests to one path of a replica."""
    return b"%b %b%b HTTP/1.1\r\nhost: %b\r\naccept-encoding: identity" % (method, base_path, path, host_header)


def without_hop_by_hop(headers: Headers) -> Headers:
    """The headers that are for the next reader too, those named in `connection` left out as well."""
    left_out = HOP_BY_HOP
    for name, value in headers:
        if name == b"connection":
            left_out = left_out | _tokens(value)
    return [header for header in headers if header[0] not in left_out]


def ends_with_connection(headers: Headers) -> bool:
    """True when only the end of the connection tells the end of the body (RFC 9112 §6.3, case 8).

    `headers` as they came.
    """
    for name, value in headers:
        if name.lower() == b"content-length":
            return False
        if name.lower() == b"transfer-encoding" and value.lower().rstrip().endswith(b"chunked"):
            return False
    return True


def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in value.split(b","))
