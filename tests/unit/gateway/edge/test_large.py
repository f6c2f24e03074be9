"""decode_large: the same requests and refusals as decode, in turns, and bounds for what is too much of one kind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fakes.bodies import JSON_PATHS, any_body, json_fields
from fakes.story import ALICE
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import BadRequest
from gateway.domain.request import InferenceRequest
from gateway.edge import large
from gateway.edge.decode import decode
from gateway.edge.large import LARGE_BYTES, MAX_OBJECTS, UTF8_BYTES, decode_large
from gateway.edge.prompts import MAX_PROMPTS

CHAT, COMPLETIONS, RERANK, RESPONSES = Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RERANK, Endpoint.RESPONSES
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
TEXT_PART = {"type": "text", "text": "Hi"}
USER = {"role": "user", "content": "Hi"}


async def decoded(body: bytes | dict[str, Any], endpoint: Endpoint = CHAT) -> InferenceRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await decode_large(raw, endpoint, ALICE, "default", "req-1")


async def refused(body: bytes | dict[str, Any], endpoint: Endpoint = CHAT) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        await decoded(body, endpoint)
    return caught.value


async def assert_same(body: bytes, endpoint: Endpoint) -> None:
    """As decode() has it: the request to the last field, or a refusal of the same field."""
    try:
        wanted = decode(body, endpoint, ALICE, "default", "req-1")
    except BadRequest as exc:
        assert (await refused(body, endpoint)).param == exc.param
    else:
        assert await decoded(body, endpoint) == wanted


@pytest.fixture(params=["few", "many"])
def objects(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "many" the second object counts as one too many to be decoded in one go, and messages come two at a time."""
    if request.param == "many":
        monkeypatch.setattr(large, "FEW_OBJECTS", 0)
        monkeypatch.setattr(large, "GROUP", 2)
        monkeypatch.setattr(large, "STEP_BYTES", 40)
        monkeypatch.setattr(large, "UTF8_BYTES", 16)


# --- the same as in one go ----------------------------------------------------------------------------------

PROMPTS: list[tuple[Endpoint, str, Any]] = [
    *((CHAT, "messages", value) for value in (None, [], {}, "x", [USER] * 5, [USER] * 4 + [{"role": "wizard"}])),
    (CHAT, "messages", [USER, USER, {"role": "user", "content": [TEXT_PART, IMAGE]}, USER]),
    (CHAT, "messages", [USER] * 4 + [{"role": "user", "content": 5}]),
    (CHAT, "messages", [USER] * 3 + [{"role": "user", "content": [{"type": "text"}]}]),
    (CHAT, "messages", [USER] * 3 + [5, USER]),
    (CHAT, "messages", [USER] * 3 + [{"content": "x"}]),
    (CHAT, "messages", [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"arguments": "{"}}]}] * 3),
    (Endpoint.TOKENIZE, "messages", [USER] * 5),
    (Endpoint.TOKENIZE, "prompt", 5),
    (Endpoint.MESSAGES, "messages", [USER] * 5),
    (Endpoint.MESSAGES, "messages", [USER] * 3 + [{"role": "tool", "content": "x"}]),
    (Endpoint.MESSAGES, "messages", [USER] * 3 + [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
    (Endpoint.MESSAGES, "system", [TEXT_PART, {"type": "document", "source": {}}]),
    (Endpoint.MESSAGES, "system", [TEXT_PART, {"type": "text"}]),
    (Endpoint.MESSAGES, "system", 5),
    *(
        (COMPLETIONS, "prompt", value)
        for value in (
            *("x", "", ["a", "b,c", '","', "[1]"], [""], [], [1, 2, 3], [1], [[1, 2], [3]], [[]], [[], [1]], [[1], []]),
            *([1.5], [True], [None], ["a", 1], [1, "a"], [1, [2]], [[1], 2], [[1], "a"], [[[1]]], [{}], 5, None, {}),
            *(["x"] * MAX_PROMPTS, ["x"] * (MAX_PROMPTS + 1), [[1]] * MAX_PROMPTS, [[1]] * (MAX_PROMPTS + 1)),
        )
    ),
    *((Endpoint.EMBEDDINGS, "input", value) for value in ("x", ["a", "b"], [[1, 2], [3]], [USER] * 5, [USER, USER, 5])),
    *((Endpoint.DETOKENIZE, "tokens", value) for value in ([1, 2, 3], [], [[1]], [1.5], "x", None, [1, [2]])),
    *((RESPONSES, "input", value) for value in ("x", 5, None, [], [5], [USER] * 5, [{"type": "x"}, [1]])),
    (RESPONSES, "input", [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}] * 5),
    *((RERANK, "documents", value) for value in ("x", [], ["a", "b"], [{"content": [IMAGE]}, "a"], {"a": 1}, 5)),
    (RERANK, "documents", ["x"] * (MAX_PROMPTS + 1)),
    (RERANK, "query", {"content": [IMAGE, TEXT_PART]}),
]


