"""Failures of a replica, and what becomes of the request: who else is asked, how often, and what the caller sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fakes.caller import Caller
from fakes.engine import running_fake_engine
from fakes.line import KEY, MESSAGES, Gateway, running_gateway
from fakes.ports import free_port
from fakes.redis_process import RedisProcess
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, ScriptedUpstream, chunk, plain
from fakes.stage import ANSWER, DONE, Answer, Stage, connected, error, event, hang_up, head, says, stream
from fakes.waits import eventually
from openai import AsyncOpenAI, InternalServerError

BUSY = error("full", b"503 Service Unavailable", b"retry-after: 1")
GOOD = stream(event(content="from b"))

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Pair:
    """`chat` asks `a`, then `b`, then `c`."""

    gateway: Gateway
    a: Stage
    b: Stage
    c: Stage
    records: int = 0

    async def last_record(self) -> dict[str, Any]:
        """Of the first request since the last call, or since the test began."""

        async def written() -> list[dict[str, Any]]:
            return self.gateway.access_lines()[self.records :]

        record: dict[str, Any] = (await eventually(written, "the access record is written"))[0]
        return record


@asynccontextmanager
async def running_pair(folder: Path, redis_url: str, **section: Any) -> AsyncIterator[Pair]:
    """Further attempts are not short unless told otherwise: `share` is 1."""
    section["retry"] = {"share": 1} | section.get("retry", {})
    async with AsyncExitStack() as stack:
        stages = [await stack.enter_async_context(Stage()) for _ in range(3)]
        pools = {name: {"urls": [stage.url]} for name, stage in zip("abc", stages, strict=True)}
        gateway = await stack.enter_async_context(
            running_gateway(
                folder,
                redis_url,
                gateway=section,
                pools=pools,
                routes={"chat": {"targets": [{"pool": "a"}], "fallback": ["b", "c"]}},
            )
        )
        yield Pair(gateway, *stages)


@pytest.fixture(scope="module")
def redis_url(redis_process: RedisProcess) -> str:
    """The shared server as it is: no test here keeps anything there."""
    return redis_process.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_pair(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> AsyncIterator[Pair]:
    async with running_pair(tmp_path_factory.mktemp("pair"), redis_url) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def pair(one_pair: Pair) -> Pair:
    """Shared by the tests that need nothing set; none of them breaks it."""
    for stage in (one_pair.a, one_pair.b, one_pair.c):
        stage.reset()
    one_pair.records = await one_pair.gateway.at_rest()
    return one_pair


def after(delay_s: float, reply: bytes) -> Answer:
    async def answer(peer: Peer, _request: Received) -> None:
        await asyncio.sleep(delay_s)
        await peer.send(reply)

    return answer


async def dies(peer: Peer, _request: Received) -> None:
    hang_up(peer)


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


# --- before the first byte ------------------------------------------------------------------------------------------

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


async def resets_after_head(peer: Peer, request: Received) -> None:
    is_stream = b'"stream":true' in request.body.replace(b" ", b"")
    await peer.send(STREAM_HEAD if is_stream else plain(ANSWER)[: -len(ANSWER)])
    hang_up(peer)


async def resets_half_way(peer: Peer, request: Received) -> None:
    is_stream = b'"stream":true' in request.body.replace(b" ", b"")
    await peer.send(STREAM_HEAD + chunk(b"data: {") if is_stream else plain(ANSWER)[:-9])
    hang_up(peer)


async def closes(_peer: Peer, _request: Received) -> None:
    raise ConnectionResetError("closes")


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


# --- after the first byte -------------------------------------------------------------------------------------------

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
