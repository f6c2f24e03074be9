"""Errors as long as what they speak of, our own and an engine's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.line import MESSAGES
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, chunk
from fakes.stage import peak_kib
from fakes.waits import eventually

from .conftest import ROOM_KIB, Line

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("where", ["parts", "messages", "names"])
async def test_validation_error_repeats_the_request_a_hundred_times(line: Line, where: str) -> None:
    """Our own findings on thousands of bad elements: the first one, named, without its text."""
    secret = "the text that no error may repeat"
    body: dict[str, Any] = {
        "parts": {"messages": [{"role": "user", "content": [{"type": 7, "text": secret}] * 1_500}]},
        "messages": {"messages": [{"role": secret, "content": secret}] * 1_000},
        "names": {"messages": MESSAGES, "max_tokens": secret * 2_000},
    }[where]
    reply = await line.gateway.chat(**body)
    assert reply.status_code == 400
    assert len(reply.content) < 1_000
    if where != "names":  # a bad number is shown, cut
        assert secret not in reply.text
    assert secret * 2 not in line.gateway.log.read_text()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [b"400 Bad Request", b"500 Internal Server Error"])
async def test_engines_error_of_114_megabytes_fills_reply_log_and_memory(
    line: Line, status: bytes, is_stream: bool
) -> None:
    size = 114_000_000
    finding = b'{"type":"literal_error","loc":["body"],"msg":"the whole request again: %b"},' % (b"x" * 900)
    seen: list[int] = []

    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, size))
        try:
            await peer.send(b'{"detail": [')
            while peer.sent_bytes < size:
                await peer.send(finding * 64)
        finally:
            seen.append(peer.sent_bytes)

    line.stage.answer = answer
    before = peak_kib(line.gateway.pid)
    reply = await line.gateway.chat(stream=is_stream)
    assert reply.status_code == (400 if status.startswith(b"400") else 502)
    assert len(reply.content) < 6_000
    assert "the whole request again: xxx" in reply.json()["error"]["message"]
    assert peak_kib(line.gateway.pid) - before < ROOM_KIB
    assert max(map(len, line.gateway.log.read_bytes().splitlines())) < 10_000

    async def is_cut() -> bool:
        return len(seen) == 1

    await eventually(is_cut, "the engine is hung up on")
    assert seen[0] < size // 2
    await line.check_alive()


HUGE = json.dumps({"error": {"message": "y" * 3_000_000, "type": "BadRequestError", "code": 400}}).encode()


async def test_an_error_of_megabytes_is_cut_too(line: Line) -> None:
    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(HUGE), HUGE))

    line.stage.answer = answer
    before = peak_kib(line.gateway.pid)
    reply = await line.gateway.chat()
    assert peak_kib(line.gateway.pid) - before < ROOM_KIB
    assert reply.status_code == 400 and len(reply.content) < 6_000
    assert reply.json()["error"]["message"] == "y" * 4093 + "…"
    await line.check_alive()


async def test_an_error_event_of_megabytes_goes_through_unread_and_its_stream_ends_as_a_broken_one(line: Line) -> None:
    event = b"data: " + HUGE + b"\n\n"

    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(STREAM_HEAD + chunk(event) + STREAM_END)

    line.stage.answer = answer
    before = peak_kib(line.gateway.pid)
    reply = await line.gateway.chat(stream=True)
    assert peak_kib(line.gateway.pid) - before < ROOM_KIB
    assert reply.status_code == 200 and reply.content.startswith(event)
    ours = json.loads(reply.content.removeprefix(event).removeprefix(b"data: "))
    assert ours["error"]["code"] == "upstream_broken"
    await line.check_alive()
