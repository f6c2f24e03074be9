"""The probe list of the other proxied paths: responses, messages, tokens; and those of pooling models.

GENERATE belongs to an engine that generates, EMBED and RERANK each to a model of that kind, all served as NAME with a
key; the first has --max-model-len 2048, the others 512.
"""

from __future__ import annotations

from typing import Any

from contract.answers import MAX_LEN, NAME, TOKENS, error
from contract.answers_paths import (
    MESSAGE,
    MESSAGE_STREAM,
    RERANKED,
    RESPONSE,
    RESPONSE_STREAM,
    SCORES,
    anthropic_error,
    embeddings,
)
from contract.probes import JSON, SSE, Probe, chat, said, text
from contract.shapes import either

_NOT_FOUND = {"detail": "Not Found"}
_TOO_LONG = r"This model's maximum context length is {} tokens\. However, your prompt contains .*"
_LONG = "hello " * 3000
_PARAM = either("model", None)


def response(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "input": "Say hi.", "max_output_tokens": 3, "ignore_eos": True, "temperature": 0} | fields


def message(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 3, "temperature": 0} | said("Say hi.") | fields


def _post(name: str, path: str, body: Any, answer: Any, status: int = 200, **more: Any) -> Probe:
    expected = more.pop("headers", JSON)
    return Probe(name, "POST", path, body, status=status, answer=answer, answer_headers=expected, **more)


def _response(name: str, answer: Any = RESPONSE, status: int = 200, **fields: Any) -> Probe:
    return _post(f"responses: {name}", "/v1/responses", response(**fields), answer, status)


def _message(name: str, answer: Any = MESSAGE, status: int = 200, **fields: Any) -> Probe:
    return _post(f"messages: {name}", "/v1/messages", message(**fields), answer, status)


def _counted(name: str, answer: Any, status: int = 200, **fields: Any) -> Probe:
    body = {"model": NAME} | said("Say hi.") | fields
    return _post(f"count_tokens: {name}", "/v1/messages/count_tokens", body, answer, status)


def _bad_schema(kind: str, param: str) -> dict[str, Any]:
    return error(400, rf"1 validation error:\n  .*{kind}.*", "Bad Request", param)


_COUNT = {"input_tokens": int, "context_management": {"original_input_tokens": int}}
_UNKNOWN = rf"The model `nope` does not exist\. Valid aliases: {NAME}\."
_PARTS = [{"role": "user", "content": [{"type": "input_text", "text": "Say hi."}]}]
_BLOCKS = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi."}]

GENERATE = [
    _response("text", RESPONSE | {"instructions": None}),
    _response("with instructions", RESPONSE | {"instructions": "Be short."}, instructions="Be short."),
    _response("items", input=_PARTS),
    _response("store is ignored", store=True),
    _response("a conversation is ignored", conversation="conv_1"),
    _post("responses: stream", "/v1/responses", response(stream=True), None, headers=SSE, named=RESPONSE_STREAM),
    _response("background", error(400, "This vLLM engine does not support `store=True` .*", "invalid_request_error",
              "background"), 400, background=True),
    _response("previous response", error(404, "Response with id 'resp_x' not found.", "invalid_request_error",
              "response_id"), 404, previous_response_id="resp_x"),
    _response("unknown model", error(404, _UNKNOWN, "NotFoundError", "model"), 404, model="nope"),
    _post("responses: no input", "/v1/responses", {"model": NAME}, _bad_schema("missing", "body.input"), 400),
    _response("too long", error(400, _TOO_LONG.format(MAX_LEN), param="input_tokens"), 400, input=_LONG),
    _response("limit over the window", error(400, "max_output_tokens=100000 cannot be greater than .*",
              param="max_output_tokens"), 400, max_output_tokens=100_000),
    _response("limit 0", error(400, "max_tokens must be at least 1, got 0.*", param="max_tokens"), 400,
              max_output_tokens=0),
    _message("short"),
    _message("with a system text", system="Be short."),
    _message("blocks", **said(_BLOCKS), system=[{"type": "text", "text": "Be short."}]),
    _message("unknown fields are ignored", frobnicate=1),
    _post("messages: stream", "/v1/messages", message(stream=True), None, headers=SSE, named=MESSAGE_STREAM),
    _post("messages: no limit", "/v1/messages", {"model": NAME} | said("Hi"), _bad_schema("missing", "body.max_tokens"),
          400),
    _post("messages: no model", "/v1/messages", {"max_tokens": 3} | said("Hi"), _bad_schema("missing", "body.model"),
          400),
    _message("limit 0", _bad_schema("value_error", "body.max_tokens"), 400, max_tokens=0),
    _message("unknown model", anthropic_error(_UNKNOWN, "NotFoundError"), 404, model="nope"),
    _message("limit over the window", anthropic_error("max_completion_tokens=100000 cannot be greater than .*"), 400,
             max_tokens=100_000),
    _message("too long", anthropic_error(_TOO_LONG.format(MAX_LEN)), 400, **said(_LONG)),
    _counted("messages", _COUNT),
    _counted("with a system text", _COUNT, system="Be short."),
    _counted("unknown model", anthropic_error(_UNKNOWN, "NotFoundError"), 404, model="nope"),
    _counted("too long", anthropic_error(_TOO_LONG.format(MAX_LEN)), 400, **said(_LONG)),
    _post("detokenize", "/detokenize", {"model": NAME, "tokens": [5, 6]}, {"prompt": str}, with_key=False),
    _post("detokenize: none", "/detokenize", {"model": NAME, "tokens": []}, {"prompt": ""}),
    _post("detokenize: no list", "/detokenize", {"tokens": "x"}, _bad_schema("list_type", "body.tokens"), 400),
    _post("detokenize: nothing", "/detokenize", {}, _bad_schema("missing", "body.tokens"), 400),
    *(
        _post(f"not for a model that generates: {path}", path, {"model": NAME, "input": "x"}, _NOT_FOUND, 404)
        for path in ("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score",
                     "/v1/audio/transcriptions")
    ),
]  # fmt: skip

