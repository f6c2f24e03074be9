"""Failures before the first byte: mended by another replica where it can, told as what they are where not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.line import running_gateway
from fakes.ports import free_port
from fakes.scripted_upstream import Peer, Received, ScriptedUpstream, plain
from fakes.stage import ANSWER, DONE, Answer, Stage, error, event, says, stream

from .conftest import BUSY, GOOD, Pair, after, closes, dies, resets_after_head, resets_half_way, running_pair

pytestmark = pytest.mark.asyncio(loop_scope="module")

MENDED: dict[str, bytes] = {
    "500": error("no", b"500 Oops"),
    "503": BUSY,
    "429": error("no", b"429 Too Many Requests"),
    "401": error("no", b"401 Unauthorized"),
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "a page of html": plain(b"<html>", b"200 OK", b"content-type: text/html"),
    "nothing": plain(b""),
    "given up": plain(ANSWER.replace(b'"stop"', b'"abort"')),
}
MENDED_STREAMS: dict[str, bytes] = {
    "500": error("no", b"500 Oops"),
    "error first": stream(b'data: {"error":{"message":"no","code":500}}\n\n'),
    "error first, without a code": stream(b'data: {"error":{"message":"no"}}\n\n'),
    "error first, busy": stream(b'data: {"error":{"message":"no","code":503}}\n\n'),
    "error first, as a detail of the end": stream(
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'
    ),
}


@pytest.mark.parametrize("reply", MENDED.values(), ids=MENDED)
async def test_failure_that_another_replica_can_mend_reaches_the_caller(pair: Pair, reply: bytes) -> None:
    pair.a.answer = says(reply)
    answer = await pair.gateway.chat(headers={"X-Request-Id": "one"})
    assert (answer.status_code, answer.headers["x-poolgate-pool"]) == (200, "b")
    assert answer.content == ANSWER
    assert [stage.requests[0].header(b"x-request-id") for stage in (pair.a, pair.b)] == [[b"one"], [b"one-2"]]
    record = await pair.last_record()
    assert (record["attempts"], record["pool"], record["prompt_tokens"], record["status"]) == (2, "b", 7, 200)


@pytest.mark.parametrize("is_trickled", [False, True])
@pytest.mark.parametrize("reply", MENDED_STREAMS.values(), ids=MENDED_STREAMS)
async def test_failure_inside_the_first_event_is_not_seen_as_failure(
    pair: Pair, reply: bytes, is_trickled: bool
) -> None:
    async def answer(peer: Peer, _request: Received) -> None:
        await (peer.trickle(reply) if is_trickled else peer.send(reply))

    pair.a.answer, pair.b.answer = answer, says(GOOD)
    answered = await pair.gateway.chat(stream=True)
    assert (answered.status_code, answered.headers["x-poolgate-pool"]) == (200, "b")
    assert answered.content == event(content="from b") + DONE


async def test_refusal_inside_the_first_event_goes_to_another_replica(pair: Pair) -> None:
    pair.a.answer = says(stream(b'data: {"error":{"message":"too long","type":"BadRequestError","code":400}}\n\n'))
    reply = await pair.gateway.chat(stream=True)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "too long")
    assert pair.b.requests == []


async def test_failure_behind_a_keep_alive_comment_is_the_end_of_the_stream(tmp_path: Path, redis_url: str) -> None:
    """A comment is no byte of an answer: another replica may still give all of it."""
    async with running_pair(tmp_path, redis_url, sse_keepalive_s=0.1) as pair:
        pair.a.answer, pair.b.answer = after(0.5, BUSY), says(GOOD)
        reply = await pair.gateway.chat(stream=True)
        assert reply.status_code == 200
        comments, _, rest = reply.content.rpartition(b": keep-alive\n\n")
        assert rest == event(content="from b") + DONE
        assert comments == b": keep-alive\n\n" * comments.count(b"keep")


async def test_engine_that_closed_before_it_had_the_request_ends_it(tmp_path: Path, redis_url: str) -> None:
    async def shut(peer: Peer) -> None:
        peer.reset()

    async with ScriptedUpstream(shut) as deaf, Stage() as stage:
        pools = {"deaf": {"urls": [deaf.url]}, "well": {"urls": [stage.url]}}
        routes = {"chat": {"targets": [{"pool": "deaf"}], "fallback": ["well"]}}
        async with running_gateway(
            tmp_path, redis_url, gateway={"max_body_bytes": 40_000_000}, pools=pools, routes=routes
        ) as gateway:
            long = [{"role": "user", "content": "x" * 30_000_000}]  # more than sockets hold
            reply = await gateway.chat(messages=long)
            assert (reply.status_code, reply.headers.get("x-poolgate-pool")) == (200, "well"), reply.text
            assert json.loads(stage.requests[0].body)["messages"] == long


# --- connections that are lost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("way", [dies, closes, resets_after_head, resets_half_way])
async def test_lost_connection_is_told_as_200(pair: Pair, way: Answer, is_stream: bool) -> None:
    """It is a 502 with an error, on a kept connection too; and no other replica gets the request."""
    for _ in range(2):
        pair.a.reset()
        assert (await pair.gateway.chat()).status_code == 200
        pair.a.answer = way
        pair.a.requests.clear()
        reply = await pair.gateway.chat(stream=is_stream)
        if reply.status_code == 200:  # half an event went out before
            assert is_stream and way is resets_half_way
            last = reply.content.rpartition(b"data: ")[2]
            assert json.loads(last)["error"]["code"] == "upstream_broken" and b"[DONE]" not in reply.content
        else:
            assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_broken")
            assert reply.headers["x-poolgate-error-source"] == "engine"
        assert pair.b.requests == []
        # a kept connection may have been closed just as the request went out: that is replaced, once
        assert len(pair.a.requests) == (2 if way in (dies, closes) else 1)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("kind", ["no such host", "no tls there", "nobody there"])
async def test_connection_that_cannot_be_made_is_told_as_200(
    tmp_path: Path, redis_url: str, kind: str, is_stream: bool
) -> None:
    async with Stage() as stage:
        url = {
            "no such host": "http://no-such-host.invalid:8000",
            "no tls there": stage.url.replace("http:", "https:"),
            "nobody there": f"http://127.0.0.1:{free_port()}",
        }[kind]
        async with running_gateway(tmp_path, redis_url, pools={"tiny": {"urls": [url]}}) as gateway:
            reply = await gateway.chat(stream=is_stream)
            assert reply.status_code in (502, 504)
            assert reply.json()["error"]["code"] in ("upstream_connect_failed", "upstream_timeout")
            assert "no-such-host" not in reply.text and "127.0.0.1" not in reply.text
