"""The `/v1` paths through a real gateway process, real Redis and fake engines as processes."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from fakes.engine import FakeEngine, running_fake_engine
from fakes.line import KEY, MESSAGES, Gateway, running_gateway, sha256
from fakes.waits import eventually
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError

BATCH_KEY = "sk-test-batch-0123456789"
ONE_MODEL_KEY = "sk-test-one-model-012345"
LIMIT_BYTES = 20_000


pytestmark = pytest.mark.asyncio(loop_scope="module")


class Seen:
    """What one fake engine received since this test began."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self._before: dict[str, int] = {}

    async def begin(self) -> None:
        self._before = (await self.engine.state())["calls"]

    async def requests(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        calls = (await self.engine.state())["calls"]
        new = calls.get(f"POST {path}", 0) - self._before.get(f"POST {path}", 0)
        return (await self.engine.requests(path))[-new:] if new else []

    async def bodies(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        return [json.loads(request["body"]) for request in await self.requests(path)]


@dataclass
class Line:
    gateway: Gateway
    big: Seen
    small: Seen
    openai: AsyncOpenAI


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_line(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[Line]:
    """Two pools, two routes, two classes; shared by the tests of this file, none of which breaks it."""
    async with (
        running_fake_engine("--max-model-len", "2048", name="big", key="") as big,
        running_fake_engine("--max-model-len", "512", name="small", key="") as small,
        running_gateway(
            tmp_path_factory.mktemp("line"),
            redis_process.url,
            gateway={"max_body_bytes": LIMIT_BYTES},
            classes={"interactive": {"priority": 0}, "batch": {"priority": 10}},
            keys={
                "test": {"sha256": sha256(KEY), "class": "interactive"},
                "night": {"sha256": sha256(BATCH_KEY), "class": "batch"},
                "one": {"sha256": sha256(ONE_MODEL_KEY), "models": ["small/model"], "class": "batch"},
            },
            pools={
                "big": {"urls": [big.url], "served_name": "big", "max_model_len": 2048},
                "small": {
                    "urls": [small.url],
                    "served_name": "small",
                    "max_model_len": 512,
                    "scheduling_policy": "priority",
                },
            },
            routes={
                "chat": {
                    "aliases": ["gpt-4o-mini"],
                    "targets": [{"pool": "big"}],
                    "fallback": ["small"],
                    "by_class": {"batch": {"targets": [{"pool": "small"}], "fallback": ["big"]}},
                    "max_output_tokens": 100,
                    "defaults": {"temperature": 0.5, "top_p": 0.9},
                },
                "small/model": {"targets": [{"pool": "small"}], "max_output_tokens": 50, "on_max_output": "refuse"},
            },
        ) as gateway,
        AsyncOpenAI(base_url=gateway.url + "/v1", api_key=KEY, max_retries=0) as openai,
    ):
        yield Line(gateway, Seen(big), Seen(small), openai)


@pytest_asyncio.fixture(loop_scope="module")
async def line(running_line: Line) -> Line:
    await running_line.big.begin()
    await running_line.small.begin()
    return running_line


# --- what a client does all day -------------------------------------------------------------------------------------


async def test_openai_client_chats_plain_and_streamed(line: Line) -> None:
    plain = await line.openai.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=4)
    assert plain.choices[0].message.content
    assert plain.usage is not None and plain.usage.completion_tokens == 4
    stream = await line.openai.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=4, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == plain.choices[0].message.content


async def test_openai_client_completes_plain_and_streamed(line: Line) -> None:
    plain = await line.openai.completions.create(model="chat", prompt="Once upon", max_tokens=4)
    stream = await line.openai.completions.create(model="chat", prompt="Once upon", max_tokens=4, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == plain.choices[0].text != ""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("asked", [True, False, None])
async def test_client_sees_the_usage_event_only_if_it_asked(line: Line, path: str, asked: bool | None) -> None:
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    events = await line.gateway.events(path=path, **options)
    assert events[-1] == "[DONE]"
    usage = [event for event in events if '"usage":{' in event]
    assert len(usage) == (1 if asked else 0)
    if asked:
        assert events[-2] == usage[0] and json.loads(usage[0])["choices"] == []


async def test_models_lists_routes_and_aliases_that_the_key_may_use(line: Line) -> None:
    assert [m.id async for m in line.openai.models.list()] == ["chat", "gpt-4o-mini", "small/model"]
    async with AsyncOpenAI(base_url=line.gateway.url + "/v1", api_key=ONE_MODEL_KEY, max_retries=0) as other:
        assert [m.id async for m in other.models.list()] == ["small/model"]


@pytest.mark.parametrize("name", ["small/model", "small%2Fmodel", "gpt-4o-mini"])
async def test_every_listed_id_can_be_retrieved_plain_and_encoded(line: Line, name: str) -> None:
    reply = await line.gateway.client.get(f"{line.gateway.url}/v1/models/{name}", headers={"x-api-key": KEY})
    assert reply.status_code == 200
    assert reply.json()["id"] == name.replace("%2F", "/")


async def test_unknown_model_and_unknown_path_are_different_404s(line: Line) -> None:
    with pytest.raises(NotFoundError) as model:
        await line.openai.models.retrieve("nope")
    assert model.value.code == "model_not_found"
    path = await line.gateway.client.get(line.gateway.url + "/v1/nope", headers={"x-api-key": KEY})
    assert (path.status_code, path.json()["error"]["code"]) == (404, "unknown_path")


@pytest.mark.parametrize("path", ["/invocations", "/v1/load_lora_adapter", "/sleep", "/pooling"])
async def test_engine_paths_outside_the_list_cannot_be_reached(line: Line, path: str) -> None:
    reply = await line.gateway.post(path, {"model": "chat", "messages": MESSAGES})
    assert reply.status_code == 404
    assert await line.big.requests(path) == await line.small.requests(path) == []


# --- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer {KEY}"},
        {"Authorization": f"BEARER   {KEY}"},
        {"x-api-key": KEY},
    ],
)
async def test_key_is_taken_from_either_header_whatever_the_scheme_case(line: Line, headers: dict[str, str]) -> None:
    reply = await line.gateway.client.get(line.gateway.url + "/v1/models", headers=headers)
    assert reply.status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer  x y",
        b"Basic abc",
        b"Bearer wrong",
        b"Bearer \xe2\x80\x9cquoted\xe2\x80\x9d",
        b"Bearer \xff",
        b"Bearer " + b"a" * 40_000,
        KEY.encode(),
    ],
    ids=["empty", "scheme only", "two words", "basic", "wrong", "curly quotes", "raw ff", "40 kB", "no scheme"],
)
async def test_odd_keys_are_all_the_same_401(line: Line, value: bytes) -> None:
    for path, method in (("/v1/models", "GET"), ("/v1/chat/completions", "POST")):
        reply = await line.gateway.client.request(
            method, line.gateway.url + path, headers={b"authorization": value}, content=b"{}" * (method == "POST")
        )
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.headers["x-request-id"]
    assert "Traceback" not in line.gateway.log.read_text()


