"""Addresses, request heads, and which headers travel."""

from __future__ import annotations

import pytest

from gateway.domain.errors import ConnectFailed, InternalError
from gateway.upstream.framing import (
    Address,
    ends_with_connection,
    parse_address,
    request_head,
    without_hop_by_hop,
)
from gateway.upstream.transport import UpstreamRequest


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000, None, b"127.0.0.1:8000", b"")),
        ("http://GPU-1.lan", Address("gpu-1.lan", 80, None, b"gpu-1.lan", b"")),
        ("http://[::1]:8000/", Address("::1", 8000, None, b"[::1]:8000", b"")),
        ("http://h:1/a/b/", Address("h", 1, None, b"h:1", b"/a/b")),
        ("https://llm.example.com/v2/", Address("llm.example.com", 443, None, b"llm.example.com", b"/v2", True)),
        ("https://h:8443", Address("h", 8443, None, b"h:8443", b"", True)),
        ("https://h:80", Address("h", 80, None, b"h:80", b"", True)),
        ("unix:/run/vllm.sock", Address("", 0, "/run/vllm.sock", b"localhost", b"")),
        ("unix:///run/vllm.sock", Address("", 0, "/run/vllm.sock", b"localhost", b"")),
    ],
)
def test_an_address_is_read_from_its_url(url: str, address: Address) -> None:
    assert parse_address(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h:1",
        "https://",
        "https://u:p@h",
        "h:1",
        "",
        "http://",
        "http://h:70000",
        "http://h:x",
        "http://[::1",
        "unix:s",
        "http://h/ü",
    ],
)
def test_another_form_is_refused(url: str) -> None:
    with pytest.raises(ConnectFailed):
        parse_address(url)


def head(*headers: tuple[bytes, bytes], body: bytes = b"", path: bytes = b"/v1/x?y=1") -> bytes:
    return request_head(parse_address("http://h:1/p"), UpstreamRequest(b"POST", path, headers, body))


def test_the_head_is_written_in_order_with_our_own_headers_first() -> None:
    assert head((b"x-a", b"1"), (b"X-B", b""), body=b"four") == (
        b"POST /p/v1/x?y=1 HTTP/1.1\r\nhost: h:1\r\naccept-encoding: identity\r\ncontent-length: 4\r\n"
        b"x-a: 1\r\nX-B: \r\n\r\n"
    )


@pytest.mark.parametrize(
    "name",
    [b"Host", b"content-length", b"Transfer-Encoding", b"connection", b"Expect", b"accept-encoding", b"TE", b"upgrade"],
)
def test_headers_that_are_the_transports_own_are_left_out(name: bytes) -> None:
    assert head((name, b"x")) == head()


def test_headers_named_in_connection_are_left_out() -> None:
    assert head((b"x-hop", b"1"), (b"Connection", b"close , X-Hop"), (b"x-stays", b"2")) == head((b"x-stays", b"2"))


@pytest.mark.parametrize("bad", [b"a\r\nx: y", b"a\nb", b"a\rb", b"\0"])
def test_a_line_break_anywhere_is_a_defect_and_never_sent(bad: bytes) -> None:
    with pytest.raises(InternalError):
        head((b"x", bad))
    with pytest.raises(InternalError):
        head((bad, b"x"))
    with pytest.raises(InternalError):
        head(path=b"/" + bad)


def test_the_reply_loses_hop_by_hop_headers_and_keeps_the_rest_in_order() -> None:
    headers = [
        (b"x-1", b"a"),
        (b"connection", b"keep-alive, X-Hop"),
        (b"keep-alive", b"timeout=5"),
        (b"x-hop", b"b"),
        (b"transfer-encoding", b"chunked"),
        (b"content-type", b"text/event-stream"),
    ]
    assert without_hop_by_hop(headers) == [(b"x-1", b"a"), (b"content-type", b"text/event-stream")]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], True),
        ([(b"content-length", b"0")], False),
        ([(b"transfer-encoding", b"gzip, Chunked ")], False),
        ([(b"transfer-encoding", b"gzip")], True),
    ],
)
def test_only_a_reply_without_a_length_ends_with_its_connection(
    headers: list[tuple[bytes, bytes]], expected: bool
) -> None:
    assert ends_with_connection(headers) is expected
