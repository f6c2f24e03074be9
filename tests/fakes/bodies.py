"""The smallest valid body of every proxied path, for tests that run over all of them."""

from __future__ import annotations

import json
from typing import Any

from gateway.domain.endpoint import Endpoint

MESSAGES = [{"role": "user", "content": "Hi"}]
BOUNDARY = "boundary-of-the-test"
FORM_TYPE = f"multipart/form-data; boundary={BOUNDARY}".encode()
SOUND = b"RIFF\x00\x01\r\n--\xff"  # bytes that are no text, nearly a boundary

_PAIR: dict[str, Any] = {"query": "capital of France", "documents": ["Paris", "Berlin"]}
_SCORED: dict[str, Any] = {"text_1": "capital of France", "text_2": ["Paris", "Berlin"]}
FIELDS: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"messages": MESSAGES},
    Endpoint.COMPLETIONS: {"prompt": "Once"},
    Endpoint.RESPONSES: {"input": "Hi"},
    Endpoint.MESSAGES: {"messages": MESSAGES, "max_tokens": 8},
    Endpoint.COUNT_TOKENS: {"messages": MESSAGES},
    Endpoint.EMBEDDINGS: {"input": "Hi"},
    Endpoint.RERANK: _PAIR,
    Endpoint.RERANK_BARE: _PAIR,
    Endpoint.RERANK_V2: _PAIR,
    Endpoint.SCORE: _SCORED,
    Endpoint.SCORE_BARE: _SCORED,
    Endpoint.TOKENIZE: {"prompt": "Once"},
    Endpoint.DETOKENIZE: {"tokens": [1, 2]},
}
JSON_PATHS = sorted(FIELDS)
CHAT_LIKE = [Endpoint.CHAT, Endpoint.COMPLETIONS]


def json_fields(endpoint: Endpoint, model: str = "chat", **more: Any) -> dict[str, Any]:
    return {"model": model, **FIELDS[endpoint], **more}


def part(name: str, value: bytes | str, filename: str | None = None) -> bytes:
    """One part of a form, from its boundary to its last byte."""
    file = f'; filename="{filename}"\r\nContent-Type: audio/wav' if filename else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + (value.encode() if isinstance(value, str) else value) + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def transcription(model: str = "chat", **fields: str) -> bytes:
    """A form with a file and a model, and more text fields after them."""
    more = [part(name, value) for name, value in fields.items()]
    return form(part("file", SOUND, "a.wav"), part("model", model), *more)


def any_body(endpoint: Endpoint, model: str = "chat") -> tuple[bytes, bytes]:
    """(body, content type) of a valid request."""
    if endpoint.rules.is_form:
        return transcription(model), FORM_TYPE
    return json.dumps(json_fields(endpoint, model)).encode(), b"application/json"
