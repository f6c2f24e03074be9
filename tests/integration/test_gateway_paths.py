"""Every proxied path through a real gateway process and fake engines: OpenAI's client, Anthropic's shapes, forms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fakes.bodies import FORM_TYPE, JSON_PATHS, any_body, json_fields, transcription
from fakes.engine import FakeEngine, running_fake_engine
from fakes.line import KEY, Gateway, running_gateway, sha256
from fakes.waits import eventually
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

from gateway.domain.endpoint import Endpoint, ErrorShape, StreamEnd

LIMIT_BYTES = 20_000
TOKENS_PER_MIN = 100_000
SERVED_BY = {
    **dict.fromkeys(Endpoint, "chat"),
    Endpoint.EMBEDDINGS: "embed",
    **dict.fromkeys((e for e in Endpoint if "rerank" in e or "score" in e), "rerank"),
    Endpoint.TRANSCRIPTIONS: "speech",
}
STREAMED = [endpoint for endpoint in Endpoint if endpoint.rules.streams]
TEXT_STREAMED = [endpoint for endpoint in STREAMED if not endpoint.rules.is_form]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Line:
    gateway: Gateway
    engines: dict[str, FakeEngine]
    openai: AsyncOpenAI

    async def post(self, endpoint: Endpoint, **fields: Any) -> httpx.Response:
        return await self.gateway.post(endpoint.value, json_fields(endpoint, SERVED_BY[endpoint], **fields))

    async def send(self, endpoint: Endpoint, body: bytes, content_type: bytes) -> httpx.Response:
        return await self.gateway.client.post(
            self.gateway.url + endpoint.value,
            content=body,
            headers={"x-api-key": KEY, "content-type": content_type.decode()},
        )

    async def last_record(self) -> dict[str, Any]:
        """The newest access record, once it is written."""
        before = self.records_seen

        async def written() -> bool:
            return len(self.gateway.access_lines()) > before

        await eventually(written, "the access record is written")
        lines = self.gateway.access_lines()
        self.records_seen = len(lines)
        return lines[-1]

    async def last_request(self, endpoint: Endpoint) -> dict[str, Any]:
        return (await self.engines[SERVED_BY[endpoint]].requests(endpoint.value))[-1]

    records_seen: int = 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_line(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[Line]:
    """Four engines of one pool and one route each; shared by the tests of this file, none of which breaks it."""
    async with (
        running_fake_engine(name="chat-served", key="") as chat,
        running_fake_engine("--runner", "pooling", "--max-model-len", "512", name="embed-served", key="") as embed,
        running_fake_engine("--runner", "pooling", "--convert", "classify", name="rerank-served", key="") as rerank,
        running_fake_engine("--fake-transcription", name="speech-served", key="") as speech,
        running_gateway(
            tmp_path_factory.mktemp("paths"),
            redis_process.url,
            gateway={"max_body_bytes": LIMIT_BYTES},
            keys={"test": {"sha256": sha256(KEY), "limits": {"tokens_per_min": TOKENS_PER_MIN}}},
            pools={
                name: {
                    "urls": [engine.url],
                    "served_name": f"{name}-served",
                    "max_model_len": 512 if name == "embed" else 2048,
                }
                for name, engine in (("chat", chat), ("embed", embed), ("rerank", rerank), ("speech", speech))
            },
            routes={name: {"targets": [{"pool": name}]} for name in ("chat", "embed", "rerank", "speech")},
        ) as gateway,
        AsyncOpenAI(base_url=gateway.url + "/v1", api_key=KEY, max_retries=0) as openai,
    ):
        engines = {"chat": chat, "embed": embed, "rerank": rerank, "speech": speech}
        yield Line(gateway, engines, openai)


@pytest_asyncio.fixture(loop_scope="module")
async def line(running_line: Line) -> Line:
    running_line.records_seen = await running_line.gateway.at_rest()
    return running_line


# --- every path -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_every_path_reaches_its_engine_at_the_same_path_under_the_served_name(
    line: Line, endpoint: Endpoint
) -> None:
    name = SERVED_BY[endpoint]
    body, content_type = any_body(endpoint, name)
    reply = await line.send(endpoint, body, content_type)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-poolgate-pool"] == name
    seen = await line.last_request(endpoint)
    assert f"{name}-served" in seen["body"]
    headers = {key.lower(): value for key, value in seen["headers"]}
    assert KEY not in json.dumps(seen)
    assert headers["content-type"] == content_type.decode()
    record = await line.last_record()
    assert (record["path"], record["status"]) == (endpoint.value, 200)
    assert (record["prompt_tokens"] > 0) == endpoint.rules.costs_tokens


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_an_unknown_model_is_a_404_in_the_shape_of_the_path(line: Line, endpoint: Endpoint) -> None:
    reply = await line.send(endpoint, *any_body(endpoint, "nope"))
    assert (reply.status_code, reply.headers["x-poolgate-error-source"]) == (404, "client")
    error = reply.json()["error"]
    if endpoint.rules.errors is ErrorShape.ANTHROPIC:
        assert reply.json()["type"] == "error" and error["type"] == "not_found_error"
    else:
        assert error["code"] == "model_not_found"


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_a_missing_key_and_a_wrong_method_have_the_shape_of_the_path(line: Line, endpoint: Endpoint) -> None:
    url = line.gateway.url + endpoint.value
    for method, status, kind in (("POST", 401, "authentication_error"), ("GET", 405, "invalid_request_error")):
        reply = await line.gateway.client.request(method, url)
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
        assert ("type" in reply.json()) == (endpoint.rules.errors is ErrorShape.ANTHROPIC)


@pytest.mark.parametrize("endpoint", JSON_PATHS)
async def test_size_limit_counts_bytes_on_every_path(line: Line, endpoint: Endpoint) -> None:
    body, content_type = any_body(endpoint, SERVED_BY[endpoint])
    for size, status in ((LIMIT_BYTES - 1, 200), (LIMIT_BYTES, 200), (LIMIT_BYTES + 1, 413)):
        reply = await line.send(endpoint, body.ljust(size), content_type)
        assert reply.status_code == status, reply.text


async def test_a_refusal_of_the_engine_is_passed_on_and_the_next_request_is_served(line: Line) -> None:
    for endpoint, model in ((Endpoint.CHAT, "embed"), (Endpoint.EMBEDDINGS, "chat"), (Endpoint.RERANK, "chat")):
        reply = await line.gateway.post(endpoint.value, json_fields(endpoint, model))
        assert (reply.status_code, reply.headers["x-poolgate-error-source"]) == (404, "engine")
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("path_not_served", "model")
        assert f"'{model}' does not serve {endpoint.value}" in error["message"]
    assert (await line.post(Endpoint.EMBEDDINGS)).status_code == 200
    assert (await line.post(Endpoint.CHAT)).status_code == 200


@pytest.mark.parametrize("endpoint", TEXT_STREAMED)
async def test_a_stream_reaches_the_caller_byte_for_byte_with_its_end(line: Line, endpoint: Endpoint) -> None:
    reply = await line.post(endpoint, stream=True, x_fake={"tokens": 5, "byte_by_byte": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    end = {StreamEnd.DONE: "[DONE]", StreamEnd.RESPONSE: "response.completed", StreamEnd.MESSAGE_STOP: "message_stop"}
    assert end[endpoint.rules.end] in reply.text.rstrip().split("\n\n")[-1]
    record = await line.last_record()
    assert (record["ending"], record["completion_tokens"]) == ("completed", 5)


@pytest.mark.parametrize("endpoint", TEXT_STREAMED)
@pytest.mark.parametrize("fault", ["cut_after", "close_after", "reset_after"])
async def test_a_stream_that_breaks_off_ends_with_one_error_event_in_the_shape_of_the_path(
    line: Line, endpoint: Endpoint, fault: str
) -> None:
    reply = await line.post(endpoint, stream=True, x_fake={"tokens": 5, fault: 6})
    *_, last = reply.text.rstrip("\n").split("\n\n")
    name, _, data = last.rpartition("data: ")
    assert name == ("event: error\n" if endpoint.rules.errors is ErrorShape.ANTHROPIC else "")
    assert set(json.loads(data)) == ({"type", "error"} if name else {"error"})
    assert "[DONE]" not in reply.text and "message_stop" not in reply.text and "response.completed" not in reply.text
    record = await line.last_record()
    assert record["ending"] == "upstream_error" and record["completion_tokens"] >= 1


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_a_failure_of_the_engine_is_a_502_in_the_shape_of_the_path(line: Line, endpoint: Endpoint) -> None:
    fault = {"status": 500}
    if endpoint.rules.is_form:
        reply = await line.send(endpoint, transcription("speech", x_fake=json.dumps(fault)), FORM_TYPE)
    else:
        reply = await line.post(endpoint, x_fake=fault)
    assert (reply.status_code, reply.headers["x-poolgate-error-source"]) == (502, "engine")
    anthropic = endpoint.rules.errors is ErrorShape.ANTHROPIC
    assert reply.json()["error"]["type"] == ("api_error" if anthropic else "upstream_error")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("endpoint", STREAMED)
async def test_a_caller_that_leaves_ends_the_engines_work(line: Line, endpoint: Endpoint, is_stream: bool) -> None:
    engine = line.engines[SERVED_BY[endpoint]]
    aborted = (await engine.state())["aborted"]
    fault = {"ttft_ms": 60_000}
    if endpoint.rules.is_form:
        body, content_type = transcription("speech", stream=str(is_stream), x_fake=json.dumps(fault)), FORM_TYPE
    else:
        fields = json_fields(endpoint, SERVED_BY[endpoint], stream=is_stream, x_fake=fault)
        body, content_type = json.dumps(fields).encode(), b"application/json"
    call = asyncio.create_task(line.send(endpoint, body, content_type))

    async def runs() -> bool:
        return bool((await engine.state())["running"])

    await eventually(runs, "the engine works")
    call.cancel()

    async def has_stopped() -> bool:
        state = await engine.state()
        return state["running"] == 0 and state["aborted"] == aborted + 1

    await eventually(has_stopped, "the engine stops")


# --- embeddings, rerank, score ----------------------------------------------------------------------------------------


async def test_embeddings_through_openais_client_are_the_same_in_base64_and_as_floats(line: Line) -> None:
    by_default = await line.openai.embeddings.create(model="embed", input="hello")
    assert json.loads((await line.last_request(Endpoint.EMBEDDINGS))["body"])["encoding_format"] == "base64"
    floats = await line.openai.embeddings.create(model="embed", input="hello", encoding_format="float")
    assert by_default.data[0].embedding == floats.data[0].embedding
    assert len(floats.data[0].embedding) == 64
    assert by_default.usage.prompt_tokens == floats.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("given", "vectors"), [("hello", 1), (["hello", "world"], 2), ([1, 2, 3], 1), ([[1, 2, 3], [4, 5]], 2)]
)
async def test_embeddings_of_every_kind_of_input(line: Line, given: Any, vectors: int) -> None:
    made = await line.openai.embeddings.create(model="embed", input=given)
    assert len(made.data) == vectors
    assert (await line.last_record())["prompt_tokens"] == made.usage.prompt_tokens


async def test_token_lists_are_reserved_as_tokens(line: Line) -> None:
    first = await line.post(Endpoint.EMBEDDINGS, input=[[1] * 300, [2] * 200])
    again = await line.post(Endpoint.EMBEDDINGS, input=[[1] * 300, [2] * 200])
    left = [int(reply.headers["x-ratelimit-remaining-tokens"]) for reply in (first, again)]
    assert 400 <= left[0] - left[1] <= 500  # some may have come back with time between the two


async def test_an_empty_list_and_a_text_over_the_window_are_refused(line: Line) -> None:
    with pytest.raises(BadRequestError, match="empty"):
        await line.openai.embeddings.create(model="embed", input=[])
    with pytest.raises(BadRequestError) as refused:
        await line.openai.embeddings.create(model="embed", input="one two " * 400)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(NotFoundError) as unknown:
        await line.openai.embeddings.create(model="nope", input="x")
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize("endpoint", [Endpoint.RERANK, Endpoint.RERANK_BARE, Endpoint.RERANK_V2])
async def test_rerank_at_each_of_its_paths(line: Line, endpoint: Endpoint) -> None:
    reply = await line.post(endpoint, top_n=1)
    assert len(reply.json()["results"]) == 1
    assert (await line.last_record())["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("endpoint", [Endpoint.SCORE, Endpoint.SCORE_BARE])
async def test_score_at_each_of_its_paths(line: Line, endpoint: Endpoint) -> None:
    reply = await line.post(endpoint)
    assert [one["index"] for one in reply.json()["data"]] == [0, 1]
    assert (await line.last_record())["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"]


# --- responses --------------------------------------------------------------------------------------------------------


async def test_responses_through_openais_client_plain_and_streamed(line: Line) -> None:
    plain = await line.openai.responses.create(model="chat", input="Say hi.", instructions="Be short.")
    assert plain.output_text and plain.usage is not None
    record = await line.last_record()
    usage = plain.usage
    assert (record["prompt_tokens"], record["completion_tokens"]) == (usage.input_tokens, usage.output_tokens)

    events = [event async for event in await line.openai.responses.create(model="chat", input="Say hi.", stream=True)]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == text != ""
    record = await line.last_record()
    assert last.response.usage is not None
    assert record["completion_tokens"] == last.response.usage.output_tokens


async def test_a_response_that_breaks_off_is_an_error_of_openais_client(line: Line) -> None:
    stream = await line.openai.responses.create(
        model="chat", input="Say hi.", stream=True, extra_body={"x_fake": {"cut_after": 6}}
    )
    with pytest.raises(APIError):
        async for _ in stream:
            pass


@pytest.mark.parametrize("field", [{"background": True}, {"previous_response_id": "resp_1"}, {"conversation": "c"}])
async def test_a_response_that_needs_a_memory_never_reaches_an_engine(line: Line, field: dict[str, Any]) -> None:
    calls = (await line.engines["chat"].state())["calls"]
    with pytest.raises(BadRequestError) as refused:
        await line.openai.responses.create(model="chat", input="Hi", **field)
    assert refused.value.param in field
    assert (await line.engines["chat"].state())["calls"] == calls | {"GET /fake/state": calls["GET /fake/state"] + 1}


async def test_a_stored_response_cannot_be_asked_for(line: Line) -> None:
    reply = await line.gateway.client.get(line.gateway.url + "/v1/responses/resp_1", headers={"x-api-key": KEY})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_path")


# --- messages ---------------------------------------------------------------------------------------------------------


async def test_messages_plain_and_streamed_cost_what_the_engine_tells(line: Line) -> None:
    plain = await line.post(Endpoint.MESSAGES, system="Be short.")
    usage = plain.json()["usage"]
    record = await line.last_record()
    assert (record["prompt_tokens"], record["completion_tokens"]) == (usage["input_tokens"], usage["output_tokens"])
    counted = await line.post(Endpoint.COUNT_TOKENS, system="Be short.")
    assert counted.json()["input_tokens"] == usage["input_tokens"]

    streamed = await line.post(Endpoint.MESSAGES, stream=True)
    names = [event.partition("\n")[0] for event in streamed.text.rstrip().split("\n\n")]
    assert (names[0], names[-1]) == ("event: message_start", "event: message_stop")


async def test_what_the_engine_refuses_in_a_message_has_anthropics_shape_whatever_shape_it_had(line: Line) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}
    reply = await line.gateway.post("/v1/messages", body)  # vLLM words this one as OpenAI does
    assert (reply.status_code, reply.headers["x-poolgate-error-source"]) == (400, "engine")
    assert reply.json()["type"] == "error" and reply.json()["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in reply.json()["error"]["message"]


async def test_a_message_is_counted_exactly_by_the_engine_before_any_budget_is_charged(line: Line) -> None:
    messages = [{"role": "user", "content": "one two three " * 120}]
    counted = (await line.post(Endpoint.COUNT_TOKENS, messages=messages)).json()["input_tokens"]
    room = 2048 - counted
    assert (await line.post(Endpoint.MESSAGES, messages=messages, max_tokens=room)).status_code == 200
    refused = await line.post(Endpoint.MESSAGES, messages=messages, max_tokens=room + 1)
    assert refused.status_code == 400
    assert all(str(number) in refused.json()["error"]["message"] for number in (2048, counted, room + 1))


# --- tokens -----------------------------------------------------------------------------------------------------------


async def test_tokens_can_be_asked_for_even_of_what_does_not_fit(line: Line) -> None:
    prompt = "one two three " * 600
    reply = await line.post(Endpoint.TOKENIZE, prompt=prompt)
    assert reply.json()["count"] > 2048
    chat = await line.gateway.post("/tokenize", {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]})
    assert chat.json()["count"] == len(chat.json()["tokens"])
    back = await line.post(Endpoint.DETOKENIZE, tokens=chat.json()["tokens"])
    assert isinstance(back.json()["prompt"], str)
    assert (await line.last_record())["prompt_tokens"] == 0


# --- forms ------------------------------------------------------------------------------------------------------------


async def test_a_recording_through_openais_client_plain_and_streamed(line: Line) -> None:
    sound = ("a.wav", b"RIFF" + bytes(range(256)) * 20)
    plain = await line.openai.audio.transcriptions.create(model="speech", file=sound, language="en")
    assert plain.text
    stream = await line.openai.audio.transcriptions.create(model="speech", file=sound, stream=True)
    assert len([event async for event in stream]) > 1


async def test_every_byte_of_a_form_but_the_models_name_reaches_the_engine_as_sent(line: Line) -> None:
    sent = transcription("speech", language="en", prompt="ü €")
    await line.send(Endpoint.TRANSCRIPTIONS, sent, FORM_TYPE)
    seen = await line.last_request(Endpoint.TRANSCRIPTIONS)
    expected = sent.replace(b"\r\n\r\nspeech\r\n", b"\r\n\r\nspeech-served\r\n")
    assert seen["body"] == expected.decode(errors="backslashreplace")


async def test_a_form_over_the_limit_is_413_and_one_that_is_none_is_400(line: Line) -> None:
    large = transcription("speech", prompt="x" * LIMIT_BYTES)
    assert (await line.send(Endpoint.TRANSCRIPTIONS, large, FORM_TYPE)).status_code == 413
    reply = await line.send(Endpoint.TRANSCRIPTIONS, b'{"model":"speech"}', b"application/json")
    assert reply.status_code == 400 and "multipart/form-data" in reply.json()["error"]["message"]


async def test_subtitles_are_passed_on_as_the_text_that_they_are(line: Line) -> None:
    fault = json.dumps({"status": 200, "body": "WEBVTT\n\n00:00.000 --> 00:01.000\nHi", "content_type": "text/vtt"})
    reply = await line.send(Endpoint.TRANSCRIPTIONS, transcription("speech", x_fake=fault), FORM_TYPE)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/vtt")
    assert reply.text.startswith("WEBVTT")
