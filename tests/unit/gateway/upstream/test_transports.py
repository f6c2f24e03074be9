"""Which transport a request goes to."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.upstream.transport import Deadlines, UpstreamRequest
from gateway.upstream.transports import Transports

REQUEST = UpstreamRequest(b"POST", b"/", (), b"")
DEADLINES = Deadlines(1, 1, 1, 1)


class Fake:
    def __init__(self, fails: bool = False) -> None:
        self.urls: list[str] = []
        self.closed = False
        self.fails = fails

    async def send(self, url: str, request: UpstreamRequest, deadlines: Deadlines) -> Any:
        self.urls.append(url)
        return self

    async def aclose(self) -> None:
        self.closed = True
        if self.fails:
            raise OSError


@pytest.mark.parametrize(
    ("url", "is_tls"),
    [("http://h:1", False), ("unix:/run/s", False), ("https://h", True), ("http://https:1", False), ("ftp://h", False)],
)
async def test_tls_is_spoken_where_the_url_says_so(url: str, is_tls: bool) -> None:
    plain, tls = Fake(), Fake()
    reply: Any = await Transports(plain, tls).send(url, REQUEST, DEADLINES)
    assert (plain.urls, tls.urls) == (([], [url]) if is_tls else ([url], []))
    assert reply is (tls if is_tls else plain)


async def test_both_are_closed_whatever_one_of_them_says() -> None:
    plain, tls = Fake(fails=True), Fake()
    with pytest.raises(OSError):
        await Transports(plain, tls).aclose()
    assert plain.closed and tls.closed