@pytest.mark.usefixtures("objects")
@pytest.mark.parametrize("style", [(",", ":"), (" ,\n ", "\t: ")], ids=["narrow", "wide"])
@pytest.mark.parametrize(("endpoint", "name", "value"), PROMPTS)
async def test_a_prompt_is_judged_as_in_one_go(
    endpoint: Endpoint, name: str, value: Any, style: tuple[str, str]
) -> None:
    fields = json_fields(endpoint) | {name: value}
    if name == "messages":
        fields.pop("prompt", None)
    await assert_same(json.dumps(fields, separators=style).encode(), endpoint)
    await assert_same(json.dumps(fields | {name: [value]}, separators=style).encode(), endpoint)


@pytest.mark.usefixtures("objects")
@pytest.mark.parametrize("endpoint", JSON_PATHS)
async def test_any_other_fault_is_found_as_in_one_go(endpoint: Endpoint) -> None:
    body, _ = any_body(endpoint)
    fields = json.loads(body)
    await assert_same(body, endpoint)
    for end in range(0, len(body), 7):
        await assert_same(body[:end], endpoint)
    prompt = endpoint.rules.prompt_fields[0]
    await assert_same(json.dumps({k: v for k, v in fields.items() if k != prompt}).encode(), endpoint)
    for more in ({"priority": 1}, {"model": 5}, {"model": ""}, {"stream": "yes"}, {"max_tokens": 0}, {"x": [[[]]]}):
        await assert_same(json.dumps(fields | more).encode(), endpoint)
    for odd in (b"", b"[]", b"null", b'"x"', b"\xff", body + b"x", b"[" * 5000, b'{"a":' * 5000):
        await assert_same(odd, endpoint)


async def test_the_place_of_bad_text_is_the_same_wherever_the_steps_end() -> None:
    for before in (UTF8_BYTES - 3, UTF8_BYTES - 1, UTF8_BYTES, UTF8_BYTES + 2, 2 * UTF8_BYTES):
        for text in ("é", "你", "😀"):
            body = b'{"model":"m","prompt":"' + text.encode() * (before // len(text.encode()))
            await assert_same(body + b'"}', COMPLETIONS)
            for bad in (b"\xc3\x28", b"\xff", text.encode()[:-1], b"\x80" * 9):
                with pytest.raises(BadRequest) as caught:
                    decode(body + bad + b'"}', COMPLETIONS, ALICE, "default", "req-1")
                assert (await refused(body + bad + b'"}', COMPLETIONS)).message == caught.value.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["role", "type", "a"]), inner),
    max_leaves=12,
)


@settings(deadline=None)
@given(endpoint=st.sampled_from(JSON_PATHS), value=json_values)
async def test_whatever_stands_in_the_place_of_the_prompt(endpoint: Endpoint, value: Any) -> None:
    name = endpoint.rules.prompt_fields[0]
    await assert_same(json.dumps(json_fields(endpoint) | {name: value}, ensure_ascii=False).encode(), endpoint)


# --- in turns -----------------------------------------------------------------------------------------------

FIVE_MB = 5_000_000


