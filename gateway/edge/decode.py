"""Body bytes → InferenceRequest. Only fields that the gateway owns are decoded; the rest travels as it came.

The rules for each owned field are in docs/api.md. Every refusal is a BadRequest that names the element.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.domain.errors import BadRequest
from gateway.domain.request import Endpoint, InferenceRequest, Principal
from gateway.edge.messages import check_messages

# Fields by which a caller could reach past the gateway or harm others; refused, never silently dropped.
DENIED_FIELDS = frozenset(
    {
        "priority",  # the caller's class decides
        "request_id",  # ours, fresh per attempt
        "cache_salt",
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "mm_processor_kwargs",
        "chat_template",  # a program of the caller's that runs in the engine's API server
    }
)
MAX_N = 128
MAX_PROMPTS = 2048  # of one request: each is a sequence of its own in the engine

_split = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string = msgspec.json.Decoder(str)
_bool = msgspec.json.Decoder(bool)
_any = msgspec.json.Decoder()
NULL = b"null"


def decode(body: bytes, endpoint: Endpoint, principal: Principal, class_name: str, request_id: str) -> InferenceRequest:
    """Raises BadRequest; costs a few µs for an ordinary body, and time in proportion to the bytes for a large one."""
    fields: dict[str, Any] = split(body)
    for name in DENIED_FIELDS & fields.keys():
        raise BadRequest(f"'{name}' cannot be set through this gateway; remove it.", param=name)
    model = _owned(fields, "model", _string, "a string")
    if not model:
        raise BadRequest("'model' is missing: name one of the models that GET /v1/models lists.", param="model")
    stream = bool(_owned(fields, "stream", _bool, "true or false"))
    wants_usage = take_stream_options(fields, stream)
    if endpoint is Endpoint.CHAT:
        is_multimodal, prompts = check_messages(fields.get("messages")), 1
        is_countable = not is_multimodal
    else:
        is_multimodal = False
        is_countable, prompts = check_prompt(fields.get("prompt"))
    output_field, max_output = output_tokens(fields, endpoint)
    n = max(_count(fields, "n"), _count(fields, "best_of"))
    return InferenceRequest(
        id=request_id,
        endpoint=endpoint,
        principal=principal,
        class_name=class_name,
        model=model,
        stream=stream,
        wants_usage=wants_usage,
        max_output_tokens=max_output,
        output_field=output_field,
        n=n * prompts,
        body_bytes=len(body),
        is_countable=is_countable,
        is_multimodal=is_multimodal,
        fields=fields,
    )


def split(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object, each value as the bytes it came in."""
    try:
        if not body.isascii():
            body.decode()  # msgspec does not look inside the values that it skips
        return _split.decode(body)
    except UnicodeDecodeError as exc:
        raise BadRequest(f"The body is not valid UTF-8 (byte {exc.start}).") from exc
    except RecursionError as exc:
        raise BadRequest("The body is nested too deeply.") from exc
    except msgspec.ValidationError as exc:
        raise BadRequest("The body must be a JSON object.") from exc
    except msgspec.DecodeError as exc:
        raise BadRequest(f"The body is not valid JSON: {exc}.") from exc


def take_stream_options(fields: dict[str, Any], stream: bool) -> bool:
    """Whether the client asks for the usage event. Leaves `stream_options` split in `fields`, or none for null."""
    options = _owned(fields, "stream_options", _split, "an object")
    if options is None:
        fields.pop("stream_options", None)
        return False
    if not stream:
        raise BadRequest("'stream_options' goes only with 'stream': true.", param="stream_options")
    try:
        wants_usage = bool(_owned(options, "include_usage", _bool, "true or false"))
    except BadRequest as exc:
        raise BadRequest(f"stream_options: {exc.message}", param="stream_options") from exc
    if not wants_usage:
        options.pop("continuous_usage_stats", None)  # has no meaning alone; it must not gain one when we ask for usage
    fields["stream_options"] = options
    return wants_usage


def output_tokens(fields: dict[str, msgspec.Raw], endpoint: Endpoint) -> tuple[str, int | None]:
    """(field name, tokens asked for); None when the client said nothing, or null.

    1. chat knows two names; two different values are refused, since no one could tell which is meant.
    2. anything but a whole number above 0 is refused.
    3. how large it may be is the route's and the pool's matter, not decided here.
    """
    old = _positive(fields, "max_tokens")
    new = _positive(fields, "max_completion_tokens") if endpoint is Endpoint.CHAT else None
    if new is None:
        return "max_tokens", old
    if old is not None and old != new:
        raise BadRequest(
            f"'max_tokens' is {old} and 'max_completion_tokens' is {new}: send one of them.",
            param="max_completion_tokens",
        )
    return "max_completion_tokens", new


def check_prompt(raw: msgspec.Raw | None) -> tuple[bool, int]:
    """`prompt` of /v1/completions: a string, strings, token ids, or lists of token ids.

    Gives (is it one text that a worker can count, number of prompts).
    """
    if raw is None or bytes(raw) == NULL:
        raise BadRequest("'prompt' is missing.", param="prompt")
    first = bytes(raw).lstrip()[:1]
    if first == b'"':
        return True, 1
    if first != b"[":
        raise BadRequest("'prompt' must be a string or an array.", param="prompt")
    try:
        prompts = _prompts.decode(raw)
    except msgspec.ValidationError as exc:
        raise BadRequest("'prompt' must hold strings, token ids, or arrays of token ids.", param="prompt") from exc
    except RecursionError as exc:
        raise BadRequest("'prompt' is nested too deeply.", param="prompt") from exc
    if not prompts:
        raise BadRequest("'prompt' is empty; send at least one prompt.", param="prompt")
    if len({type(prompt) for prompt in prompts}) > 1:
        raise BadRequest("'prompt' mixes strings and token ids; send one kind.", param="prompt")
    if isinstance(prompts[0], int):
        return False, 1
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"'prompt' holds {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed.", param="prompt")
    return False, len(prompts)


_prompts = msgspec.json.Decoder(list[str | int | list[int]])


def _owned(fields: dict[str, msgspec.Raw], name: str, decoder: msgspec.json.Decoder[Any], expected: str) -> Any:
    raw = fields.get(name)
    if raw is None or bytes(raw) == NULL:
        return None
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise BadRequest(f"'{name}' must be {expected}.", param=name) from exc


def _positive(fields: dict[str, msgspec.Raw], name: str) -> int | None:
    raw = fields.get(name)
    if raw is None or bytes(raw) == NULL:
        return None
    text = bytes(raw)
    try:
        value = _any.decode(raw) if len(text) <= 32 else None
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        shown = text[:32].decode(errors="replace")
        raise BadRequest(f"'{name}' must be a whole number of at least 1, not {shown}.", param=name)
    return value


def _count(fields: dict[str, msgspec.Raw], name: str) -> int:
    value = _positive(fields, name) or 1
    if value > MAX_N:
        raise BadRequest(f"'{name}' is {value}; at most {MAX_N} are allowed.", param=name)
    return value
