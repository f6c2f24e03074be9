"""httpx's exceptions as ours, in words for callers: without addresses. Called by `http.py` alone."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator

import httpx

from gateway.domain.errors import ConnectFailed, UpstreamBroken, UpstreamError

HOST_MISMATCH = (62, 64)  # OpenSSL: X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
CUT_SHORT = ("peer closed connection", "Server disconnected")  # how h11 and httpcore word it


def failure_of(exc: httpx.HTTPError, is_connected: bool, response_began: bool) -> UpstreamError:
    """`is_connected`: the TLS handshake was over."""
    error: UpstreamError
    if not is_connected or isinstance(exc, httpx.PoolTimeout):
        error = ConnectFailed(f"No connection to the engine: {reason(exc)}.")
    elif isinstance(exc, httpx.RemoteProtocolError) and not str(exc).startswith(CUT_SHORT):
        error = UpstreamBroken("The engine's reply is malformed.", response_began=response_began)
    elif isinstance(exc, httpx.RemoteProtocolError):
        error = UpstreamBroken(
            "The engine closed the connection before its reply was whole.", response_began=response_began
        )
    else:
        error = UpstreamBroken(
            "The connection to the engine broke before its reply was whole.", response_began=response_began
        )
    error.__cause__ = exc
    return error


def reason(exc: BaseException) -> str:
    """Why no connection could be made. The innermost cause knows best; the last of several addresses counts."""
    for cause in reversed(list(_chain(exc))):
        if isinstance(cause, ssl.SSLCertVerificationError):
            if cause.verify_code in HOST_MISMATCH:
                return "its certificate is for another host name"
            return f"its certificate is not trusted ({cause.verify_message})"
        if isinstance(cause, ssl.SSLError):
            return f"TLS could not be agreed on ({cause.reason or 'no reason given'})"
        if isinstance(cause, socket.gaierror | UnicodeError):
            return "its host name does not resolve"
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return "the gateway has no free file descriptor"
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
    return "it hung up, or does not speak TLS"


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """The exception and what lies under it; httpcore hides the cause and keeps the context."""
    seen: set[int] = set()
    pending = [exc]
    while pending:
        now = pending.pop()
        if id(now) in seen:
            continue
        seen.add(id(now))
        yield now
        if isinstance(now, BaseExceptionGroup):
            pending += now.exceptions
        pending += [under for under in (now.__context__, now.__cause__) if under is not None]
