"""One exchange on a socket: read to the end of the reply, and to nothing else than a 200."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from bench.load_latency import BadReply, content_length, exchange


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        yield ours, theirs


def test_a_reply_is_read_to_its_end_and_no_further(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    exchange(ours, b"request")
    assert theirs.recv(100) == b"request"
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(1)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello",
        b"HTTP/1.1 200",
    ],
)
def test_a_refusal_or_half_a_reply_is_an_error(pair: tuple[socket.socket, socket.socket], reply: bytes) -> None:
    ours, theirs = pair
    theirs.sendall(reply)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(BadReply):
        exchange(ours, b"request")


def test_the_length_is_found_whatever_its_spelling() -> None:
    assert content_length(b"HTTP/1.1 200 OK\r\nx: content-length: 1\r\nCONTENT-LENGTH:  42") == 42
