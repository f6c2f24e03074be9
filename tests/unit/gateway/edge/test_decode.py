"""decode: each written rule of docs/api.md, and that no byte sequence gets anything but a refusal or a request."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from fakes.bodies import FIELDS, FORM_TYPE, JSON_PATHS, MESSAGES, any_body, json_fields
from fakes.story import ALICE, a_request
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import BadRequest
from gateway.domain.request import InferenceRequest
from gateway.edge.decode import decode
from gateway.edge.fields import DENIED_FIELDS, MAX_N
from gateway.edge.prompts import MAX_PROMPTS

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS


def decoded(body: bytes, endpoint: Endpoint = CHAT) -> InferenceRequest:
    return decode(body, endpoint, ALICE, "default", "req-1", FORM_TYPE)


def refused(body: bytes | dict[str, Any], endpoint: Endpoint = CHAT) -> BadRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(BadRequest) as caught:
        decoded(raw, endpoint)
    return caught.value


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": MESSAGES, **more}


def with_raw(name: bytes, value: bytes, endpoint: Endpoint = CHAT) -> bytes:
    """A valid body with one more field, byte for byte."""
    return json.dumps(json_fields(endpoint)).encode()[:-1] + b',"' + name + b'":' + value + b"}"


# --- the body as JSON ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"x"',
        b"1",
        b"{",
        b'{"model":"a",}',
        b'{"model":',
        b"\xef\xbb\xbf{}",
        b"{}{}",
        b"{'a':1}",
    ],
)
@pytest.mark.parametrize("endpoint", JSON_PATHS)
def test_malformed_json_is_a_400_that_says_so(body: bytes, endpoint: Endpoint) -> None:
    error = refused(body, endpoint)
    assert "JSON" in error.message


@pytest.mark.parametrize(
    "body",
    [
        with_raw(b"user", b'"\xc3\x28"'),
        with_raw(b"\xc3\x28", b"1"),
        b'{"model":"chat","messages":[{"role":"user","content":"\xc3\x28"}]}',
        json.dumps(chat()).encode("utf-16"),
        json.dumps(chat()).encode("utf-32"),
    ],
    ids=["value", "name", "message", "utf-16", "utf-32"],
)
def test_bad_utf8_inside_a_string_is_a_400(body: bytes) -> None:
    assert "UTF-8" in refused(body).message


@pytest.mark.parametrize("escape", [b'"\\ud800"', b'"\\ud800\\u0041"', b'"\\q"', b'"\\u12"', b'"a\nb"'])
@pytest.mark.parametrize("name", [b"user", b"messages", b"stream_options", b"max_tokens", b"model"])
def test_bad_escapes_are_a_400_wherever_they_stand(name: bytes, escape: bytes) -> None:
    refused(with_raw(name, escape))


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 20_000 + b"]" * 20_000,
        with_raw(b"x", b"[" * 20_000 + b"]" * 20_000),
        with_raw(b"stream_options", b'{"x":' * 20_000 + b"1" + b"}" * 20_000),
        b'{"model":"chat","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    ],
    ids=["body", "unknown field", "stream_options", "messages"],
)
def test_very_deep_nesting_is_a_400(body: bytes) -> None:
    refused(body)


@pytest.mark.parametrize("endpoint", JSON_PATHS)
def test_bad_utf8_anywhere_is_a_400_on_every_path(endpoint: Endpoint) -> None:
    for body in (with_raw(b"user", b'"\xc3\x28"', endpoint), with_raw(b"\xc3\x28", b"1", endpoint)):
        assert "UTF-8" in refused(body, endpoint).message


@pytest.mark.parametrize("endpoint", JSON_PATHS)
def test_very_deep_nesting_is_a_400_on_every_path_wherever_it_stands(endpoint: Endpoint) -> None:
    deep = b"[" * 20_000 + b"]" * 20_000
    for name in ("x", "model", *endpoint.rules.prompt_fields, *endpoint.rules.output_fields):
        refused(with_raw(name.encode(), deep, endpoint), endpoint)
    objects = b'{"x":' * 5_000 + b"1" + b"}" * 5_000  # what a tool's parameters may look like
    refused(with_raw(b"tools", b"[" + objects + b"]", endpoint), endpoint)


@pytest.mark.parametrize("endpoint", JSON_PATHS)
def test_a_body_without_a_model_or_without_a_prompt_is_refused_on_every_path(endpoint: Endpoint) -> None:
    fields = json_fields(endpoint)
    assert refused({name: value for name, value in fields.items() if name != "model"}, endpoint).param == "model"
    assert refused({"model": "chat"}, endpoint).param == endpoint.rules.prompt_fields[0]


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_path_takes_its_smallest_body_and_streams_only_where_it_can(endpoint: Endpoint) -> None:
    body, content_type = any_body(endpoint)
    request = decode(body, endpoint, ALICE, "default", "req-1", content_type)
    assert (request.endpoint, request.model, request.stream) == (endpoint, "chat", False)
    assert a_request(endpoint=endpoint, stream=True).stream == endpoint.rules.streams


def test_a_prompt_that_is_nested_too_deeply_is_a_400() -> None:
    refused(b'{"model":"chat","prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}", COMPLETIONS)


def test_a_compressed_body_that_says_nothing_is_not_json() -> None:
    refused(gzip.compress(json.dumps(chat()).encode()))


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from(Endpoint))
@example(b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', CHAT)
def test_any_bytes_are_a_request_or_a_bad_request(body: bytes, endpoint: Endpoint) -> None:
    try:
        decoded(body, endpoint)
    except BadRequest as exc:
        assert len(exc.message) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
OWNED = sorted(
    {"model", "stream", "stream_options", "encoding_format", "truncate_prompt_tokens"}
    | {
        name
        for rules in (endpoint.rules for endpoint in Endpoint)
        for name in (*rules.prompt_fields, *rules.output_fields, *rules.answer_fields, *rules.stateful_fields)
    }
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(OWNED) | st.text(max_size=6), JSON, max_size=8), st.sampled_from(Endpoint))
def test_any_json_object_is_a_request_or_a_short_refusal_that_names_no_more_than_a_field(
    body: dict[str, Any], endpoint: Endpoint
) -> None:
    try:
        decoded(json.dumps(body).encode(), endpoint)
    except BadRequest as exc:
        assert len(exc.message) < 1000


@settings(deadline=None)
@given(st.binary(max_size=40), st.sampled_from(OWNED), st.sampled_from(Endpoint))
def test_any_bytes_as_the_value_of_an_owned_field_are_a_request_or_a_bad_request(
    value: bytes, name: str, endpoint: Endpoint
) -> None:
    small = {**FIELDS.get(endpoint, {}), "model": "chat", "stream": True}
    fields = {key: json.dumps(one).encode() for key, one in small.items()}
    fields[name] = value
    body = b"{" + b",".join(b'"%b":%b' % (key.encode(), raw) for key, raw in fields.items()) + b"}"
    try:
        decoded(body, endpoint)
    except BadRequest as exc:
        assert len(exc.message) < 1000


# --- fields that reach the engine, and those that must not --------------------------------------------------


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        (b"chat_template_kwargs", b'{ "enable_thinking" : false }'),
        (b"min_p", b"0.050"),
        (b"guided_choice", b'["a","b"]'),
        (b"x_invented", b'{"a": 1.10, "b": "\\u00e9\\n", "c": 12345678901234567890123}'),
        (b"user", b'"\xe2\x80\xa8"'),
    ],
)
def test_engine_specific_fields_are_carried_as_sent(name: bytes, raw: bytes) -> None:
    request = decoded(with_raw(name, raw))
    assert bytes(request.fields[name.decode()]) == raw


@pytest.mark.parametrize("name", sorted(DENIED_FIELDS))
@pytest.mark.parametrize("endpoint", JSON_PATHS)
def test_a_denied_field_is_refused_by_name_and_not_dropped(name: str, endpoint: Endpoint) -> None:
    for value in (1, None):
        error = refused(json_fields(endpoint, **{name: value}), endpoint)
        assert name in error.message and error.param == name


def test_a_field_given_twice_counts_once_as_the_engine_would_read_it() -> None:
    request = decoded(b'{"model":"chat","messages":[{"role":"user","content":"Hi"}],"max_tokens":5,"max_tokens":6}')
    assert request.max_output_tokens == 6
    assert bytes(request.fields["max_tokens"]) == b"6"


# --- model, stream ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["", None, 5, ["a"], {}])
def test_a_model_that_is_missing_or_no_string_is_refused(model: Any) -> None:
    assert refused({"model": model, "messages": MESSAGES}).param == "model"
    assert refused({"messages": MESSAGES}).param == "model"


def test_stream_is_off_when_absent_or_null_and_must_be_a_boolean() -> None:
    assert not a_request().stream
    assert not a_request(stream=None).stream
    assert not a_request(stream=False).stream
    assert a_request(stream=True).stream
    for value in (1, 0, "true", []):
        assert refused(chat(stream=value)).param == "stream"


def test_stream_options_go_only_with_a_stream() -> None:
    assert refused(chat(stream_options={"include_usage": True})).param == "stream_options"
    assert not a_request(stream_options=None).wants_usage
    assert a_request(stream=True, stream_options={"include_usage": True}).wants_usage
    for options in ({"include_usage": False}, {}, {"include_usage": None}, None):
        assert not a_request(stream=True, stream_options=options).wants_usage


@pytest.mark.parametrize("options", [True, "x", [], {"include_usage": 1}, {"include_usage": "yes"}])
def test_stream_options_of_the_wrong_type_are_refused(options: Any) -> None:
    assert refused(chat(stream=True, stream_options=options)).param == "stream_options"


# --- output tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [b"0", b"-1", b"1.5", b"1.0", b"1e3", b'"10"', b"true", b"[]", b"{}", b"-0", b"9" * 400],
)
@pytest.mark.parametrize("name", [b"max_tokens", b"max_completion_tokens"])
def test_a_nonsense_output_limit_is_refused_by_name(name: bytes, raw: bytes) -> None:
    error = refused(with_raw(name, raw))
    assert name.decode() in error.message and error.param == name.decode()
    assert len(error.message) < 200


def test_null_and_absent_output_limits_mean_the_default() -> None:
    for request in (a_request(), a_request(max_tokens=None), a_request(max_tokens=None, max_completion_tokens=None)):
        assert request.max_output_tokens is None
        assert request.output_field == "max_tokens"


def test_a_huge_output_limit_is_a_number_like_any_other_here() -> None:
    assert a_request(max_tokens=10**12).max_output_tokens == 10**12


def test_both_output_limits_must_agree() -> None:
    both = a_request(max_tokens=5, max_completion_tokens=5)
    assert (both.output_field, both.max_output_tokens) == ("max_completion_tokens", 5)
    error = refused(chat(max_tokens=5, max_completion_tokens=6))
    assert "5" in error.message and "6" in error.message
    newer = a_request(max_tokens=None, max_completion_tokens=6)
    assert (newer.output_field, newer.max_output_tokens) == ("max_completion_tokens", 6)


def test_completions_know_only_max_tokens() -> None:
    request = a_request(endpoint=COMPLETIONS, max_tokens=5, max_completion_tokens=6)
    assert (request.output_field, request.max_output_tokens) == ("max_tokens", 5)
    assert bytes(request.fields["max_completion_tokens"]) == b"6"


# --- n, best_of, prompt -------------------------------------------------------------------------------------


def test_n_counts_answers_and_best_of_those_that_are_made_for_them() -> None:
    assert a_request().n == 1
    assert a_request(n=None).n == 1
    assert a_request(n=3).n == 3
    assert a_request(n=2, best_of=5).n == 5
    assert a_request(endpoint=COMPLETIONS, n=2, prompt=["a", "b", "c"]).n == 6


@pytest.mark.parametrize("name", ["n", "best_of"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, MAX_N + 1, 10**15])
def test_n_must_be_a_small_whole_number(name: str, value: Any) -> None:
    assert refused(chat(**{name: value})).param == name


@pytest.mark.parametrize(
    ("prompt", "is_countable", "answers"),
    [
        ("Once upon a time", True, 1),
        ("", True, 1),
        ([1, 2, 3], False, 1),
        (["a"], False, 1),
        (["a", "b"], False, 2),
        ([[1, 2], [3]], False, 2),
    ],
)
def test_a_prompt_is_a_string_strings_token_ids_or_lists_of_them(prompt: Any, is_countable: bool, answers: int) -> None:
    request = a_request(endpoint=COMPLETIONS, prompt=prompt)
    assert (request.is_countable, request.n) == (is_countable, answers)


@pytest.mark.parametrize(
    "prompt", [None, [], 5, {}, True, ["a", 1], [[1], "a"], [1, [1]], [1.5], [None], [["a"]], [[[1]]]]
)
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    assert refused({"model": "chat", "prompt": prompt}, COMPLETIONS).param == "prompt"


def test_a_missing_prompt_is_refused() -> None:
    assert refused({"model": "chat", "messages": MESSAGES}, COMPLETIONS).param == "prompt"


def test_one_request_cannot_be_a_million_prompts() -> None:
    assert a_request(endpoint=COMPLETIONS, prompt=["a"] * MAX_PROMPTS).n == MAX_PROMPTS
    assert a_request(endpoint=COMPLETIONS, prompt=[1] * (MAX_PROMPTS + 1)).n == 1  # token ids of one prompt
    assert str(MAX_PROMPTS) in refused({"model": "chat", "prompt": ["a"] * (MAX_PROMPTS + 1)}, COMPLETIONS).message


# --- what the other paths own -------------------------------------------------------------------------------


def test_a_response_has_its_own_name_for_the_limit_and_a_message_keeps_the_old_one() -> None:
    response = a_request(endpoint=Endpoint.RESPONSES, max_output_tokens=7, max_tokens=9)
    assert (response.output_field, response.max_output_tokens) == ("max_output_tokens", 7)
    message = a_request(endpoint=Endpoint.MESSAGES, max_tokens=7)
    assert (message.output_field, message.max_output_tokens) == ("max_tokens", 7)
    embedding = a_request(endpoint=Endpoint.EMBEDDINGS, max_tokens=7)
    assert (embedding.output_field, embedding.max_output_tokens) == ("", None)


@pytest.mark.parametrize("name", Endpoint.RESPONSES.rules.stateful_fields)
def test_a_response_that_needs_a_memory_is_refused_and_not_answered_without_it(name: str) -> None:
    for value in (True, "resp_1", {"id": "conv_1"}):
        error = refused(json_fields(Endpoint.RESPONSES, **{name: value}), Endpoint.RESPONSES)
        assert error.param == name and "whole conversation" in error.message
    for value in (None, False):
        assert a_request(endpoint=Endpoint.RESPONSES, **{name: value}).model == "chat"


@pytest.mark.parametrize("value", [None, "float", "base64"])
def test_the_encoding_of_embeddings_is_carried_as_sent(value: str | None) -> None:
    request = a_request(endpoint=Endpoint.EMBEDDINGS, encoding_format=value)
    assert bytes(request.fields["encoding_format"]) == json.dumps(value).encode()


@pytest.mark.parametrize("value", ["bytes", "bytes_only", "", 1])
def test_an_encoding_that_makes_the_reply_no_json_is_refused(value: Any) -> None:
    error = refused(json_fields(Endpoint.EMBEDDINGS, encoding_format=value), Endpoint.EMBEDDINGS)
    assert error.param == "encoding_format"


def test_stream_options_are_owned_only_where_they_exist() -> None:
    body = json_fields(Endpoint.RESPONSES, stream=True, stream_options={"include_obfuscation": False})
    request = decoded(json.dumps(body).encode(), Endpoint.RESPONSES)
    assert bytes(request.fields["stream_options"]) == b'{"include_obfuscation": false}'
    assert request.wants_usage


# --- what is countable --------------------------------------------------------------------------------------


def test_only_a_chat_of_text_alone_can_be_counted_by_a_tokenizer() -> None:
    assert a_request().is_countable
    text = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert a_request(messages=text).is_countable
    assert not a_request(messages=image).is_countable


def test_a_request_says_who_asks_in_which_class_and_how_big_its_body_is() -> None:
    body = json.dumps(chat()).encode()
    request = decode(body, CHAT, ALICE, "batch", "req-9")
    assert (request.id, request.principal, request.class_name, request.body_bytes) == (
        "req-9",
        ALICE,
        "batch",
        len(body),
    )
