"""Comments in a stream while nothing comes: when they are written, and where they would break something."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes.client import Timers

from gateway.edge import comments
from gateway.edge.comments import COMMENT

from .exchange_line import exchange


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    made = Timers()
    monkeypatch.setattr(comments, "asyncio", SimpleNamespace(get_running_loop=lambda: made))
    return made


SSE = [(b"content-type", b"text/event-stream")]


def test_the_first_comment_opens_the_stream_and_each_further_silence_gets_one(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    timers.advance(4.9)
    assert line.written == b"" and not mine.has_started
    timers.advance(0.1)
    assert line.reply().pieces == [COMMENT]
    assert (line.reply().status, line.reply().headers[b"content-type"]) == (200, b"text/event-stream")
    timers.advance(10)
    assert line.reply().pieces == [COMMENT] * 3


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_an_event_whose_end_came_in_pieces_has_ended(end: bytes, timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    mine.start(200, SSE)
    mine.write(b"data: 1")
    timers.advance(5)
    for byte in end:
        assert COMMENT not in line.reply().pieces
        mine.write(bytes([byte]))
    timers.advance(5)
    assert line.reply().pieces[-1] == COMMENT


def test_no_comment_breaks_what_is_no_silence(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    mine.start(200, SSE)
    for _ in range(10):
        timers.advance(3)
        mine.write(b"data: 1\n\n")
    assert COMMENT not in line.reply().pieces
    timers.advance(4.9)
    assert COMMENT not in line.reply().pieces
    timers.advance(0.1)
    assert line.reply().pieces == [b"data: 1\n\n"] * 10 + [COMMENT]


def test_no_comment_stands_inside_an_event(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    mine.start(200, SSE)
    mine.write(b'data: {"cho')
    timers.advance(60)
    assert line.reply().pieces == [b'data: {"cho']
    mine.write(b'ices":[]}\n\n')
    timers.advance(5)
    assert line.reply().pieces[-1] == COMMENT


def test_no_comment_is_piled_up_for_a_client_that_does_not_read(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    timers.advance(5)
    line.is_full = True
    timers.advance(600)
    assert line.reply().pieces == [COMMENT]


def test_the_engines_stream_goes_on_in_the_reply_that_a_comment_opened(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    timers.advance(5)
    mine.start(200, [*SSE, (b"x-poolgate-pool", b"a")])
    mine.write(b"data: 1\n\n")
    mine.finish()
    assert line.reply().pieces == [COMMENT, b"data: 1\n\n"] and line.reply().is_whole
    assert b"x-poolgate-pool" not in line.reply().headers, "it came too late"


def test_a_refusal_after_a_comment_is_an_event_under_200(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    timers.advance(5)
    mine.refuse(400, "no", "BadRequestError", None, 400)
    reply = line.reply()
    assert reply.status == 200 and reply.is_whole
    assert reply.pieces[-1].startswith(b'data: {"error":{"message":"no"') and reply.pieces[-1].endswith(b"\n\n")


def test_an_error_after_a_comment_is_an_event_of_its_own(timers: Timers) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    timers.advance(5)
    mine.fail(502, (), b"{error}")
    assert line.reply().pieces == [COMMENT, b"data: {error}\n\n"] and line.reply().is_whole


@pytest.mark.parametrize("end", ["reply", "finish", "abandon", "close"])
def test_no_comment_comes_after_the_end(timers: Timers, end: str) -> None:
    mine, line = exchange()
    mine.comment_every(5, SSE)
    if end == "reply":
        mine.reply(400, [], b"x")
    elif end == "finish":
        timers.advance(5)
        mine.finish(b"x")
    elif end == "abandon":
        mine.abandon()
    else:
        mine.close()
    before = line.written
    timers.advance(60)
    assert line.written == before and timers.pending == 0
