"""Who else is asked after a failure, and how often."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fakes.engine import running_fake_engine
from fakes.line import KEY, MESSAGES, running_gateway
from fakes.scripted_upstream import Peer, Received, plain
from fakes.stage import ANSWER, connected, error, head, says
from fakes.waits import eventually
from openai import AsyncOpenAI, InternalServerError

from .conftest import BUSY, GOOD, Pair, after, running_pair

pytestmark = pytest.mark.asyncio(loop_scope="module")


# --- a request that kills its engine --------------------------------------------------------------------------------
async def test_one_request_takes_down_one_engine_after_the_other(tmp_path: Path, redis_url: str) -> None:
    """A client that repeats its deadly request costs one engine a call; the others serve everybody else meanwhile."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(running_fake_engine(name="tiny", key="")) for _ in range(3)]
        pools = {"tiny": {"urls": [engine.url for engine in engines], "served_name": "tiny"}}
        gateway = await stack.enter_async_context(running_gateway(tmp_path, redis_url, pools=pools))
        for calls in (1, 2):
            reply = await gateway.chat(n=2, x_fake={"die_after": 0})
            assert (reply.status_code, reply.headers["x-poolgate-error-source"]) == (502, "engine")

            async def are_dead(calls: int = calls) -> bool:
                return sum(engine.process.returncode is not None for engine in engines) == calls

            await eventually(are_dead, f"{calls} engines are dead")
            assert {(await gateway.chat()).status_code for _ in range(10)} == {200}
            assert await are_dead()
        assert "Traceback" not in gateway.log.read_text()


async def test_engine_that_died_in_mid_stream_takes_the_next_requests_along(tmp_path: Path, redis_url: str) -> None:
    """Nobody told that it died. Its port is gone with it, so the next one is refused, moves on, and sets it aside."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(running_fake_engine(name="tiny", key="")) for _ in range(2)]
        pools = {"tiny": {"urls": [engine.url for engine in engines], "served_name": "tiny"}}
        gateway = await stack.enter_async_context(running_gateway(tmp_path, redis_url, pools=pools))
        assert {(await gateway.chat()).status_code for _ in range(6)} == {200}  # both keep idle connections
        events = await gateway.events(max_tokens=20, x_fake={"die_after": 3})
        assert json.loads(events[-1])["error"]["code"] == "upstream_broken"
        replies = await asyncio.gather(*(gateway.chat() for _ in range(20)))
        assert {reply.status_code for reply in replies} == {200}
        assert sum(engine.process.returncode is None for engine in engines) == 1


# --- what can never work --------------------------------------------------------------------------------------------


async def test_clients_400s_take_a_replica_out_for_everyone(pair: Pair) -> None:
    for status in (b"400 Bad Request", b"404 Not Found", b"422 Unprocessable Entity") * 34:
        pair.a.answer = says(error("no", status))
        reply = await pair.gateway.chat()
        assert reply.status_code == int(status[:3])
    assert len(pair.a.requests) == 102
    pair.a.reset()
    good = await pair.gateway.chat()
    assert (good.status_code, good.headers["x-poolgate-pool"]) == (200, "a")
    assert pair.b.requests == pair.c.requests == []


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 405, 409, 413, 415, 422, 501])
async def test_a_refusal_is_tried_again_with_its_image(pair: Pair, status: int, is_stream: bool) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 20_000}}
    pair.a.answer = says(error("no", b"%d No" % status))
    reply = await pair.gateway.chat(messages=[{"role": "user", "content": [image]}], stream=is_stream)
    assert reply.status_code == status
    assert [len(stage.requests) for stage in (pair.a, pair.b, pair.c)] == [1, 0, 0]
    record = await pair.last_record()
    assert record["attempts"] == 1 and len(json.dumps(record)) < 1_000


@pytest.mark.parametrize("is_stream", [False, True])
async def test_request_whose_caller_left_is_tried_on_another_replica(pair: Pair, is_stream: bool) -> None:
    async def answer(peer: Peer, _request: Received) -> None:
        await peer.closed()
        await peer.send(BUSY)

    pair.a.answer = answer
    body = json.dumps({"model": "chat", "messages": MESSAGES, "stream": is_stream}).encode()
    async with connected(pair.gateway) as (_, writer):
        writer.write(head("/v1/chat/completions", b"Content-Length: %d" % len(body)) + body)
        await eventually(lambda: len(pair.a.requests) == 1)
    await eventually(lambda: pair.a.open_connections == 0)
    record = await pair.last_record()
    assert (record["ending"], record["status"], record["attempts"]) == ("client_gone", 499, 1)
    assert pair.b.requests == pair.c.requests == []


# --- how often ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attempts", "calls"), [(1, 3), (2, 6), (3, 9)])
async def test_retries_multiply_by_layer(tmp_path: Path, redis_url: str, attempts: int, calls: int) -> None:
    """OpenAI's client as it comes, two retries of its own, and engines that are always full."""
    async with (
        running_pair(tmp_path, redis_url, retry={"attempts": attempts}) as pair,
        AsyncOpenAI(base_url=pair.gateway.url + "/v1", api_key=KEY) as openai,
    ):
        stages = (pair.a, pair.b, pair.c)
        for stage in stages:
            stage.answer = says(BUSY)
        with pytest.raises(InternalServerError) as refused:
            await openai.chat.completions.create(model="chat", messages=MESSAGES)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "1"
        assert [len(stage.requests) for stage in stages] == [3 if i < attempts else 0 for i in range(3)]
        assert sum(len(stage.requests) for stage in stages) == calls
        ids = [r.header(b"x-request-id")[0] for stage in stages[:attempts] for r in stage.requests]
        assert len(set(ids)) == calls
        assert [id_.rpartition(b"-")[2] for id_ in ids[3:]] == [b"2"] * 3 * (attempts > 1) + [b"3"] * 3 * (attempts > 2)


