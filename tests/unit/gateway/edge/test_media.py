"""media_in, as decoding uses it: which parts are no text, on each path, and how much of the body they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.story import a_request

from gateway.domain.endpoint import Endpoint
from gateway.domain.media import Media

TEXT = {"type": "text", "text": "What is this?"}
URL = {"url": "data:image/png;base64," + "A" * 5000}
IMAGE = {"type": "image_url", "image_url": URL}
IMAGE_OF_A_RESPONSE = {"type": "input_image", "image_url": URL["url"]}
IMAGE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 5000}}
RECORDING = {"type": "input_audio", "input_audio": {"data": "A" * 5000, "format": "wav"}}
FILM = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
NEW = {"type": "smell", "smell": "A" * 100}
RESULT_BLOCK = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}, IMAGE_BLOCK]}
DOCUMENT = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "A" * 100}}


def size(part: Any) -> int:
    return len(json.dumps(part))


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hi"}, {"role": "user", "content": list(content)}]


def media(endpoint: Endpoint, **fields: Any) -> Media | None:
    return a_request({"model": "chat", "max_tokens": 5, **fields}, endpoint=endpoint).media


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.TOKENIZE, Endpoint.EMBEDDINGS])
def test_each_part_of_a_chat_counts_by_its_kind(endpoint: Endpoint) -> None:
    assert media(endpoint, messages=user(TEXT)) is None
    assert media(endpoint, messages=user(TEXT, IMAGE, IMAGE)) == Media(images=2, body_bytes=2 * size(IMAGE))
    assert media(endpoint, messages=user(RECORDING)) == Media(audios=1, body_bytes=size(RECORDING))
    assert media(endpoint, messages=user(FILM)) == Media(videos=1, body_bytes=size(FILM))
    mixed = Media(images=1, audios=1, videos=1, body_bytes=size(IMAGE) + size(RECORDING) + size(FILM))
    assert media(endpoint, messages=[*user(IMAGE, RECORDING), *user(FILM, TEXT)]) == mixed


def test_a_part_of_an_unknown_kind_keeps_its_bytes() -> None:
    assert media(Endpoint.CHAT, messages=user(NEW)) == Media(body_bytes=size(NEW), unknown_bytes=size(NEW))
    embeds = {"type": "image_embeds", "image_embeds": "A" * 100}
    assert media(Endpoint.CHAT, messages=user(embeds)) == Media(body_bytes=size(embeds), unknown_bytes=size(embeds))


@pytest.mark.parametrize("kind", ["refusal", "thinking"])
def test_what_engines_read_as_text_is_text(kind: str) -> None:
    assert media(Endpoint.CHAT, messages=user({"type": kind, kind: "x" * 500})) == Media()


def test_images_among_a_responses_items_and_in_what_a_function_gave_back() -> None:
    items = user({"type": "input_text", "text": "?"}, IMAGE_OF_A_RESPONSE)
    assert media(Endpoint.RESPONSES, input=items) == Media(images=1, body_bytes=size(IMAGE_OF_A_RESPONSE))
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [IMAGE_OF_A_RESPONSE]}
    assert media(Endpoint.RESPONSES, input=[call, output]) == Media(images=1, body_bytes=size(IMAGE_OF_A_RESPONSE))
    file = {"type": "input_file", "file_data": "A" * 100}
    assert media(Endpoint.RESPONSES, input=user(file)) == Media(body_bytes=size(file), unknown_bytes=size(file))
    assert media(Endpoint.RESPONSES, input=user({"type": "input_text", "text": "?"})) is None


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.COUNT_TOKENS])
def test_images_in_anthropics_shape_and_in_what_a_tool_gave_back(endpoint: Endpoint) -> None:
    assert media(endpoint, messages=user(TEXT)) is None
    assert media(endpoint, messages=user(TEXT, IMAGE_BLOCK)) == Media(images=1, body_bytes=size(IMAGE_BLOCK))
    assert media(endpoint, messages=user(RESULT_BLOCK)) == Media(images=1, body_bytes=size(IMAGE_BLOCK))
    unknown = Media(body_bytes=size(DOCUMENT), unknown_bytes=size(DOCUMENT))
    assert media(endpoint, messages=user(DOCUMENT)) == unknown
    assert media(endpoint, messages=user("x")[:1], system=[TEXT, DOCUMENT]) == unknown


def test_images_among_documents() -> None:
    assert media(Endpoint.RERANK, query="q", documents=["a", {"content": [IMAGE, TEXT]}]) == Media(
        images=1, body_bytes=size(IMAGE)
    )
    assert media(Endpoint.SCORE, text_1={"content": [IMAGE]}, text_2={"content": [IMAGE]}) == Media(
        images=2, body_bytes=2 * size(IMAGE)
    )


def test_text_that_speaks_of_images_has_none() -> None:
    assert media(Endpoint.RESPONSES, input=user({"type": "input_text", "text": "image_url"})) == Media()


@pytest.mark.parametrize("odd", [5, None, [[IMAGE]], {"content": {"content": [[[[[[IMAGE]]]]]]}}])
def test_odd_shapes_are_text(odd: Any) -> None:
    assert media(Endpoint.RERANK, query="q", documents=[odd, "image_url"]) == Media()
