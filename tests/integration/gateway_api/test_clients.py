"""What clients do all day: chat, completions, models, keys, and who serves them."""

from __future__ import annotations

import json

import pytest
from fakes.line import BATCH_KEY, KEY, MESSAGES
from openai import AsyncOpenAI, NotFoundError

from .conftest import ONE_MODEL_KEY, Line

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
