"""Failures after the first byte: no second attempt, no doubled text, no success."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fakes.caller import Caller
from fakes.line import MESSAGES
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, chunk
from fakes.stage import DONE, event, hang_up, says

from .conftest import GOOD, Pair, resets_half_way, running_pair

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "rm", "arguments": '{"path": "/tmp'}}
BEGUN = {
    "text": [event(content=text) for text in ("one", "two", "three")],
    "tool call": [event(role="assistant"), event(tool_calls=[TOOL]), event(tool_calls=[{**TOOL, "id": None}])],
    "role alone": [event(role="assistant", content="")],
}


@pytest.mark.parametrize("way", ["reset", "close", "end without a mark", "error event"])
@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
async def test_text_is_doubled_by_a_second_attempt(pair: Pair, begun: list[bytes], way: str) -> None:
    """What was sent stands, one error ends it, and the other replica hears nothing."""
    failing = b'data: {"error":{"message":"core died","code":500}}\n\n'
    has_come = asyncio.Event()

    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(STREAM_HEAD)
        for one in begun:
            await peer.send(chunk(one))
        await has_come.wait()  # a reset may overtake what was sent before it
        match way:
            case "reset":
                hang_up(peer)
            case "close":
                raise ConnectionResetError("closes")
            case "error event":
                await peer.send(chunk(failing) + chunk(DONE) + STREAM_END)
            case _:
                await peer.send(STREAM_END)

    pair.a.answer, pair.b.answer = answer, says(GOOD)
    async with Caller(pair.gateway.url) as caller:
        await caller.ask("/v1/chat/completions", {"model": "chat", "messages": MESSAGES, "stream": True})
        await caller.read_body(b"".join(begun))
        has_come.set()
        reply = await caller.reply()
    assert (reply.status, reply.headers[b"x-poolgate-pool"]) == (200, b"a")
    rest = reply.body.removeprefix(b"".join(begun))
    if way == "error event":
        assert rest == failing + DONE  # the engine's own word
    else:
        assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "upstream_broken"
        assert rest.count(b"data: ") == 1
    assert pair.b.requests == pair.c.requests == []
    record = await pair.last_record()
    assert (record["ending"], record["attempts"]) == ("upstream_error", 1)


async def test_plain_answer_that_breaks_off_half_way_is_given_by_another_replica_or_as_a_success(pair: Pair) -> None:
    """Nothing went out, but the engine had the request: what it did with it nobody knows, unless the config allows."""
    pair.a.answer = resets_half_way
    reply = await pair.gateway.chat()
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_broken")
    assert pair.b.requests == []


async def test_replay_in_flight_asks_no_other_replica(tmp_path: Path, redis_url: str) -> None:
    async with running_pair(tmp_path, redis_url, retry={"replay_in_flight": True}) as pair:
        pair.a.answer = resets_half_way
        reply = await pair.gateway.chat()
        assert (reply.status_code, reply.headers["x-poolgate-pool"]) == (200, "b")
        pair.b.answer = pair.c.answer = resets_half_way
        pair.c.requests.clear()
        assert (await pair.gateway.chat()).status_code == 502
        assert pair.c.requests == []  # two attempts in all