async def test_key_may_use_only_the_models_of_its_list(line: Line) -> None:
    assert (await line.gateway.chat(ONE_MODEL_KEY, model="small/model")).status_code == 200
    refused = await line.gateway.chat(ONE_MODEL_KEY, model="chat")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")


async def test_callers_key_never_reaches_the_engine(line: Line) -> None:
    await line.gateway.chat()
    await line.gateway.chat(headers={"x-api-key": KEY, "Cookie": "secret=1", "X-data-parallel-rank": "3"})
    for request in await line.big.requests("/v1/chat/completions"):
        names = {name.lower() for name, _ in request["headers"]}
        assert not names & {"authorization", "x-api-key", "cookie", "x-data-parallel-rank"}
        assert KEY not in json.dumps(request)


# --- routing --------------------------------------------------------------------------------------------------------


async def test_alias_reaches_the_same_pool_under_the_engines_own_name(line: Line) -> None:
    assert (await line.gateway.chat(model="gpt-4o-mini")).headers["x-poolgate-pool"] == "big"
    assert (await line.big.bodies())[-1]["model"] == "big"


async def test_class_decides_the_pool_order_and_vllms_priority(line: Line) -> None:
    reply = await line.gateway.chat(BATCH_KEY)
    assert reply.headers["x-poolgate-pool"] == "small"
    assert (await line.small.bodies())[-1]["priority"] == 10
    await line.gateway.chat(KEY)
    assert "priority" not in (await line.big.bodies())[-1]  # that pool does not run with priority scheduling


async def test_caller_may_ask_for_a_lower_class_but_never_for_a_higher_one(line: Line) -> None:
    lower = await line.gateway.chat(KEY, headers={"X-Poolgate-Class": "batch"})
    assert (lower.status_code, lower.headers["x-poolgate-pool"]) == (200, "small")
    higher = await line.gateway.chat(BATCH_KEY, headers={"X-Poolgate-Class": "interactive"})
    assert (higher.status_code, higher.json()["error"]["code"]) == (403, "not_allowed")
    unknown = await line.gateway.chat(KEY, headers={"X-Poolgate-Class": "vip"})
    assert unknown.status_code == 400 and "batch, interactive" in unknown.json()["error"]["message"]


