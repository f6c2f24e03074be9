"""Fields of a request that other gateways lost, invented or choked on; in front of a real gateway process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from fakes.bodies import FORM_TYPE, JSON_PATHS, json_fields, transcription
from fakes.line import BATCH_KEY, KEY, MESSAGES, Gateway, running_gateway, sha256
from fakes.stage import Stage, error, event, post, says, stream

from gateway.domain.endpoint import Endpoint, ErrorShape
from gateway.edge.fields import DENIED_FIELDS

COUNTED_KEY = "sk-test-counted-0123456789"
TOKENS_PER_MIN = 20_000

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Line:
    gateway: Gateway
    queued: Stage  # runs with priority scheduling
    plain: Stage  # does not


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_line(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[Line]:
    async with (
        Stage() as queued,
        Stage() as plain,
        running_gateway(
            tmp_path_factory.mktemp("fields"),
            redis_process.url,
            classes={"interactive": {"priority": 0}, "batch": {"priority": 10}},
            keys={
                "test": {"sha256": sha256(KEY), "class": "interactive"},
                "night": {"sha256": sha256(BATCH_KEY), "class": "batch"},
                "counted": {
                    "sha256": sha256(COUNTED_KEY),
                    "class": "batch",
                    "limits": {"tokens_per_min": TOKENS_PER_MIN},
                },
            },
            pools={
                "queued": {"urls": [queued.url], "served_name": "queued", "scheduling_policy": "priority"},
                "plain": {"urls": [plain.url], "served_name": "plain"},
            },
            routes={name: {"targets": [{"pool": name}]} for name in ("queued", "plain")},
        ) as gateway,
    ):
        yield Line(gateway, queued, plain)


@pytest_asyncio.fixture(loop_scope="module")
async def line(running_line: Line) -> Line:
    running_line.queued.reset()
    running_line.plain.reset()
    return running_line


# --- n and priority -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", JSON_PATHS)
async def test_priority_reaches_an_engine_that_does_not_schedule_by_it(line: Line, endpoint: Endpoint) -> None:
    """Only engines that are set up for it get the field, only on paths where they read it."""
    for model, stage in (("queued", line.queued), ("plain", line.plain)):
        fields = json_fields(endpoint, model, **({"n": 2} if endpoint.rules.answer_fields else {}))
        assert (await line.gateway.post(endpoint.value, fields, BATCH_KEY)).status_code == 200
        sent = json.loads(stage.requests[-1].body)
        assert sent.get("priority") == (10 if stage is line.queued and endpoint.rules.takes_priority else None)
        assert sent.get("n") == fields.get("n")


async def test_of_two_answers_in_one_stream_one_gets_lost(line: Line) -> None:
    def choice(index: int, text: str) -> bytes:
        delta = {"index": index, "delta": {"content": text}, "finish_reason": None}
        return b"data: " + json.dumps({"choices": [delta]}).encode() + b"\n\n"

    events = [choice(0, "a"), choice(1, "b"), choice(1, "c"), choice(0, "d")]
    line.queued.answer = says(stream(*events))
    reply = await line.gateway.chat(BATCH_KEY, model="queued", n=2, stream=True)
    assert reply.content == b"".join(events) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_several_answers_are_limited_as_one(line: Line, path: str) -> None:
    """`n` times the output counts: in what is reserved, in what the headers show, and in what is refused."""

    async def reserved(**fields: Any) -> int:
        before = await line.gateway.post(path, {**body, "max_tokens": 1, "n": 1}, COUNTED_KEY)
        after = await line.gateway.post(path, body | fields, COUNTED_KEY)
        assert (before.status_code, after.status_code) == (200, 200)
        assert after.headers["x-ratelimit-limit-tokens"] == str(TOKENS_PER_MIN)
        left = [int(reply.headers["x-ratelimit-remaining-tokens"]) for reply in (before, after)]
        return left[0] - left[1]

    body = {"model": "plain", "messages": MESSAGES} if "chat" in path else {"model": "plain", "prompt": "Once"}
    one, four = await reserved(max_tokens=500, n=1), await reserved(max_tokens=500, n=4)
    assert 450 <= one < 600
    assert 1950 <= four < 2100
    line.plain.requests.clear()
    refused = await line.gateway.post(path, {**body, "max_tokens": 500, "n": 100}, COUNTED_KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "retry-after" not in refused.headers  # more than the whole limit: no waiting helps
    assert line.plain.requests == []


# --- fields that the gateway does not know ----------------------------------------------------------------------------

UNKNOWN = {
    "chat_template_kwargs": '{"enable_thinking":  false}',
    "min_p": "0.050",
    "guided_choice": '["ja", "nein",\t"한국"]',
    "guided_regex": r'"(a|b)*\\d+\u00e9\/"',
    "x_future": '[1e3, -0.0, 1E400, 12345678901234567890, "\\ud83d\\ude00 \u2028 \\u0000", {"b":1,"a":2,"b":3}]',
    "": '"an empty name"',
    'odd "name"\\\n': "true",
}


@pytest.mark.parametrize("endpoint", JSON_PATHS)
async def test_fields_that_the_gateway_does_not_know_are_dropped_or_rewritten(line: Line, endpoint: Endpoint) -> None:
    body = json.dumps(json_fields(endpoint, "plain"))[:-1]
    body += "".join(f", {json.dumps(name)} : {value} " for name, value in UNKNOWN.items()) + "}"
    reply = await post(line.gateway, endpoint.value, body.encode())
    assert reply.status == 200, reply.body
    sent = line.plain.requests[-1].body
    for value in UNKNOWN.values():
        assert b":" + value.encode() + b"," in sent or sent.endswith(b":" + value.encode() + b"}"), value
    assert set(UNKNOWN) <= set(json.loads(sent))
    assert sent.count(b'"min_p"') == 1


@pytest.mark.parametrize("value", [b"1", b"null", b"{}", b'"x"'])
@pytest.mark.parametrize("endpoint", Endpoint)
async def test_denied_field_is_dropped_without_a_word(line: Line, endpoint: Endpoint, value: bytes) -> None:
    """It is a 400 that names it, on every path and whatever its value: also null, and written with escapes."""
    for name in sorted(DENIED_FIELDS):
        if endpoint.rules.is_form:
            body, content_type = transcription("plain", **{name: value.decode()}), FORM_TYPE
        else:
            escaped = b"\\u%04x" % ord(name[0]) + name[1:].encode()
            body = json.dumps(json_fields(endpoint, "plain")).encode()[:-1] + b',"%b":%b}' % (escaped, value)
            content_type = b"application/json"
        reply = await post(line.gateway, endpoint.value, body, b"Content-Type: " + content_type)
        assert reply.status == 400
        assert f"'{name}' cannot be set" in reply.error()["message"]
        if endpoint.rules.errors is ErrorShape.OPENAI:
            assert reply.error()["param"] == name
    assert line.plain.requests == []


async def test_a_name_that_comes_twice_is_one_thing_for_the_gateway_and_another_for_the_engine(line: Line) -> None:
    body = b'{"model":"queued","messages":[{"role":"user","content":"x"}],"n":100,"n":1,"model":"plain","t":1,"t":2}'
    assert (await post(line.gateway, "/v1/chat/completions", body)).status == 200
    assert line.queued.requests == []
    sent = line.plain.requests[-1].body
    assert all(sent.count(b'"%b":' % name) == 1 for name in (b"model", b"n", b"t", b"messages"))
    assert json.loads(sent) | {"model": "plain"} == json.loads(body)


# --- tools ----------------------------------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
HISTORIES = {
    "broken arguments, no content": [{"role": "assistant", "tool_calls": [CALL]}],
    "broken arguments, null content": [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "arguments that are no text": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"arguments": {}}}]}],
    "a tool message without its call": [{"role": "tool", "tool_call_id": "c9", "content": "42"}],
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
async def test_broken_tool_arguments_in_the_history_take_the_replica_down(
    line: Line, history: list[dict[str, Any]], is_stream: bool
) -> None:
    """They reach the engine as they are; its 400 is passed on, once, and the replica stays where it was."""
    line.plain.answer = says(error("Extra data in tool call arguments", b"400 Bad Request"))
    messages = [*MESSAGES, *history, *MESSAGES]
    for _ in range(20):
        line.plain.requests.clear()
        reply = await line.gateway.chat(model="plain", messages=messages, stream=is_stream)
        assert (reply.status_code, reply.headers["x-poolgate-error-source"]) == (400, "engine")
        assert reply.json()["error"]["message"] == "Extra data in tool call arguments"
        assert len(line.plain.requests) == 1
    assert json.loads(line.plain.requests[0].body)["messages"] == messages
    line.plain.reset()
    assert (await line.gateway.chat(model="plain")).status_code == 200


async def test_tool_call_deltas_lose_fields(line: Line) -> None:
    events = [
        event(role="assistant", content=None, reasoning="why"),
        event(tool_calls=[{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}]),
        event(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}, "x_future": 1}]),
        event(reasoning_content="…", x_future=[1, {"a": None}]),
        event(),
    ]
    line.plain.answer = says(stream(*events))
    reply = await line.gateway.chat(model="plain", stream=True)
    assert reply.content == b"".join(events) + b"data: [DONE]\n\n"
