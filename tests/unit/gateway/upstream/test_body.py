"""body_for and count_request: the client's fields as they came, ours on top, and what is asked to count a prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.bodies import FORM_TYPE, MESSAGES, transcription
from fakes.story import a_request, replica

from gateway.domain.endpoint import Endpoint
from gateway.domain.request import InferenceRequest
from gateway.upstream.body import body_for, content_type_for, count_of, count_request

A = replica("a/0@h")
WITH_PRIORITY = replica("a/0@h", has_priority=True)
DEFAULTS = {"temperature": 0.5, "top_p": 0.9}


def raw(request: InferenceRequest, **more: Any) -> bytes:
    settings: dict[str, Any] = {"defaults": {}, "output": None, "was_clamped": False, "priority": 10}
    return body_for(request, more.pop("replica", A), **settings | more)


def made(request: InferenceRequest, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(raw(request, **more))
    return body


@pytest.mark.parametrize("endpoint", [endpoint for endpoint in Endpoint if not endpoint.rules.is_form])
def test_the_served_name_goes_in_and_defaults_only_where_something_is_sampled(endpoint: Endpoint) -> None:
    body = made(a_request(endpoint=endpoint), defaults=DEFAULTS)
    assert body["model"] == "a-model"
    assert (DEFAULTS.items() <= body.items()) == bool(endpoint.rules.output_fields)
    assert "stream_options" not in body


@pytest.mark.parametrize("endpoint", [endpoint for endpoint in Endpoint if not endpoint.rules.is_form])
def test_the_classs_priority_is_written_where_the_engine_reads_it(endpoint: Endpoint) -> None:
    assert made(a_request(endpoint=endpoint), replica=WITH_PRIORITY).get("priority") == (
        10 if endpoint.rules.takes_priority else None
    )
    assert "priority" not in made(a_request(endpoint=endpoint))


def test_a_default_gives_way_to_the_client_even_to_its_null() -> None:
    assert made(a_request(temperature=None), defaults=DEFAULTS)["temperature"] is None


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_usage_is_asked_for_in_a_stream_that_tells_it_only_then(endpoint: Endpoint) -> None:
    assert made(a_request(endpoint=endpoint, stream=True))["stream_options"] == {"include_usage": True}
    own = {"include_usage": False, "x": 1}
    body = made(a_request(endpoint=endpoint, stream=True, stream_options=own))
    assert body["stream_options"] == {"include_usage": True, "x": 1}


@pytest.mark.parametrize("endpoint", [Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_streams_that_always_tell_usage_are_asked_for_nothing(endpoint: Endpoint) -> None:
    assert "stream_options" not in made(a_request(endpoint=endpoint, stream=True))


def test_the_limit_is_written_into_the_field_of_the_path() -> None:
    for endpoint, name in (
        (Endpoint.RESPONSES, "max_output_tokens"),
        (Endpoint.MESSAGES, "max_tokens"),
        (Endpoint.CHAT, "max_tokens"),
    ):
        assert made(a_request(endpoint=endpoint), output=5)[name] == 5
    both = a_request(max_tokens=50, max_completion_tokens=50)
    body = made(both, output=5, was_clamped=True)
    assert (body["max_tokens"], body["max_completion_tokens"]) == (5, 5)


def test_of_a_form_only_the_models_name_changes() -> None:
    request = a_request(endpoint=Endpoint.TRANSCRIPTIONS, language="en", stream="true")
    sent = transcription(language="en", stream="true")
    name_at = sent.index(b"chat\r\n")
    assert raw(request, defaults=DEFAULTS, replica=WITH_PRIORITY) == sent[:name_at] + b"a-model" + sent[name_at + 4 :]
    assert content_type_for(request) == FORM_TYPE
    assert content_type_for(a_request()) == b"application/json"


# --- counting -----------------------------------------------------------------------------------------------


def counted(endpoint: Endpoint, **fields: Any) -> tuple[bytes, dict[str, Any]]:
    path, body = count_request(a_request(endpoint=endpoint, **fields), A)
    return path, json.loads(body)


def test_tools_and_template_settings_are_counted_with_the_messages() -> None:
    counts = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_special_tokens": True,
    }
    expected = {"model": "a-model", "messages": MESSAGES, **counts}
    assert counted(Endpoint.CHAT, max_tokens=5, temperature=1, **counts) == (b"/tokenize", expected)


def test_a_text_is_counted_as_it_will_be_read() -> None:
    plain = {"model": "a-model", "prompt": "Once", "add_special_tokens": False}
    assert counted(Endpoint.COMPLETIONS, add_special_tokens=False, max_tokens=5) == (b"/tokenize", plain)
    embedded = {"model": "a-model", "prompt": "Hi"}
    assert counted(Endpoint.EMBEDDINGS, encoding_format="base64") == (b"/tokenize", embedded)


def test_a_response_is_counted_as_the_chat_that_the_engine_makes_of_it() -> None:
    user = {"role": "user", "content": "Hi"}
    assert counted(Endpoint.RESPONSES, instructions=None)[1] == {"model": "a-model", "messages": [user]}
    system = {"role": "system", "content": "Be short."}
    body = counted(Endpoint.RESPONSES, instructions="Be short.", max_output_tokens=5)
    assert body == (b"/tokenize", {"model": "a-model", "messages": [system, user]})


def test_a_message_is_counted_by_anthropics_own_path_with_its_tools() -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    path, body = counted(Endpoint.MESSAGES, system="Be short.", tools=tools, stream=True)
    assert path == b"/v1/messages/count_tokens"
    assert body == {"model": "a-model", "messages": MESSAGES, "system": "Be short.", "tools": tools}


def test_the_answer_of_either_path_is_read() -> None:
    assert count_of(b'{"count": 31, "max_model_len": 2048, "tokens": [1]}') == 31
    assert count_of(b'{"input_tokens": 33, "context_management": {"original_input_tokens": 33}}') == 33
    assert count_of(b"{}") is None
