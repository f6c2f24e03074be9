"""Heads as bytes: measured, without the wish for another protocol, and the refusal of what is none."""

from __future__ import annotations

import pytest
from fakes.client import read_reply

from gateway.edge.heads import HeaderList, head_bytes, refusal, without_upgrade

UPGRADE: HeaderList = [
    (b"connection", b"Upgrade, HTTP2-Settings"),
    (b"upgrade", b"h2c"),
    (b"http2-settings", b"AAMAAABk"),
]


def test_a_head_is_as_long_as_its_target_and_its_header_lines() -> None:
    assert head_bytes(b"/path", []) == 5
    assert head_bytes(b"/path", [(b"host", b"x"), (b"a", b"")]) == 5 + len(b"host: x\r\n") + len(b"a: \r\n")


def test_a_head_without_its_wish_keeps_everything_else_in_its_order() -> None:
    headers = [(b"host", b"x"), *UPGRADE, (b"x-a", b"1"), (b"content-length", b"2"), (b"x-a", b"2")]
    assert without_upgrade(b"POST", b"/p?q=1", "1.1", headers, keep_alive=True) == (
        b"POST /p?q=1 HTTP/1.1\r\nhost: x\r\nx-a: 1\r\ncontent-length: 2\r\nx-a: 2\r\n\r\n"
    )


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_head_without_its_wish_still_asks_for_the_end_of_its_connection(version: str) -> None:
    head = without_upgrade(b"GET", b"/", version, UPGRADE, keep_alive=False)
    assert head == b"GET / HTTP/%b\r\nconnection: close\r\n\r\n" % version.encode()


def test_a_refusal_is_a_whole_reply_that_closes() -> None:
    reply, rest = read_reply(refusal(431, 'too "long"', "request_head_too_large", "req-1"))
    assert reply.status == 431 and rest == b""
    assert reply.error() == {
        "message": 'too "long"',
        "type": "invalid_request_error",
        "param": None,
        "code": "request_head_too_large",
    }
    assert reply.headers[b"connection"] == b"close"
    assert reply.headers[b"x-request-id"] == b"req-1"
    assert reply.headers[b"x-poolgate-error-source"] == b"client"
