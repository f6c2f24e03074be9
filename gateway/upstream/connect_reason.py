"""Why no connection could be made, in words for callers and without the address. Called by `wire.py`."""

from __future__ import annotations

import os
import socket
import ssl

HOST_MISMATCH = (62, 64)  # OpenSSL: X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


def reason(exc: OSError | UnicodeError) -> str:
    """`exc`: what the loop's connect or its handshake raised."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        if exc.verify_code in HOST_MISMATCH:
            return "its certificate is for another host name"
        return f"its certificate is not trusted ({exc.verify_message})"
    if isinstance(exc, ssl.SSLError):  # its errno is none of the system's
        return f"TLS could not be agreed on ({exc.reason or 'no reason given'})"
    if isinstance(exc, socket.gaierror | UnicodeError):
        return "its host name does not resolve"
    if exc.errno:
        return os.strerror(exc.errno)
    return "it hung up, or does not speak TLS" if isinstance(exc, ConnectionError) else "every address refused"