# --- bodies ---------------------------------------------------------------------------------------------------------


async def test_unknown_fields_reach_the_engine_byte_for_byte(line: Line) -> None:
    extra = '"min_p": 0.05, "chat_template_kwargs": {"enable_thinking":  false}, "x_future": [1e3, "\\u00e9", null]'
    body = f'{{"model": "chat", "messages": {json.dumps(MESSAGES)}, {extra}}}'
    reply = await line.gateway.client.post(
        line.gateway.url + "/v1/chat/completions", content=body, headers={"x-api-key": KEY}
    )
    assert reply.status_code == 200
    sent = (await line.big.requests("/v1/chat/completions"))[-1]["body"]
    for value in ('"min_p":0.05', '{"enable_thinking":  false}', '[1e3, "\\u00e9", null]'):
        assert value in sent


async def test_defaults_apply_only_where_the_client_said_nothing(line: Line) -> None:
    await line.gateway.chat(temperature=0)
    sent = (await line.big.bodies())[-1]
    assert (sent["temperature"], sent["top_p"]) == (0, 0.9)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": "chat",', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"null", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"model": "chat", "messages": [{"role": "user", "content": "\xc3\x28"}]}', "UTF-8"),
        (b'{"model": 7}', "'model' must be a string"),
        (b'{"model": "chat"}', "'messages' is missing"),
        (b'{"model": "chat", "messages": [{"role": "king", "content": "x"}]}', "messages[0].role"),
        (b'{"model": "chat", "messages": [{"role": "user", "content": [{"type": 3}]}]}', "messages[0].content[0].type"),
        (b'{"model": "chat", "messages": [{"role": "tool", "content": "x"}]}', "messages[0].tool_call_id"),
        (b'{"model": "chat", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"a":' * 3_000, "nested too deeply"),
    ],
)
async def test_bad_body_is_a_400_that_names_the_element_and_reaches_no_engine(
    line: Line, body: bytes, says: str
) -> None:
    reply = await line.gateway.client.post(
        line.gateway.url + "/v1/chat/completions", content=body, headers={"x-api-key": KEY}
    )
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert reply.headers["x-poolgate-error-source"] == "client"
    assert await line.big.requests("/v1/chat/completions") == []
    assert (await line.gateway.chat()).status_code == 200


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": -1}, "at least 1"),
        ({"max_tokens": 1.5}, "whole number"),
        ({"max_tokens": "10"}, "whole number"),
        ({"max_tokens": True}, "whole number"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "send one of them"),
        ({"priority": 1}, "cannot be set"),
        ({"kv_transfer_params": {}}, "cannot be set"),
        ({"n": 500}, "at most 128"),
    ],
)
async def test_bad_parameter_is_a_400_that_names_it(line: Line, fields: dict[str, Any], says: str) -> None:
    reply = await line.gateway.chat(**fields)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert await line.big.requests("/v1/chat/completions") == []


async def test_null_means_absent(line: Line) -> None:
    assert (await line.gateway.chat(max_tokens=None, stop=None, stream=None)).status_code == 200
    assert (await line.big.bodies())[-1]["max_tokens"] == 100  # the route's cap


async def test_output_over_the_routes_cap_is_clamped_and_said_or_refused(line: Line) -> None:
    clamped = await line.gateway.chat(max_tokens=10**12)
    assert clamped.status_code == 200
    assert clamped.headers["x-poolgate-clamped"] == "max_tokens"
    assert (await line.big.bodies())[-1]["max_tokens"] == 100
    refused = await line.gateway.chat(model="small/model", max_tokens=51)
    assert refused.status_code == 400
    assert "51" in refused.json()["error"]["message"] and "50" in refused.json()["error"]["message"]


