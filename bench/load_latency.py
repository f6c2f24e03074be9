"""Requests one after the other on one kept-alive connection; prints how long they took, as JSON.

    python -m bench.load_latency PORT MODEL KEY --requests 2000

A blocking socket: nothing of an event loop stands in the figures. Run as a process by measure.py.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from time import perf_counter

from bench.request import Target, raw
from bench.spread import percentile

TIMEOUT_S = 10.0
WARM_UP = 200


class BadReply(Exception):
    """Not a 200 with a Content-Length, or the connection was closed."""


def exchange(sock: socket.socket, request: bytes) -> None:
    """Sends it and reads its reply to the end. Raises BadReply."""
    sock.sendall(request)
    data = sock.recv(65_536)
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += more(sock)
    if not data.startswith(b"HTTP/1.1 200 "):
        raise BadReply(data[:200].decode("latin-1"))
    missing = end + 4 + content_length(data[:end]) - len(data)
    while missing > 0:
        missing -= len(more(sock))


def more(sock: socket.socket) -> bytes:
    data = sock.recv(65_536)
    if not data:
        raise BadReply("the connection was closed within a reply")
    return data


def content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    raise BadReply("the reply has no Content-Length")


def durations_ms(target: Target, requests: int) -> list[float]:
    request = raw(target, is_stream=False)
    with socket.create_connection((target.host, target.port), timeout=TIMEOUT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(min(WARM_UP, requests)):
            exchange(sock, request)
        found: list[float] = []
        for _ in range(requests):
            began = perf_counter()
            exchange(sock, request)
            found.append((perf_counter() - began) * 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load_latency")
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("key")
    parser.add_argument("--requests", type=int, default=2000)
    given = parser.parse_args()
    try:
        found = durations_ms(Target(given.port, given.model, given.key), given.requests)
    except (BadReply, OSError) as exc:
        sys.exit(f"one connection: {exc}")
    print(json.dumps({"p50_ms": percentile(found, 50), "p99_ms": percentile(found, 99), "requests": len(found)}))


if __name__ == "__main__":
    main()
