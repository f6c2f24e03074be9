"""The one chat request that every load tool sends, as bytes of HTTP/1.1; about 1.2 kB of body."""

from __future__ import annotations

import json
from dataclasses import dataclass

PATH = "/v1/chat/completions"
STREAM_TOKENS = 64
_SYSTEM = "You are a careful assistant. Answer in one paragraph."
_USER = "The quick brown fox jumps over the lazy dog. " * 22


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send it and as whom; `model` is the name by which this contender knows the model."""

    port: int
    model: str
    key: str
    host: str = "127.0.0.1"


def body(model: str, *, is_stream: bool) -> bytes:
    fields: dict[str, object] = {
        "model": model,
        "messages": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}],
        "max_tokens": STREAM_TOKENS,
        "temperature": 0.2,
    }
    if is_stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(fields).encode()


def headers(target: Target) -> dict[str, str]:
    return {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}


def raw(target: Target, *, is_stream: bool) -> bytes:
    """Head and body, ready for a socket."""
    content = body(target.model, is_stream=is_stream)
    lines = [f"POST {PATH} HTTP/1.1", f"Host: {target.host}:{target.port}"]
    lines += [f"{name}: {value}" for name, value in headers(target).items()]
    lines += [f"Content-Length: {len(content)}", "", ""]
    return "\r\n".join(lines).encode() + content
