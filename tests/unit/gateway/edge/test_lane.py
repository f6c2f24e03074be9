"""Which paths are proxied, however they are written, and the bytes of the server's own headers."""

from __future__ import annotations

import pytest

from gateway.edge.context import Exchange
from gateway.edge.lane import DateLine, Lane

CHAT = "/v1/chat/completions"


async def handler(exchange: Exchange) -> None:
    """Only compared here."""


LANE = Lane({CHAT.encode(): handler}, write_s=60, total_s=600)


@pytest.mark.parametrize(
    "url",
    [
        CHAT,
        CHAT + "/",
        CHAT + "?",
        CHAT + "?a=b&c=/x/",
        CHAT + "/?a=b",
        "/v1/chat%2Fcompletions",
        "/v1/%63hat/completions?x",
        "http://gateway.test:8080" + CHAT,
        "http://gateway.test" + CHAT + "/?a=b",
    ],
)
def test_a_proxied_path_is_known_however_it_is_written(url: str) -> None:
    assert LANE.handler_of(url.encode()) is handler


@pytest.mark.parametrize(
    "url",
    [
        "/",
        "/v1/chat/completions/batch",
        "/v1/chat",
        "/v1/Chat/completions",
        "/x" + CHAT,
        "//v1/chat/completions",
        "/other?x=" + CHAT,
        "*",
        "http://",
        "http://[",
        "/\xff",
        "",
    ],
)
def test_every_other_target_has_no_handler(url: str) -> None:
    assert LANE.handler_of(url.encode("latin-1")) is None


def test_the_date_line_follows_the_servers_headers() -> None:
    line = DateLine()
    first, second = [(b"date", b"one"), (b"server", b"x")], [(b"date", b"two")]
    assert line.of(first) == b"date: one\r\nserver: x\r\n"
    assert line.of(first) is line.of(first), "made once for each list"
    assert line.of(second) == b"date: two\r\n"
