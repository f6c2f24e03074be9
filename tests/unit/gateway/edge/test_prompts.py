"""PROMPT_CHECKS: what is learned of each path's prompt, and which ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.story import a_request

from gateway.domain.endpoint import Endpoint, Prompt
from gateway.domain.errors import BadRequest
from gateway.domain.request import InferenceRequest
from gateway.edge.prompts import MAX_PROMPTS, PROMPT_CHECKS

RANKS = [Endpoint.RERANK, Endpoint.RERANK_BARE, Endpoint.RERANK_V2]
SCORES = [Endpoint.SCORE, Endpoint.SCORE_BARE]


def refused(endpoint: Endpoint, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        a_request({"model": "chat", **fields}, endpoint=endpoint)
    return caught.value


def facts(request: InferenceRequest) -> tuple[bool, bool, int]:
    return request.is_countable, request.is_multimodal, request.prompts


def test_each_kind_of_prompt_has_its_check_but_for_a_file_which_is_no_json() -> None:
    assert set(PROMPT_CHECKS) == {endpoint.rules for endpoint in Endpoint if not endpoint.rules.is_form}
    assert all((endpoint.rules.prompt is Prompt.MEDIA) == endpoint.rules.is_form for endpoint in Endpoint)


# --- embeddings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "countable", "prompts", "ids", "longest"),
    [
        ("hello", True, 1, None, 0),
        ("", True, 1, None, 0),
        (["hello", "world"], False, 2, None, 0),
        ([1, 2, 3], False, 1, 3, 3),
        ([[1, 2, 3], [4, 5]], False, 2, 5, 3),
        ([[]], False, 1, 0, 0),
    ],
)
def test_token_lists_are_counted_as_tokens(
    given: Any, countable: bool, prompts: int, ids: int | None, longest: int
) -> None:
    request = a_request(endpoint=Endpoint.EMBEDDINGS, input=given)
    assert facts(request) == (countable, False, prompts)
    assert (request.prompt_ids, request.longest_ids) == (ids, longest)


@pytest.mark.parametrize("given", [None, [], {}, 5, True, ["a", 1], [[1], "a"], [[[1]]], [[{"role": "user"}]]])
def test_any_other_input_is_refused(given: Any) -> None:
    assert refused(Endpoint.EMBEDDINGS, input=given).param == "input"


def test_one_request_cannot_be_a_million_texts() -> None:
    assert a_request(endpoint=Endpoint.EMBEDDINGS, input=["a"] * MAX_PROMPTS).prompts == MAX_PROMPTS
    assert str(MAX_PROMPTS) in refused(Endpoint.EMBEDDINGS, input=["a"] * (MAX_PROMPTS + 1)).message


def test_a_chat_can_be_embedded_but_its_template_is_not_that_of_tokenize() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    for name in ("messages", "input"):
        assert facts(a_request({"model": "m", name: chat}, endpoint=Endpoint.EMBEDDINGS)) == (False, False, 1)
        assert facts(a_request({"model": "m", name: image}, endpoint=Endpoint.EMBEDDINGS)) == (False, True, 1)
    assert refused(Endpoint.EMBEDDINGS, input=[{"role": "wizard", "content": "x"}]).param == "input[0].role"


def test_a_text_that_the_engine_will_cut_is_not_measured_against_the_window() -> None:
    for given in ("hello", [1, 2, 3], [[1, 2], [3]]):
        request = a_request(endpoint=Endpoint.EMBEDDINGS, input=given, truncate_prompt_tokens=10)
        assert not request.is_countable and request.prompt_ids is None


# --- rerank and score ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", RANKS)
def test_a_query_is_read_once_for_each_document(endpoint: Endpoint) -> None:
    request = a_request({"model": "m", "query": "q" * 98, "documents": ["a", "b", "c"]}, endpoint=endpoint)
    assert facts(request) == (False, False, 3)
    assert request.repeated_bytes == 200
    assert a_request({"model": "m", "query": "q", "documents": "a"}, endpoint=endpoint).repeated_bytes == 0


@pytest.mark.parametrize("endpoint", SCORES)
@pytest.mark.parametrize(
    ("one", "many"), [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_a_score_has_four_pairs_of_names(endpoint: Endpoint, one: str, many: str) -> None:
    request = a_request({"model": "m", one: "q", many: ["a", "b"]}, endpoint=endpoint)
    assert (request.prompts, request.repeated_bytes) == (2, 3)
    pairs = a_request({"model": "m", one: ["q", "r"], many: ["a", "b"]}, endpoint=endpoint)
    assert (pairs.prompts, pairs.repeated_bytes) == (2, 0)


def test_a_pair_of_which_one_half_is_missing_is_refused() -> None:
    assert refused(Endpoint.RERANK, query="q").param == "query"
    assert "documents" in refused(Endpoint.RERANK, query="q").message
    assert refused(Endpoint.SCORE, text_1="q", documents=["a"]).param == "text_1"


def test_too_many_documents_are_refused_and_images_among_them_make_the_length_unknown() -> None:
    assert str(MAX_PROMPTS) in refused(Endpoint.RERANK, query="q", documents=["a"] * (MAX_PROMPTS + 1)).message
    image = {"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    assert a_request({"model": "m", "query": "q", "documents": [image]}, endpoint=Endpoint.RERANK).is_multimodal


# --- responses ----------------------------------------------------------------------------------------------


def test_a_response_of_plain_text_can_be_counted_and_others_cannot() -> None:
    def of(**fields: Any) -> tuple[bool, bool, int]:
        return facts(a_request({"model": "m", **fields}, endpoint=Endpoint.RESPONSES))

    assert of(input="Hi") == of(input="Hi", instructions="Be short.") == (True, False, 1)
    assert of(input="Hi", tools=[]) == of(input="Hi", reasoning={"effort": "low"}) == (False, False, 1)
    text = {"role": "user", "content": [{"type": "input_text", "text": 'say "input_image"'}]}
    assert of(input=[text]) == (False, False, 1)
    assert of(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]) == (False, True, 1)


@pytest.mark.parametrize("given", [None, [], 5, {}, ["Hi"], [[1]], [None]])
def test_any_other_input_of_a_response_is_refused(given: Any) -> None:
    assert refused(Endpoint.RESPONSES, input=given).param == "input"


# --- tokens -------------------------------------------------------------------------------------------------


def test_tokenize_takes_a_chat_or_one_text() -> None:
    assert a_request({"model": "m", "messages": [{"role": "user", "content": "x"}]}, endpoint=Endpoint.TOKENIZE)
    assert a_request({"model": "m", "prompt": ""}, endpoint=Endpoint.TOKENIZE)
    for prompt in (None, ["a"], [1], 5):
        assert refused(Endpoint.TOKENIZE, prompt=prompt).param == "prompt"
    assert refused(Endpoint.TOKENIZE, messages=[]).param == "messages"


def test_detokenize_takes_token_ids() -> None:
    assert a_request({"model": "m", "tokens": []}, endpoint=Endpoint.DETOKENIZE).prompt_ids == 0
    for tokens in (None, "x", ["1"], [1.5], [[1]]):
        assert refused(Endpoint.DETOKENIZE, tokens=tokens).param == "tokens"


# --- Anthropic's messages -----------------------------------------------------------------------------------


def message(content: Any, role: str = "user", **more: Any) -> InferenceRequest:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": role, "content": content}], **more}
    return a_request(body, endpoint=Endpoint.MESSAGES)


def test_blocks_of_text_and_tools_can_be_counted() -> None:
    tool = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": 'an "image"'}]}
    for content in ("Hi", [{"type": "text", "text": "Hi"}], [tool], [{"type": "thinking", "thinking": "hm"}]):
        for system in (None, "Be short.", [{"type": "text", "text": "Be short."}]):
            assert facts(message(content, system=system)) == (True, False, 1)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "document", "source": {}},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]},
    ],
)
def test_images_and_documents_make_the_length_unknown_in_a_tools_answer_too(block: dict[str, Any]) -> None:
    assert facts(message([block])) == (False, True, 1)


@pytest.mark.parametrize(
    ("content", "role", "param"),
    [
        ("Hi", "wizard", "messages[0].role"),
        ("Hi", "developer", "messages[0].role"),
        ([{"type": "text"}], "user", "messages[0].content[0].text"),
        ([{}], "user", "messages"),
        (None, "user", "messages"),
        (5, "user", "messages"),
    ],
)
def test_a_fault_in_a_message_is_named_by_its_place_and_never_repeats_the_text(
    content: Any, role: str, param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        message(content, role)
    assert caught.value.param == param
    assert "messages" in caught.value.message and "Hi" not in caught.value.message


def test_a_system_text_of_another_kind_is_refused() -> None:
    for system in (5, [], [{}], [5], {}):
        with pytest.raises(BadRequest) as caught:
            message("Hi", system=system)
        assert "system" in json.dumps([caught.value.param, caught.value.message])
