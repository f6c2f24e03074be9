"""What our gateway relies on in vLLM's HTTP interface, as one list of requests and what must hold of their answers.

The same list runs against `workers.fake_engine` and against the real vLLM, so that the fake cannot drift from it. The
engine serves one model as NAME with a key, --max-model-len 2048 and --scheduling-policy priority.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from contract.answers import CHAT, MAX_LEN, MODEL, NAME, TEXT, TOKENS, Stream, chat_stream, error, text_stream
from contract.answers_paths import Named

JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}
_NOT_FOUND = {"detail": "Not Found"}
_UNAUTHORIZED = {"error": "Unauthorized"}
_USAGE = {"stream_options": {"include_usage": True}}
_USAGE_IN_EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True)
class Probe:
    """A request and what must hold of its answer. `body` of bytes is sent as it is, anything else as JSON."""

    name: str
    method: str
    path: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    with_key: bool = True
    status: int = 200
    answer: Any = None  # shape of the JSON; bytes: the body exactly
    answer_headers: dict[str, Any] = field(default_factory=lambda: JSON)
    stream: Stream | None = None
    named: Named | None = None

    @property
    def content(self) -> bytes | None:
        return self.body if isinstance(self.body, bytes | None) else json.dumps(self.body).encode()


def chat(**fields: Any) -> dict[str, Any]:
    """Body of a short chat."""
    return {"model": NAME, "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 3} | fields


def text(**fields: Any) -> dict[str, Any]:
    """Body of a short completion that always has three tokens."""
    return {"model": NAME, "prompt": "Once upon a time", "max_tokens": 3, "ignore_eos": True} | fields


def said(*content: Any) -> dict[str, Any]:
    """`messages` of one user message per content."""
    return {"messages": [{"role": "user", "content": one} for one in content]}


def _get(name: str, path: str, answer: Any, status: int = 200, **more: Any) -> Probe:
    return Probe(name, "GET", path, status=status, answer=answer, **more)


def _chat(name: str, answer: Any = CHAT, **fields: Any) -> Probe:
    return Probe(f"chat: {name}", "POST", "/v1/chat/completions", chat(**fields), answer=answer)


def _text(name: str, answer: Any = TEXT, **fields: Any) -> Probe:
    return Probe(f"completions: {name}", "POST", "/v1/completions", text(**fields), answer=answer)


def _streamed(name: str, stream: Stream, path: str, body: dict[str, Any]) -> Probe:
    body = {"stream": True, "ignore_eos": True, **body}
    return Probe(f"stream: {name}", "POST", path, body, answer_headers=SSE, stream=stream)


def _refused(
    name: str, body: Any, message: str, param: Any = None, type_: str = "BadRequestError", **more: Any
) -> Probe:
    status, path = more.pop("status", 400), more.pop("path", "/v1/chat/completions")
    answer = error(status, message, type_, param)
    return Probe(f"refused: {name}", "POST", path, body, status=status, answer=answer, **more)


def _bad_schema(name: str, body: Any, kind: str, param: Any, **more: Any) -> Probe:
    return _refused(name, body, rf"\d+ validation errors?:\n  .*{kind}.*", param, "Bad Request", **more)


def _unknown_model(path: str, body: dict[str, Any]) -> Probe:
    message = rf"The model `nope` does not exist\. Valid aliases: {NAME}\."
    name = f"unknown model, {path}{', stream' if body.get('stream') else ''}"
    return _refused(name, body | {"model": "nope"}, message, "model", "NotFoundError", path=path, status=404)


_ANSWERED = [
    _get("health is an empty 200", "/health", b"", answer_headers={"content-length": "0"}),
    _get("version", "/version", {"version": re.compile(r"0\.\d+\..*")}),
    _get("load is 0 without its flag", "/load", {"server_load": 0}),
    _get("metrics are open", "/metrics", None, with_key=False,
         answer_headers={"content-type": re.compile(r"text/plain; version=.*")}),
    _get("models", "/v1/models", {"object": "list", "data": [MODEL]}),
    _get("one model has no path", f"/v1/models/{NAME}", _NOT_FOUND, 404),
    _get("unknown path", "/nope", _NOT_FOUND, 404),
    _get("wrong method", "/v1/chat/completions", {"detail": "Method Not Allowed"}, 405,
         answer_headers={"allow": "POST"}),
    Probe("HEAD of health is refused", "HEAD", "/health", status=405, answer=b"", answer_headers={"allow": "GET"}),
    _chat("short"),
    _chat("max_completion_tokens", max_completion_tokens=2),
    _chat("unknown fields are ignored", frobnicate={"a": [1]}),
    _chat("no model means the served one", model=None),
    _chat("empty model means the served one", model=""),
    _chat("null means absent", max_completion_tokens=None, temperature=None, n=None, stream=None, stream_options=None),
    _chat("limit as a string of digits", max_tokens="3"),
    _chat("content parts", **said([{"type": "text", "text": "Say"}, {"type": "text", "text": "hi"}])),
    _chat("unknown role", messages=[{"role": "wizard", "content": "x"}]),
    _chat("no content", messages=[{"role": "user"}]),
    _chat("n = 2 with a priority", n=2, priority=5),
    Probe("chat: charset in the content type", "POST", "/v1/chat/completions", chat(), answer=CHAT,
          headers={"content-type": "application/json; charset=utf-8"}),
    Probe("chat: id from x-request-id", "POST", "/v1/chat/completions", chat(),
          headers=JSON | {"x-request-id": "r-1"}, answer=CHAT | {"id": "chatcmpl-r-1"}),
    Probe("invocations is chat, without a key", "POST", "/invocations", chat(), with_key=False, answer=CHAT),
    _text("short"),
    _text("several prompts", prompt=["a", "b"]),
    _text("token ids", prompt=[1, 2, 3]),
    _text("output is cut to the window", prompt=[5] * (MAX_LEN - 8), max_tokens=MAX_LEN,
          answer=TEXT | {"usage": TEXT["usage"] | {"prompt_tokens": MAX_LEN - 8, "completion_tokens": 8}}),
    _streamed("chat", chat_stream(), "/v1/chat/completions", chat()),
    _streamed("chat with usage", chat_stream(usage=True), "/v1/chat/completions", chat(**_USAGE)),
    _streamed("chat with usage in each event", chat_stream(usage=True, each=True), "/v1/chat/completions",
              chat(**_USAGE_IN_EACH)),
    _streamed("chat, n = 2 with a priority", chat_stream(usage=True, choices=2), "/v1/chat/completions",
              chat(n=2, priority=5, **_USAGE)),
    _streamed("completions", text_stream(), "/v1/completions", text()),
    _streamed("completions with usage", text_stream(usage=True), "/v1/completions", text(**_USAGE)),
    _streamed("completions of two prompts", text_stream(usage=True, choices=2), "/v1/completions",
              text(prompt=["a", "b"], **_USAGE)),
    Probe("tokenize: prompt, without a key", "POST", "/tokenize", {"model": NAME, "prompt": "Hello world"},
          with_key=False, answer=TOKENS),
    Probe("tokenize: messages", "POST", "/tokenize", {"model": NAME, **said("Say hi.")}, answer=TOKENS),
    Probe("tokenize: empty prompt", "POST", "/tokenize", {"model": NAME, "prompt": ""},
          answer=TOKENS | {"count": 0, "tokens": []}),
]  # fmt: skip

_WITHOUT_KEY = [
    *(
        Probe(f"no key: {method} {path}", method, path, chat(), with_key=False, status=401, answer=_UNAUTHORIZED)
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/nope"))
    ),
    _get("x-api-key is not read", "/v1/models", _UNAUTHORIZED, 401, with_key=False,
         headers={"x-api-key": "engine-key"}),
    _get("scheme in any case", "/v1/models", dict, with_key=False, headers={"authorization": "BEARER engine-key"}),
    _get("two blanks before the key", "/v1/models", _UNAUTHORIZED, 401, with_key=False,
         headers={"authorization": "Bearer  engine-key"}),
]  # fmt: skip

_TOO_LONG = rf"This model's maximum context length is {MAX_LEN} tokens\. However, your prompt contains .*"
_TOO_MANY = rf"max_tokens=100000 cannot be greater than max_model_len={MAX_LEN}\. .*"
_UNSUPPORTED = "Unsupported Media Type: Only 'application/json' is allowed"
_IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

_REFUSED = [
    _unknown_model("/v1/chat/completions", chat()),
    _unknown_model("/v1/chat/completions", chat(stream=True)),
    _unknown_model("/v1/completions", text()),
    _unknown_model("/tokenize", {"prompt": "x"}),
    _refused("prompt over the window", chat(**said("hello " * 3000)), _TOO_LONG, "input_tokens"),
    _refused("prompt over the window, stream", chat(**said("hello " * 3000), stream=True), _TOO_LONG, "input_tokens"),
    _refused("prompt over the window, completions", text(prompt="hello " * 3000), _TOO_LONG, "input_tokens",
             path="/v1/completions"),
    _refused("max_tokens over the window", chat(max_tokens=100_000), _TOO_MANY, "max_tokens"),
    _refused("max_tokens over the window, completions", text(max_tokens=100_000), _TOO_MANY, "max_tokens",
             path="/v1/completions"),
    _refused("max_tokens 0", chat(max_tokens=0), "max_tokens must be at least 1, got 0.*", "max_tokens"),
    _refused("max_tokens -1", chat(max_tokens=-1), "max_tokens must be at least 1, got -1.*", "max_tokens"),
    _refused("stream_options without stream", chat(**_USAGE), "Stream options can only be defined when .*",
             "stream_options"),
    _refused("temperature below 0", chat(temperature=-1), "temperature must be non-negative.*", "temperature"),
    _refused("temperature above 2", chat(temperature=3), "temperature must be in .*, got 3.0.*", "temperature"),
    _refused("top_p above 1", chat(top_p=2), "top_p must be in .*", "top_p"),
    _refused("n = 0", chat(n=0), "n must be at least 1, got 0."),
    _refused("empty messages", chat(messages=[]), "Cannot apply chat template to an empty conversation.*"),
    _refused("image for a text model", chat(**said(_IMAGE)), ".* is not a multimodal model"),
    _refused("tools without a parser", chat(tools=[_TOOL]), '"auto" tool choice requires .*'),
    _refused("empty prompt", text(prompt=""), "Either prompt or prompt_embeds must be provided.*", "prompt",
             path="/v1/completions"),
    _refused("lone surrogate", b'{"messages":[{"role":"user","content":"\\ud800"}]}', "TextEncodeInput must be .*"),
    _bad_schema("max_tokens in words", chat(max_tokens="ten"), "int_parsing", "body.max_tokens"),
    _bad_schema("max_tokens with a fraction", chat(max_tokens=1.5), "int_from_float", "body.max_tokens"),
    _refused("n over the engine's own limit", chat(n=16_385), "n must be at most 16384, got 16385.*"),
    _bad_schema("model of a wrong type", chat(model=7), "string_type", "body.model"),
    _bad_schema("stream of a wrong type", chat(stream=7), "bool_parsing", "body.stream"),
    _bad_schema("temperature in words", chat(temperature="hot"), "float_parsing", "body.temperature"),
    _bad_schema("priority in words", chat(priority="a"), "int_parsing", "body.priority"),
    _bad_schema("messages of a wrong type", chat(messages="x"), "list_type", "body.messages"),
    _bad_schema("no messages", {"model": NAME}, "missing", "body.messages"),
    _bad_schema("content of a wrong type", chat(**said(5)), "string_type", str),
    _bad_schema("broken JSON", b'{"model": "tiny", ', "json_invalid", re.compile(r"body\.\d+")),
    _bad_schema("JSON that is no object", [1, 2], "model_attributes_type", "body"),
    _bad_schema("empty body", b"", "missing", "body"),
    _bad_schema("wrong content type", chat(), _UNSUPPORTED, None, headers={"content-type": "text/plain"}),
    _bad_schema("no content type", chat(), _UNSUPPORTED, None, headers={}),
    Probe("refused: deep nesting", "POST", "/v1/chat/completions", b"[" * 20_000, status=400,
          answer={"detail": "There was an error parsing the body"}),
    Probe("refused: bad UTF-8", "POST", "/v1/chat/completions", b'{"messages":[{"role":"user","content":"\xc3\x28"}]}',
          status=400, answer={"detail": "There was an error parsing the body"}),
]  # fmt: skip

PROBES = _ANSWERED + _WITHOUT_KEY + _REFUSED
