"""What the app sees of a request that is not proxied: its scope, its body, and that its caller is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httptools
import pytest
from fakes.client import Line
from uvicorn.protocols.http.flow_control import FlowControl

from gateway.edge.app_cycle import AppCycle, scope_of
from gateway.edge.incoming import EARLY_BODY_BYTES

HEADERS = [(b"host", b"x"), (b"x-a", b"1")]
CONFIG: Any = SimpleNamespace(asgi_version="3.0")
BODY = {"type": "http.response.body", "body": b"ok"}
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}


def scope(url: bytes, state: dict[str, Any] | None = None, headers: list[tuple[bytes, bytes]] = HEADERS) -> Any:
    return scope_of("GET", url, "1.1", headers, transport=Line(), config=CONFIG, state=state or {})


class World:
    def __init__(self, headers: list[tuple[bytes, bytes]] = HEADERS) -> None:
        self.line = Line()
        self.completed = 0
        self.cycle = AppCycle(
            None,
            scope(b"/", headers=headers),
            self.line,
            FlowControl(self.line),
            keep_alive=True,
            default_headers=[(b"date", b"now")],
            on_response=self._complete,
        )

    def _complete(self) -> None:
        self.completed += 1

    async def receive(self) -> Any:
        return await self.cycle.receive()

    async def send(self, message: Any) -> None:
        await self.cycle.send(message)


def test_the_scope_says_what_was_asked_and_by_whom() -> None:
    assert scope(b"/a%20b/c?q=%20&r") == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
        "scheme": "http",
        "method": "GET",
        "root_path": "",
        "path": "/a b/c",
        "raw_path": b"/a%20b/c",
        "query_string": b"q=%20&r",
        "headers": HEADERS,
        "state": {},
    }


def test_a_whole_url_is_taken_for_its_path() -> None:
    found = scope(b"http://gateway.test:8080/v1/models?x")
    assert (found["path"], found["query_string"]) == ("/v1/models", b"x")


def test_each_request_has_a_state_of_its_own() -> None:
    state = {"a": 1}
    found = scope(b"/", state)
    found["state"]["b"] = 2
    assert found["state"]["a"] == 1 and state == {"a": 1}


@pytest.mark.parametrize("url", [b"http://[", b"/\xff", b"/a/\xc3\xa9"])
def test_a_target_that_is_no_url_is_told(url: bytes) -> None:
    with pytest.raises(httptools.HttpParserInvalidURLError):
        scope(url)


async def test_the_body_comes_as_it_was_fed() -> None:
    world = World()
    world.cycle.feed(b"on")
    assert await world.receive() == {"type": "http.request", "body": b"on", "more_body": True}
    world.cycle.feed(b"e ")
    world.cycle.feed(b"two")
    world.cycle.body_ended()
    assert await world.receive() == {"type": "http.request", "body": b"e two", "more_body": False}


async def test_a_body_that_the_app_does_not_read_is_held_back_until_it_does() -> None:
    world = World()
    assert world.cycle.feed(b"x" * EARLY_BODY_BYTES)
    assert not world.cycle.feed(b"x")
    world.cycle.flow.pause_reading()  # as the connection does then
    assert len((await world.receive())["body"]) == EARLY_BODY_BYTES + 1
    assert world.line.is_reading


@pytest.mark.parametrize("expect", [b"100-continue", b"100-Continue"])
async def test_a_caller_who_waits_for_a_word_gets_it_when_the_app_reads(expect: bytes) -> None:
    world = World([*HEADERS, (b"expect", expect)])
    world.cycle.feed(b"x")
    assert not world.line.written
    await world.receive()
    assert world.line.written == b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_the_app_hears_that_its_caller_is_gone_and_writes_to_nobody() -> None:
    world = World()
    world.cycle.abandon()
    assert await world.receive() == {"type": "http.disconnect"}
    await world.send(START)
    await world.send(BODY)
    assert not world.line.written


async def test_a_reply_that_is_complete_is_told_once_and_leaving_behind_it_is_no_disconnect() -> None:
    world = World()
    await world.send(START)
    assert world.completed == 0
    await world.send(BODY)
    world.cycle.abandon()
    assert world.completed == 1 and not world.cycle.disconnected
    assert world.line.written.endswith(b"\r\n\r\nok") and b"date: now\r\n" in world.line.written
