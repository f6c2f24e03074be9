"""usage_of, was_given_up, reply_type: what is read from a plain reply of each path."""

from __future__ import annotations

import pytest

from gateway.domain.endpoint import Endpoint
from gateway.domain.outcome import Usage
from gateway.upstream.usage import reply_type, usage_of, was_given_up

JSON_TYPE = [(b"server", b"uvicorn"), (b"content-type", b"application/json")]


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":3,"total_tokens":8,"completion_tokens":5}}', Usage(3, 5)),
        (b'{"data":[],"usage":{"prompt_tokens":3,"total_tokens":3}}', Usage(3, 0)),
        (b'{"data":[],"usage":{"prompt_tokens":3,"completion_tokens":null}}', Usage(3, 0)),
        (b'{"usage":null}', None),
        (b"{}", None),
        (b"[]", None),
        (b'{"usage":{"prompt_tokens":"3"}}', None),
        (b'{"usage":{"prompt_tokens":-3}}', None),
        (b'{"usage":{"prompt_tokens":1e99}}', None),
        (b'{"x":"\xc3\x28","usage":{"prompt_tokens":3}}', Usage(3, 0)),
    ],
)
@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.EMBEDDINGS, Endpoint.RERANK_BARE, Endpoint.SCORE])
def test_usage_in_prompt_tokens(body: bytes, usage: Usage | None, endpoint: Endpoint) -> None:
    assert usage_of(body, endpoint) == usage


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"usage":{"prompt_tokens":3}',
        b'{"id": "c", "choices": [',
        b'{"x":' + b"[" * 100_000 + b',"usage":{"prompt_tokens":3}}',
        "{}".encode("utf-16"),
    ],
    ids=["nothing", "cut", "cut early", "deep", "utf-16"],
)
def test_what_is_no_json_is_no_reply(body: bytes) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        usage_of(body, Endpoint.CHAT)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        (b'{"usage":{"input_tokens":33,"output_tokens":8}}', Usage(33, 8)),
        (
            b'{"usage":{"input_tokens":3,"output_tokens":8,"cache_creation_input_tokens":10,'
            b'"cache_read_input_tokens":20}}',
            Usage(33, 8),
        ),
        (b'{"usage":{"input_tokens":3,"output_tokens":8,"cache_read_input_tokens":null}}', Usage(3, 8)),
        (b'{"usage":{"input_tokens":3,"input_tokens_details":{"cached_tokens":2},"output_tokens":1}}', Usage(3, 1)),
        (b'{"usage":{"prompt_tokens":3}}', None),
        (b'{"usage":null}', None),
    ],
)
@pytest.mark.parametrize("endpoint", [Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_usage_in_input_tokens_with_those_of_the_cache(body: bytes, usage: Usage | None, endpoint: Endpoint) -> None:
    assert usage_of(body, endpoint) == usage


@pytest.mark.parametrize("endpoint", [endpoint for endpoint in Endpoint if not endpoint.rules.costs_tokens])
def test_a_path_that_costs_no_tokens_has_no_usage(endpoint: Endpoint) -> None:
    assert usage_of(b'{"count":3,"usage":{"prompt_tokens":3,"input_tokens":3,"seconds":4}}', endpoint) is None


def test_a_chat_is_given_up_when_it_says_abort() -> None:
    assert was_given_up(b'{"choices":[{"finish_reason":"abort"}]}', Endpoint.CHAT)
    assert not was_given_up(b'{"choices":[{"finish_reason":"stop"}]}', Endpoint.CHAT)
    assert not was_given_up(b'{"text":"\\"finish_reason\\":\\"abort\\""}', Endpoint.COMPLETIONS)


def test_a_message_is_given_up_when_it_has_no_reason_to_stop() -> None:
    assert was_given_up(b'{"content":[{"type":"text","text":"x"}]}', Endpoint.MESSAGES)
    assert was_given_up(b'{"stop_reason":null}', Endpoint.MESSAGES)
    assert was_given_up(b'{"text":"\\"stop_reason\\":\\"x\\""}', Endpoint.MESSAGES)
    assert not was_given_up(b'{"stop_reason": "end_turn"}', Endpoint.MESSAGES)


def test_what_does_not_generate_is_never_given_up() -> None:
    assert not was_given_up(b'{"input_tokens":3}', Endpoint.COUNT_TOKENS)
    assert not was_given_up(b'{"data":[]}', Endpoint.EMBEDDINGS)


@pytest.mark.parametrize("endpoint", [endpoint for endpoint in Endpoint if endpoint.rules.is_object])
def test_a_reply_is_a_json_object_whatever_it_calls_itself(endpoint: Endpoint) -> None:
    for headers in ([], JSON_TYPE, [(b"content-type", b"text/html")]):
        assert reply_type(headers, b' {"a":1}', endpoint) == b"application/json"
        for body in (b"", b"[]", b"<html>", b"ok"):
            assert reply_type(headers, body, endpoint) is None


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (b"text/plain; charset=utf-8", b"text/plain; charset=utf-8"),
        (b"Text/VTT", b"Text/VTT"),
        (b"application/x-subrip", b"application/x-subrip"),
        (b"text/html", None),
        (b"application/json", None),
        (b"application/octet-stream", None),
    ],
)
def test_a_transcript_may_be_text_of_a_known_type_and_no_other(content_type: bytes, expected: bytes | None) -> None:
    headers = [(b"content-type", content_type)]
    assert reply_type(headers, b"Hello there.", Endpoint.TRANSCRIPTIONS) == expected
    assert reply_type([], b"Hello there.", Endpoint.TRANSCRIPTIONS) is None


def test_a_transcript_may_be_json() -> None:
    assert reply_type(JSON_TYPE, b'{"text":"Hello"}', Endpoint.TRANSCRIPTIONS) == b"application/json"
    assert reply_type([], b'{"text":"Hello"}', Endpoint.TRANSCRIPTIONS) == b"application/json"