_RANK = {"model": NAME, "query": "capital of France", "documents": ["Paris", "Berlin", "x"]}
_SCORED = {"model": NAME, "text_1": "capital of France", "text_2": ["Paris", "Berlin"]}
_ALL_POOLING = [
    *(_post(f"rerank: {path}", path, _RANK, RERANKED) for path in ("/v1/rerank", "/v2/rerank")),
    _post("rerank: /rerank, without a key", "/rerank", _RANK, RERANKED, with_key=False),
    _post("rerank: top_n", "/v1/rerank", _RANK | {"top_n": 1}, RERANKED),
    _post("rerank: no documents", "/v1/rerank", _RANK | {"documents": []},
          error(400, "At least one text_pair element must be given"), 400),
    _post("rerank: no query", "/v1/rerank", {"model": NAME, "documents": ["a"]}, _bad_schema("missing", "body.query"),
          400),
    _post("rerank: too long", "/v1/rerank", _RANK | {"documents": [_LONG]},
          error(400, _TOO_LONG.format(512), param="input_tokens"), 400),
    _post("score: /v1/score", "/v1/score", _SCORED, SCORES),
    _post("score: /score, without a key", "/score", _SCORED, SCORES, with_key=False),
    _post("score: other names", "/score", {"model": NAME, "queries": "q", "documents": ["a", "b"]}, SCORES),
    _post("score: pairs", "/v1/score", _SCORED | {"text_1": ["a", "b"]}, SCORES),
    _post("score: odd numbers", "/v1/score", _SCORED | {"text_1": ["a", "b", "c"]},
          error(400, "Input lengths must be either 1:1, 1:N or N:N"), 400),
    _post("tokenize: prompt", "/tokenize", {"model": NAME, "prompt": "Hello"}, TOKENS | {"max_model_len": 512}),
    _post("not for a pooling model: chat", "/v1/chat/completions", chat(), _NOT_FOUND, 404),
    _post("not for a pooling model: completions", "/v1/completions", text(), _NOT_FOUND, 404),
    _post("not for a pooling model: responses", "/v1/responses", response(), _NOT_FOUND, 404),
    _post("not for a pooling model: messages", "/v1/messages", message(), _NOT_FOUND, 404),
]  # fmt: skip


def _embedding(name: str, answer: Any, status: int = 200, **fields: Any) -> Probe:
    return _post(f"embeddings: {name}", "/v1/embeddings", {"model": NAME, "input": "hello"} | fields, answer, status)


EMBED = [
    _embedding("one text", embeddings([float])),
    _embedding("two texts", embeddings([float]), input=["hello", "world wide"]),
    _embedding("base64", embeddings(str), encoding_format="base64"),
    _embedding("token ids", embeddings(str), input=[1, 2, 3], encoding_format="base64"),
    _embedding("lists of token ids", embeddings(str), input=[[1, 2, 3], [4, 5]], encoding_format="base64"),
    _embedding("empty text", embeddings([float]), input=""),
    _embedding("cut to fit", embeddings(str), input=_LONG, truncate_prompt_tokens=100, encoding_format="base64"),
    _embedding("no texts", error(400, "You must pass at least one prompt"), 400, input=[]),
    _embedding("dimensions", error(400, f"Model '{NAME}' does not support Matryoshka embeddings.*"), 400, dimensions=8),
    _embedding("too long", error(400, _TOO_LONG.format(512), param="input_tokens"), 400, input=_LONG),
    _embedding(
        "unknown model", error(404, r"The model `nope` does not exist\..*", "NotFoundError", _PARAM), 404, model="nope"
    ),
    *_ALL_POOLING,
]
RERANK = [
    *_ALL_POOLING,
    _embedding("not for a model that ranks", _NOT_FOUND, 404),
]
