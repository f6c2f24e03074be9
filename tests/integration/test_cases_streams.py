"""Streams that were torn, cut, swallowed or changed on their way: a real gateway, an upstream ruled byte by byte."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fakes.caller import Caller
from fakes.line import KEY, MESSAGES
from fakes.proxies import idle_timeout_proxy, nginx
from fakes.ruled_line import (
    DONE,
    LAST,
    ONE_AT_A_TIME,
    USAGE,
    USAGE_EVENT,
    WHOLE_REPLY,
    Answer,
    HangUp,
    RuledLine,
    data,
    event,
    ruled_line,
    stream_of,
    text,
)
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, chunk, plain
from fakes.waits import eventually
from openai import AsyncOpenAI

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMMENT = b": keep-alive\n\n"
COMMENT_S = 0.2
METERED = [f"sk-test-metered-0123456789-{i}" for i in range(4)]
MINUTE_TOKENS = 1_000_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def line_of_file(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[RuledLine]:
    limits = {key: {"tokens_per_min": MINUTE_TOKENS} for key in METERED}
    async with ruled_line(tmp_path_factory.mktemp("streams"), redis_process.url, limits=limits) as line:
        yield line


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def commenting_of_file(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[RuledLine]:
    folder = tmp_path_factory.mktemp("comments")
    async with ruled_line(folder, redis_process.url, sse_keepalive_s=COMMENT_S) as line:
        yield line


@pytest_asyncio.fixture(loop_scope="module")
async def line(line_of_file: RuledLine) -> RuledLine:
    await line_of_file.skip_records()
    return line_of_file


@pytest_asyncio.fixture(loop_scope="module")
async def commenting(commenting_of_file: RuledLine) -> RuledLine:
    await commenting_of_file.skip_records()
    return commenting_of_file


async def streamed(
    line: RuledLine,
    answer: Answer,
    *,
    key: str = KEY,
    beginning: bytes = b"",
    begun: asyncio.Event | None = None,
    **fields: Any,
) -> bytes:
    """The body of one streamed chat as it came, out of its chunks. The reply has to be whole.

    `begun` is set once `beginning` has come through the gateway.
    """
    line.answer = answer
    async with Caller(line.gateway.url) as caller:
        body = {"model": "chat", "messages": MESSAGES, "stream": True, **fields}
        await caller.ask("/v1/chat/completions", body, key=key)
        if begun is not None:
            await caller.read_body(beginning)
            begun.set()
        reply = await caller.reply()
    assert (reply.status, reply.headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    return reply.body


def error_behind(body: bytes, events: bytes) -> dict[str, Any]:
    """The one error event that has to follow `events`, and to be the last."""
    assert body.startswith(events)
    rest = body.removeprefix(events)
    assert rest.startswith(b"data: ") and rest.endswith(b"\n\n") and rest.count(b"\n\n") == 1, rest
    document = json.loads(rest.removeprefix(b"data: "))
    assert set(document) == {"error"} and set(document["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = document["error"]
    return error


async def slot_is_free(line: RuledLine) -> None:
    line.answer = stream_of(text("Hi."), LAST, DONE)

    async def is_admitted() -> bool:
        return (await line.gateway.chat(ONE_AT_A_TIME, stream=True)).status_code == 200

    await eventually(is_admitted, "the slot is given back")


# --- how a stream is cut into reads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_chunks", [True, False], ids=["a chunk per byte", "one chunk"])
async def test_no_character_is_lost_when_every_byte_comes_in_a_read_of_its_own(
    line: RuledLine, is_in_chunks: bool
) -> None:
    events = text("한") + text("👍") + LAST + USAGE_EVENT

    async def answer(peer: Peer, request: Received) -> None:
        await peer.send(STREAM_HEAD)
        if is_in_chunks:
            for i in range(len(events + DONE)):
                await peer.send(chunk((events + DONE)[i : i + 1]))
                await asyncio.sleep(0)
        else:
            await peer.trickle(chunk(events + DONE))
        await peer.send(STREAM_END)

    body = await streamed(line, answer, stream_options={"include_usage": True})
    assert body == events + DONE
    assert "\ufffd" not in body.decode()
    record = await line.next_record()
    assert (record["prompt_tokens"], record["completion_tokens"], record["ending"]) == (33, 48, "completed")


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
async def test_no_event_is_torn_at_a_unicode_line_separator(line: RuledLine, line_end: bytes) -> None:
    content = "a\u2028b\u2029c\u0085d"
    shown = [event_.replace(b"\n", line_end) for event_ in (text(content), LAST)]
    hidden, done = (event_.replace(b"\n", line_end) for event_ in (USAGE_EVENT, DONE))
    body = await streamed(line, stream_of(*shown, hidden, done))
    assert body == b"".join(shown) + done
    payloads = [part.removeprefix(b"data: ") for part in body.split(2 * line_end)]
    assert json.loads(payloads[0])["choices"][0]["delta"]["content"] == content
    assert [json.loads(payload)["choices"][0]["finish_reason"] for payload in payloads[:2]] == [None, "stop"]
    assert (await line.next_record())["completion_tokens"] == 48


@pytest.mark.parametrize("seed", range(30))
async def test_no_event_is_lost_at_the_edge_of_a_read(line: RuledLine, seed: int) -> None:
    rng = random.Random(seed)
    line_end = rng.choice([b"\n", b"\r\n"])
    shown = b"".join((*(text(f"{i} 한👍") for i in range(49)), LAST)).replace(b"\n", line_end)
    end = DONE.replace(b"\n", line_end)
    sent = shown + USAGE_EVENT.replace(b"\n", line_end) + end

    async def answer(peer: Peer, request: Received) -> None:
        wire = b"".join(map(chunk, pieces_of(sent, rng))) + STREAM_END
        for piece in pieces_of(STREAM_HEAD + wire, rng):
            await peer.send(piece)
            await asyncio.sleep(0)

    assert await streamed(line, answer) == shown + end


def pieces_of(data: bytes, rng: random.Random) -> list[bytes]:
    """Cut at up to 60 random places."""
    bounds = [0, *sorted({rng.randrange(1, len(data)) for _ in range(rng.randint(1, 60))}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


# --- streams that break off -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["close", "reset", "half an event", "malformed chunk"])
async def test_a_failure_after_the_first_tokens_is_no_short_success(line: RuledLine, ending: str) -> None:
    events = text("one") + text("two") + text("three")
    begun = asyncio.Event()

    async def answer(peer: Peer, request: Received) -> None:
        await peer.send(STREAM_HEAD + chunk(events))
        await begun.wait()  # a reset may overtake what was sent before it, in the gateway's own kernel buffer
        if ending == "half an event":
            await peer.send(chunk(text("four")[:-9]))
        elif ending == "malformed chunk":
            await peer.send(b"no-size\r\n")
            await peer.closed()
        elif ending == "reset":
            peer.reset()
        raise HangUp

    body = await streamed(line, answer, key=ONE_AT_A_TIME, beginning=events, begun=begun)
    if ending == "half an event":  # passed on as it came; the error stands on lines of its own behind it
        half = events + text("four")[:-9]
        assert body.startswith(events)
        body = body.replace(half + b"\n\n", events)
    error = error_behind(body, events)
    assert (error["type"], b"[DONE]" in body) == ("upstream_error", False)
    record = await line.next_record()
    assert (record["ending"], record["key_id"]) == ("upstream_error", "one")
    assert record["completion_tokens"] >= 3 and record["prompt_tokens"] > 0
    await slot_is_free(line)


async def test_an_answer_without_its_end_mark_is_not_closed_neatly(line: RuledLine) -> None:
    before = (await line.scrape()).sum("requests_total", ending="upstream_error")
    events = [text(f"{i} ") for i in range(5)]
    body = await streamed(line, stream_of(*events))
    error_behind(body, b"".join(events))
    assert b"[DONE]" not in body and b'"stop"' not in body
    assert (await line.next_record())["ending"] == "upstream_error"
    assert (await line.scrape()).sum("requests_total", ending="upstream_error") == before + 1


# --- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", [True, False, None])
async def test_the_usage_event_is_seen_once_by_those_who_asked_and_never_by_others(
    line: RuledLine, wish: bool | None
) -> None:
    fields = {} if wish is None else {"stream_options": {"include_usage": wish}}
    body = await streamed(line, stream_of(text("Hi."), LAST, USAGE_EVENT, DONE), **fields)
    assert body == text("Hi.") + LAST + (USAGE_EVENT if wish else b"") + DONE
    assert json.loads(line.upstream.requests[-1].body)["stream_options"] == {"include_usage": True}
    assert (await line.next_record())["prompt_tokens"] == 33


@pytest.mark.parametrize(
    ("path", "stream", "key"),
    [
        ("/v1/chat/completions", False, METERED[0]),
        ("/v1/chat/completions", True, METERED[1]),
        ("/v1/completions", False, METERED[2]),
        ("/v1/completions", True, METERED[3]),
    ],
)
async def test_no_way_of_asking_is_free_of_the_token_limit(line: RuledLine, path: str, stream: bool, key: str) -> None:
    usage = {"prompt_tokens": 500_000, "completion_tokens": 400_000, "total_tokens": 900_000}

    async def answer(peer: Peer, request: Received) -> None:
        usage_event = data({"choices": [], "usage": usage})
        if stream:
            await stream_of(text("Hi."), LAST, usage_event, DONE)(peer, request)
        else:
            own = json.dumps(USAGE, separators=(", ", ": ")).encode()
            body = WHOLE_REPLY.partition(b"\r\n\r\n")[2].replace(own, json.dumps(usage).encode())
            await peer.send(plain(body, b"200 OK", b"content-type: application/json"))

    line.answer = answer
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "Say hi."}
    fields = {"model": "chat", "max_tokens": 10, "stream": stream, **prompt}
    first = await line.gateway.post(path, fields, key)
    assert first.status_code == 200, first.text
    record = await line.next_record()
    assert (record["prompt_tokens"], record["completion_tokens"]) == (500_000, 400_000)
    second = await line.gateway.post(path, fields, key)
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    assert MINUTE_TOKENS - 900_000 - 100 < left <= MINUTE_TOKENS - 900_000

    async def is_refused() -> bool:  # what the process took ahead may be spent first
        return (await line.gateway.post(path, fields, key)).status_code == 429

    await eventually(is_refused, "1,800,000 of 1,000,000 tokens are spent")


# --- silence ----------------------------------------------------------------------------------------------------------


def late(seconds: float, then: Answer) -> Answer:
    async def answer(peer: Peer, request: Received) -> None:
        await asyncio.sleep(seconds)
        await then(peer, request)

    return answer


EVENTS = (text("Good "), text("morning."), LAST, DONE)


@asynccontextmanager
async def openai_at(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def test_a_balancer_does_not_cut_a_silent_stream_that_has_comments(commenting: RuledLine) -> None:
    commenting.answer = late(2, stream_of(*EVENTS))
    async with idle_timeout_proxy(commenting.gateway.url, idle_s=1) as url, openai_at(url) as client:
        stream = await client.chat.completions.create(model="chat", messages=MESSAGES, stream=True)  # type: ignore[call-overload]
        words = [chunk_.choices[0].delta.content async for chunk_ in stream]
    assert "".join(word or "" for word in words) == "Good morning."
    body = await streamed(commenting, late(1, stream_of(*EVENTS)))
    assert body.count(COMMENT) >= 2
    assert body == COMMENT * body.count(COMMENT) + b"".join(EVENTS)


async def test_a_balancer_cuts_a_silent_stream_without_comments_which_is_byte_for_byte_the_engines(
    line: RuledLine,
) -> None:
    line.answer = late(2, stream_of(*EVENTS))
    async with idle_timeout_proxy(line.gateway.url, idle_s=1) as url, Caller(url) as caller:
        await caller.ask("/v1/chat/completions", {"model": "chat", "messages": MESSAGES, "stream": True})
        assert await caller.read() == b""
    await line.next_record()
    assert await streamed(line, late(1, stream_of(*EVENTS))) == b"".join(EVENTS)


REFUSAL = (
    b'{"error":{"message":"temperature must be at most 2","type":"BadRequestError","param":"temperature","code":400}}'
)


async def refusing(peer: Peer, request: Received) -> None:
    await peer.send(plain(REFUSAL, b"400 Bad Request", b"content-type: application/json"))


@pytest.mark.parametrize("wait_s", [0, 1])
@pytest.mark.parametrize("has_comments", [False, True])
async def test_a_heartbeat_hides_a_refusals_status_only_when_it_came_first(
    line: RuledLine, commenting: RuledLine, has_comments: bool, wait_s: float
) -> None:
    here = commenting if has_comments else line
    here.answer = late(wait_s, refusing)
    reply = await here.gateway.chat(stream=True)
    document = reply.content
    if has_comments and wait_s:
        assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        comments = document.count(COMMENT)
        assert comments > 0 and document.startswith(COMMENT * comments + b"data: ")
        assert document.endswith(b"\n\n") and document.count(b"\n\n") == comments + 1
        document = document.removeprefix(COMMENT * comments + b"data: ")
    else:
        assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
        assert reply.headers["x-poolgate-error-source"] == "engine"
    assert json.loads(document) == json.loads(REFUSAL)
    assert reply.headers["x-request-id"]
    record = await here.next_record()
    assert (record["ending"], record["error_code"]) == ("engine_refused", "400")


# --- between gateway and caller ---------------------------------------------------------------------------------------


async def test_no_event_is_kept_back_by_an_nginx_that_buffers(line: RuledLine) -> None:
    """Each event has to be with the caller before the upstream writes the next one."""
    taken: asyncio.Queue[int] = asyncio.Queue()

    async def answer(peer: Peer, request: Received) -> None:
        await peer.send(STREAM_HEAD)
        for i in range(20):
            await peer.send(chunk(text(f"number {i};")))
            async with asyncio.timeout(10):
                assert await taken.get() == i
        await peer.send(chunk(LAST + DONE) + STREAM_END)

    line.answer = answer
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        async with nginx(Path(folder), line.gateway.url) as url, Caller(url) as caller:
            headers = [("Accept-Encoding", "gzip, br, zstd")]
            body = {"model": "chat", "messages": MESSAGES, "stream": True}
            await caller.ask("/v1/chat/completions", body, headers=headers)
            for i in range(20):
                await caller.read_until(b"number %d;" % i)
                taken.put_nowait(i)
            await caller.read_until(b"0\r\n\r\n")
    head = caller.data.partition(b"\r\n\r\n")[0].lower()
    assert b"content-encoding" not in head and b"cache-control: no-cache" in head


async def test_fields_that_nobody_here_knows_stay_in_every_delta(line: RuledLine) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    deltas = (
        event({"reasoning": "because"}),
        event({"reasoning_content": "therefore"}),
        event({"tool_calls": [call]}),
        event({"x_future": {"a": [1, {"b": None}]}, "content": None}),
        event({}, x_top=1.0),
        # as no encoder of ours would write it
        b'data: {"choices": [ {"finish_reason" :null,"x":1.0e+2, "delta":{"a":"\\u00e9\\/","a":2}} ] , "z":-0.0}\n\n',
        b"id: 7\nretry: 10\n: a comment of the engine's\ndata: {}\n\n",
        b'event: x-future\ndata: {"choices":\ndata: []}\n\n',
    )
    assert await streamed(line, stream_of(*deltas, LAST, USAGE_EVENT, DONE)) == b"".join(deltas) + LAST + DONE
