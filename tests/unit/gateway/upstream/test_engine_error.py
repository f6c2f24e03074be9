"""normalise: bodies that vLLM 0.32 really sent, and bodies nobody should send."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.engine_error import MAX_MESSAGE_BYTES, EngineError, normalise, without_key


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            404,
            b'{"error":{"message":"The model `nope` does not exist. Valid aliases: smollm2, smollm2-alias.",'
            b'"type":"NotFoundError","param":"model","code":404}}',
            EngineError(
                "The model `nope` does not exist. Valid aliases: smollm2, smollm2-alias.", "NotFoundError", "model", 404
            ),
        ),
        (
            400,
            b'{"error":{"message":"1 validation error:\\n  Unsupported Media Type: Only \'application/json\' is '
            b'allowed","type":"Bad Request","param":null,"code":400}}',
            EngineError(
                "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
                "Bad Request",
                None,
                400,
            ),
        ),
        (401, b'{"error":"Unauthorized"}', EngineError("Unauthorized", "authentication_error", None, None)),
        (404, b'{"detail":"Not Found"}', EngineError("Not Found", "invalid_request_error", None, None)),
        (
            404,
            b'{"type":"error","error":{"type":"NotFoundError","message":"The model `nope` does not exist."}}',
            EngineError("The model `nope` does not exist.", "NotFoundError", None, None),
        ),
        (
            404,
            b'{"error":{"message":"Response with id \'resp_nope\' not found.","type":"invalid_request_error",'
            b'"param":"response_id","code":404}}',
            EngineError("Response with id 'resp_nope' not found.", "invalid_request_error", "response_id", 404),
        ),
        (500, b"Internal Server Error", EngineError("Internal Server Error", "server_error", None, None)),
    ],
)
def test_each_shape_of_the_engine_becomes_one(status: int, body: bytes, expected: EngineError) -> None:
    assert normalise(status, body) == expected


def test_findings_of_the_framework_are_joined_with_their_places() -> None:
    body = b'{"detail":[{"loc":["body","n"],"msg":"Input should be an integer"},{"msg":"no place"},7]}'
    assert normalise(422, body).message == "body.n: Input should be an integer; no place"


def test_errors_of_old_releases_stand_at_the_top() -> None:
    body = b'{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}'
    assert normalise(400, body) == EngineError("too long", "BadRequestError", None, 400)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b"{}",
        b'{"error":null}',
        b'{"error":{"message":7}}',
        b'{"error":{"message":" "}}',
        b'{"detail":{}}',
        b'{"detail":[]}',
        b'{"error":{"message":7,"half',
        b'{"error":{"message":"',
        b'{"error":{"message":"no such escape: \\q"',
        b"<html><body>502 Bad Gateway</body></html>",
        b"\xff\xfe\x00",
        b"\x1b[31mred",
        b"[" * 200_000,
    ],
)
def test_a_body_that_says_nothing_gets_a_sentence_of_ours(body: bytes) -> None:
    error = normalise(502, body)
    assert error == EngineError("The engine answered 502 Bad Gateway and gave no reason.", "server_error", None, None)


def test_a_status_without_a_name_is_still_a_sentence() -> None:
    assert normalise(599, b"").message == "The engine answered 599 and gave no reason."


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (403, "permission_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_a_missing_type_follows_from_the_status(status: int, kind: str) -> None:
    assert normalise(status, b'{"error":"x"}').type == kind


@pytest.mark.parametrize("text", ["m", "한", "🙂"])
def test_validation_error_a_hundred_times_the_request_is_cut(text: str) -> None:
    long = text * 1_000_000
    for document in ({"error": {"message": long}}, {"detail": long}, {"detail": [{"msg": long}] * 50}):
        message = normalise(400, json.dumps(document, ensure_ascii=False).encode()).message
        assert len(message.encode()) <= MAX_MESSAGE_BYTES
        assert message.endswith("…")


HALF = [
    (b'{"error":{"message":"too long: ha', "too long: ha…"),
    (b'{"error":{"type":"T","message":"whole","param":"ha', "whole"),
    (b'{"error":"Unauth', "Unauth…"),
    (b'{"detail":[{"type":"t","loc":["body"],"msg":"wrong \\"n\\"","input":{"message":"mine', 'wrong "n"'),
    (b'{"object":"error","message":"a\\nb\\', "a\nb…"),
    (b'{"error":{"message":"\\u00e4\\u00', "ä…"),
    ('{"error":{"message":"한한'.encode()[:-1], "한…"),
    (b'{"error":{"param":"\\"message\\": \\"mine\\"","message": "its own', "its own…"),
    (b'{"error":{"message":"' + b"\\u0041" * 500_000, "A" * (MAX_MESSAGE_BYTES - 3) + "…"),
]


@pytest.mark.parametrize(("body", "message"), HALF, ids=range(len(HALF)))
def test_error_over_the_limit_loses_its_message(body: bytes, message: str) -> None:
    assert normalise(400, body).message == message


def test_odd_types_of_the_small_fields_are_left_out_and_long_ones_cut() -> None:
    body = json.dumps({"error": {"message": "m", "type": 5, "param": ["x"], "code": True}}).encode()
    assert normalise(400, body) == EngineError("m", "invalid_request_error", None, None)
    body = json.dumps({"error": {"message": "m", "type": "t" * 9000, "param": "p" * 9000, "code": "c" * 9000}}).encode()
    assert all(len(str(field)) <= 256 for field in normalise(400, body))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["error", "message", "detail", "type", "param", "code", "loc", "msg"]), inner)
    ),
    max_leaves=12,
)


@given(status=st.integers(100, 999), body=json_values.map(lambda v: json.dumps(v).encode()) | st.binary(max_size=200))
def test_nothing_makes_it_raise(status: int, body: bytes) -> None:
    error = normalise(status, body)
    assert error.message
    assert error.type
    json.dumps(error)


def test_the_engines_key_is_taken_out_wherever_it_stands_and_nothing_else() -> None:
    said = EngineError("no k-1, no k-1!", "k-1", "a.k-1", "k-1")
    assert without_key(said, "k-1") == EngineError("no [key], no [key]!", "[key]", "a.[key]", "[key]")
    other = EngineError("no", "x", None, 400)
    assert without_key(other, "k-1") == other