@pytest.mark.parametrize(
    ("endpoint", "body", "turns"),
    [
        (COMPLETIONS, b'{"model":"m","prompt":"' + "你".encode() * (FIVE_MB // 3) + b'"}', 5),
        (COMPLETIONS, b'{"model":"m","prompt":[' + b"1," * 2_000_000 + b"1]}", 4),
        (CHAT, b'{"model":"m","messages":[' + b'{"role":"user","content":"Hello"},' * 50_000 + b"]}", 50),
        (RESPONSES, b'{"model":"m","input":[{"content":"image_' + b'\\"' * (FIVE_MB // 2) + b'"}]}', 50),
    ],
    ids=["text", "ids", "messages", "items"],
)
async def test_others_get_their_turns_while_a_large_body_is_decoded(
    endpoint: Endpoint, body: bytes, turns: int
) -> None:
    taken = 0

    async def another() -> None:
        nonlocal taken
        while True:
            taken += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(another())
    request = await decoded(body.replace(b"},]", b"}]"), endpoint)
    task.cancel()
    assert request.body_bytes > LARGE_BYTES
    assert taken > turns


async def test_a_caller_who_leaves_stops_the_work() -> None:
    body = b'{"model":"m","messages":[' + b'{"role":"user","content":"Hello"},' * 50_000
    task = asyncio.create_task(decoded(body[:-1] + b"]}"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- too much of one kind -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "name", "items"),
    [
        (CHAT, "messages", b'{"role":"user","content":""}'),
        (Endpoint.MESSAGES, "messages", b'{"role":"user","content":""}'),
        (Endpoint.EMBEDDINGS, "input", b'{"role":"user","content":""}'),
        (RESPONSES, "input", b"{}"),
    ],
)
async def test_more_messages_than_any_engine_reads_are_refused(endpoint: Endpoint, name: str, items: bytes) -> None:
    body = b'{"model":"m","max_tokens":5,"%b":[%b]}' % (name.encode(), b",".join([items] * (MAX_OBJECTS + 100)))
    fault = await refused(body, endpoint)
    assert (fault.param, str(MAX_OBJECTS) in fault.message) == (name, True)


async def test_parts_count_with_the_messages_and_text_about_objects_does_not() -> None:
    parts = b",".join([b'{"type":"text","text":""}'] * (MAX_OBJECTS + 100))
    fault = await refused(b'{"model":"m","messages":[{"role":"user","content":[%b]}]}' % parts)
    assert str(MAX_OBJECTS) in fault.message
    code = json.dumps({"a": 1}) * (MAX_OBJECTS + 100)
    assert (await decoded({"model": "m", "messages": [{"role": "user", "content": code}]})).is_countable


async def test_a_hundred_thousand_fields_are_refused_and_large_ones_are_not() -> None:
    fields = b",".join(b'"field%d":1' % i for i in range(100_000))
    fault = await refused(b'{"model":"m","messages":[{"role":"user","content":"x"}],%b}' % fields)
    assert "beside 'messages'" in fault.message
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "x" * 500}} for i in range(1000)]
    assert (await decoded({"model": "m", "messages": [USER], "tools": tools})).body_bytes > LARGE_BYTES
    many = [{"role": "user", "content": "x", "name": "y"}] * 30_000
    assert (await decoded({"model": "m", "messages": many, "tools": tools})).is_countable


@pytest.mark.parametrize("item", [b"1", b'""', b"{}", b"[]"])
@pytest.mark.parametrize(("endpoint", "name"), [(RERANK, "documents"), (COMPLETIONS, "prompt"), (RESPONSES, "input")])
async def test_a_million_of_anything_is_refused_unless_they_are_token_ids(
    endpoint: Endpoint, name: str, item: bytes
) -> None:
    body = b'{"model":"m","query":"q","%b":[%b]}' % (name.encode(), b",".join([item] * 1_000_000))
    if (endpoint, item) == (COMPLETIONS, b"1"):
        assert (await decoded(body, endpoint)).prompt_ids == 1_000_000
    else:
        assert (await refused(body, endpoint)).param == name


async def test_long_documents_with_many_commas_and_fields_are_texts_all_the_same() -> None:
    document = {"content": [{"type": "text", "text": "a, b, " * 100}, {"type": "text", "text": "c"}], "title": "x"}
    body = {"model": "m", "query": "q", "documents": [document] * 1500 + ["a, b"] * 500}
    assert (await decoded(body, RERANK)).prompts == 2000
