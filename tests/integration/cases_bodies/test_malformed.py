"""Malformed and deeply nested bodies, on every proxied path."""

from __future__ import annotations

import json

import pytest
from fakes.bodies import BOUNDARY, FORM_TYPE, JSON_PATHS, SOUND, any_body, form, json_fields, part, transcription
from fakes.stage import post

from gateway.domain.endpoint import Endpoint

from .conftest import Line, check_shape

pytestmark = pytest.mark.asyncio(loop_scope="module")

# --- malformed ------------------------------------------------------------------------------------------------------
MALFORMED = {
    "trailing comma": b'{"model": "chat",}',
    "empty": b"",
    "null": b"null",
    "array": b"[]",
    "string": b'"x"',
    "number": b"1",
    "cut off": b'{"model": "chat", "messages": [{"role": "us',
    "byte order mark": b"\xef\xbb\xbf{}",
    "two documents": b'{"model": "chat"} {}',
    "not a number": b'{"model": "chat", "temperature": NaN}',
    "bare control character": b'{"model": "chat", "user": "a\nb"}',
    "bad utf-8 in a text": b'{"model": "chat", "user": "\xc3\x28"}',
    "bad utf-8 in a name": b'{"model": "chat", "us\xc3\x28er": 1}',
    "utf-16": json.dumps({"model": "chat"}).encode("utf-16"),
    "utf-16 without a mark": json.dumps({"model": "chat"}).encode("utf-16-le"),
    "overlong utf-8": b'{"model": "chat", "user": "\xc0\xaf"}',
    "a surrogate as utf-8": b'{"model": "chat", "user": "\xed\xa0\x80"}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_json_or_bad_utf8_is_a_500(line: Line, body: bytes) -> None:
    """It is a 400 in the shape of the path, on every path, and nothing of it reaches an engine."""
    for endpoint in Endpoint:
        content_type = FORM_TYPE if endpoint.rules.is_form else b"application/json"
        reply = await post(line.gateway, endpoint.value, body, b"Content-Type: " + content_type)
        assert reply.status == 400, (endpoint, reply)
        assert reply.all(b"x-poolgate-error-source") == [b"client"]
        assert check_shape(endpoint, reply.body)
    assert line.stage.requests == []
    await line.check_alive()


@pytest.mark.parametrize("content_type", [None, b"text/plain", b"application/x-www-form-urlencoded", b"\xff;;="])
@pytest.mark.parametrize("endpoint", JSON_PATHS)
async def test_json_with_a_wrong_or_missing_content_type_is_read_as_what_it_is(
    line: Line, endpoint: Endpoint, content_type: bytes | None
) -> None:
    body, _ = any_body(endpoint)
    headers = () if content_type is None else (b"Content-Type: " + content_type,)
    assert (await post(line.gateway, endpoint.value, body, *headers)).status == 200
    assert line.stage.requests[-1].header(b"content-type") == [b"application/json"]
    broken = await post(line.gateway, endpoint.value, body[:-1], *headers)
    assert broken.status == 400
    assert len(line.stage.requests) == 1


BAD_FORMS = {
    "json": (b'{"model": "chat"}', b"application/json"),
    "no type": (transcription(), b""),
    "no boundary": (transcription(), b"multipart/form-data"),
    "another boundary": (transcription(), b"multipart/form-data; boundary=other"),
    "cut off": (transcription()[:-20], FORM_TYPE),
    "something in front": (b"x" + transcription(), FORM_TYPE),
    "something behind": (transcription() + b"x", FORM_TYPE),
    "no model": (form(part("file", SOUND, "a.wav")), FORM_TYPE),
    "two models": (form(part("file", SOUND, "a.wav"), part("model", "chat"), part("model", "other")), FORM_TYPE),
    "no file": (form(part("model", "chat")), FORM_TYPE),
    "model with bad utf-8": (form(part("file", SOUND, "a.wav"), part("model", b"ch\xc3\x28t")), FORM_TYPE),
    "a denied field": (transcription(priority="1"), FORM_TYPE),
    "a thousand parts": (form(*[part(f"f{i}", "x") for i in range(1000)]), FORM_TYPE),
    "boundary alone": (f"--{BOUNDARY}--\r\n".encode(), FORM_TYPE),
}


@pytest.mark.parametrize(("body", "content_type"), BAD_FORMS.values(), ids=BAD_FORMS)
async def test_malformed_form_is_a_500_or_is_read_in_two_ways(line: Line, body: bytes, content_type: bytes) -> None:
    headers = (b"Content-Type: " + content_type,) if content_type else ()
    reply = await post(line.gateway, Endpoint.TRANSCRIPTIONS.value, body, *headers)
    assert reply.status == 400
    check_shape(Endpoint.TRANSCRIPTIONS, reply.body)
    assert line.stage.requests == []
    await line.check_alive()


# --- depth ----------------------------------------------------------------------------------------------------------
def deep_object(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


DEEP = {
    "arrays as the body": b"[" * 20_000 + b"]" * 20_000,
    "objects as the body": deep_object(15_000),
    "no end": b"[" * 90_000,
    "a tool's parameters": b'{"model":"chat","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function",'
    b'"function":{"name":"f","parameters":' + deep_object(5_000) + b"}}]}",
    "a field that nobody knows": b'{"model":"chat","messages":[{"role":"user","content":"x"}],"x":'
    + deep_object(5_000)
    + b"}",
    "a message": b'{"model":"chat","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "a prompt": b'{"model":"chat","prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "an input": b'{"model":"chat","input":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "stream options": b'{"model":"chat","stream":true,"stream_options":' + deep_object(5_000) + b"}",
}


@pytest.mark.parametrize("body", DEEP.values(), ids=DEEP)
async def test_very_deep_nesting_ends_the_process(line: Line, body: bytes) -> None:
    for endpoint in JSON_PATHS:
        reply = await post(line.gateway, endpoint.value, body)
        assert reply.status == 400, endpoint
        assert len(reply.body) < 1_000
        check_shape(endpoint, reply.body)
    assert line.stage.requests == []
    await line.check_alive()


async def test_nesting_that_the_parser_takes_reaches_the_engine_as_sent(line: Line) -> None:
    deep = deep_object(500)
    body = json.dumps(json_fields(Endpoint.CHAT)).encode()[:-1] + b',"x":' + deep + b"}"
    assert (await post(line.gateway, "/v1/chat/completions", body)).status == 200
    assert deep in line.stage.requests[-1].body