async def test_fleet_in_trouble_gets_twice_the_load(tmp_path: Path, redis_url: str) -> None:
    """Further attempts are a share of all requests; once it is used up, the first failure is the answer."""
    async with running_pair(tmp_path, redis_url, retry={"share": 0.1}) as pair:
        pair.a.answer = says(error("full at a", b"503 Service Unavailable", b"retry-after: 7"))
        pair.b.answer = says(error("full at b", b"503 Service Unavailable", b"retry-after: 8"))
        replies = [await pair.gateway.chat() for _ in range(60)]
        assert {reply.status_code for reply in replies} == {503}
        assert len(pair.a.requests) == 60
        assert 1 <= len(pair.b.requests) <= 10 + 6
        told = [reply.headers["retry-after"] for reply in replies]
        assert told.count("8") == len(pair.b.requests) and told.count("7") == 60 - len(pair.b.requests)
        assert pair.c.requests == []


async def test_no_share_is_no_further_attempt(tmp_path: Path, redis_url: str) -> None:
    async with running_pair(tmp_path, redis_url, retry={"share": 0}) as pair:
        pair.a.answer = says(error("broken at a", b"500 Oops"))
        reply = await pair.gateway.chat()
        assert reply.status_code == 502 and "broken at a" in reply.json()["error"]["message"]
        assert pair.b.requests == []


async def test_further_attempt_begins_long_after_the_caller_gave_up(tmp_path: Path, redis_url: str) -> None:
    async with running_pair(tmp_path, redis_url, retry={"within_s": 1}) as pair:
        pair.a.answer = after(1.3, BUSY)
        assert (await pair.gateway.chat()).status_code == 503
        assert pair.b.requests == []
        pair.a.answer = says(BUSY)
        assert (await pair.gateway.chat()).headers["x-poolgate-pool"] == "b"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_each_attempt_has_the_total_time_for_itself(tmp_path: Path, redis_url: str, is_stream: bool) -> None:
    async with running_pair(tmp_path, redis_url, timeouts={"total_s": 1.5}) as pair:
        pair.a.answer = after(1, BUSY)
        pair.b.answer = after(1, GOOD if is_stream else plain(ANSWER))
        reply = await pair.gateway.chat(stream=is_stream)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "upstream_timeout")
        assert "total" in reply.json()["error"]["message"]
        await eventually(lambda: pair.b.open_connections == 0)
        assert pair.c.requests == []