async def test_over_long_prompt_is_refused_before_the_engine_with_all_three_numbers(line: Line) -> None:
    reply = await line.gateway.chat(
        model="small/model", messages=[{"role": "user", "content": "word " * 600}], max_tokens=20
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    counted = json.loads((await line.small.requests("/tokenize"))[-1]["body"])["messages"][0]["content"].count("word")
    assert "512" in error["message"] and "20" in error["message"] and str(counted // 100) in error["message"]
    assert await line.small.requests("/v1/chat/completions") == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_body_of_exactly_the_limit_passes_and_one_byte_more_is_413(line: Line, path: str) -> None:
    for size, status in ((LIMIT_BYTES - 1, 200), (LIMIT_BYTES, 200), (LIMIT_BYTES + 1, 413)):
        body = json.dumps({"model": "chat", "messages": MESSAGES, "prompt": "x", "max_tokens": 2, "pad": ""})
        body = body.replace('"pad": ""', f'"pad": "{"a" * (size - len(body))}"')
        reply = await line.gateway.client.post(line.gateway.url + path, content=body, headers={"x-api-key": KEY})
        assert (len(body), reply.status_code) == (size, status)
    assert str(LIMIT_BYTES) in reply.json()["error"]["message"]


async def test_endless_chunked_body_is_cut_at_the_limit(line: Line) -> None:
    host, port = line.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
        % KEY.encode()
    )
    answer = asyncio.create_task(reader.read(4096))
    sent = 0
    while not answer.done() and sent < 100 * LIMIT_BYTES:
        writer.write(b"1000\r\n" + b"a" * 4096 + b"\r\n")
        sent += 4096
        await asyncio.wait({answer}, timeout=0.002)
    assert (await asyncio.wait_for(answer, 5)).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_compressed_request_is_understood_and_reaches_the_engine_plain(line: Line) -> None:
    body = json.dumps({"model": "chat", "messages": MESSAGES, "max_tokens": 4}).encode()
    for encoding, packed in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
        reply = await line.gateway.client.post(
            line.gateway.url + "/v1/chat/completions",
            content=packed,
            headers={"x-api-key": KEY, "Content-Encoding": encoding},
        )
        assert reply.status_code == 200, reply.text
        seen = (await line.big.requests())[-1]
        assert json.loads(seen["body"])["messages"] == MESSAGES
        assert "content-encoding" not in {name.lower() for name, _ in seen["headers"]}


async def test_compressed_body_of_another_kind_is_a_415_that_says_what_is_accepted(line: Line) -> None:
    reply = await line.gateway.chat(headers={"Content-Encoding": "br"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    assert "gzip, deflate, zstd" in reply.json()["error"]["message"]


# --- errors and ids -------------------------------------------------------------------------------------------------


async def test_openai_client_maps_our_errors_to_its_own(line: Line) -> None:
    with pytest.raises(BadRequestError):
        await line.openai.chat.completions.create(model="chat", messages=[], max_tokens=3)
    async with AsyncOpenAI(base_url=line.gateway.url + "/v1", api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.chat.completions.create(model="chat", messages=MESSAGES)


async def test_engines_refusal_is_passed_on_once_in_our_envelope(line: Line) -> None:
    reply = await line.gateway.chat(messages=[{"role": "assistant", "content": None}], x_fake={"status": 422})
    assert reply.status_code == 422
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-poolgate-error-source"] == "engine"
    assert len(await line.big.requests("/v1/chat/completions")) == 1


async def test_sane_request_id_is_kept_everywhere_and_an_odd_one_replaced(line: Line) -> None:
    kept = await line.gateway.chat(headers={"X-Request-Id": "customer-42.a"})
    assert kept.headers["x-request-id"] == "customer-42.a"
    headers = dict((await line.big.requests("/v1/chat/completions"))[-1]["headers"])
    assert {name.lower(): value for name, value in headers.items()}["x-request-id"] == "customer-42.a"
    for odd in ("customer 42/ä", "a" * 5000, ""):
        reply = await line.gateway.chat(model="nope", headers={"X-Request-Id": odd.encode()})
        assert reply.status_code == 404
        assert reply.headers["x-request-id"].startswith("req-")
    for path in ("/health", "/v1/models", "/nowhere"):
        assert (await line.gateway.client.get(line.gateway.url + path)).headers["x-request-id"]


async def test_head_get_and_half_requests_leave_the_gateway_well(line: Line) -> None:
    for method in ("GET", "HEAD", "PUT", "OPTIONS"):
        reply = await line.gateway.client.request(method, line.gateway.url + "/v1/chat/completions")
        assert reply.status_code == 405
        assert reply.headers["allow"] == "POST"
    host, port = line.gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\nContent-Le" % KEY.encode())
    assert (await line.gateway.chat()).status_code == 200
    assert "Traceback" not in line.gateway.log.read_text()


async def test_access_record_tells_the_story_without_key_or_text(line: Line) -> None:
    secret = "the prompt that nobody may read"
    await line.gateway.chat(messages=[{"role": "user", "content": secret}], headers={"X-Request-Id": "story"})

    async def written() -> list[dict[str, Any]]:
        return [r for r in line.gateway.access_lines() if r["request_id"] == "story"]

    record = (await eventually(written, "access record"))[-1]
    assert (record["route"], record["pool"], record["status"], record["key_id"]) == ("chat", "big", 200, "test")
    assert record["completion_tokens"] == 4 and record["prompt_tokens"] > 0
    log = line.gateway.log.read_text()
    assert secret not in log and KEY not in log
