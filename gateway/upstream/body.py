"""The body for one replica: the client's own fields as they came, ours on top. Pure; called once per attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.domain.endpoint import Prompt
from gateway.domain.replica import ReplicaRecord
from gateway.domain.request import InferenceRequest

JSON = b"application/json"
_USAGE_ASKED = {"include_usage": True}


def body_for(
    request: InferenceRequest,
    replica: ReplicaRecord,
    *,
    defaults: Mapping[str, Any],
    output: int | None,
    was_clamped: bool,
    priority: int,
) -> bytes:
    """`defaults` are the route's; `output` is the limit to write, None leaves the client's; `priority` its class's.

    Of a form nothing is changed but the model's name, where it stands.
    """
    if (form := request.form) is not None:
        served = replica.served_name.encode()
        return b"".join((form.body[: form.model_begin], served, form.body[form.model_end :]))
    rules = request.endpoint.rules
    fields: dict[str, Any] = dict(request.fields)
    if rules.takes_defaults:
        for name, value in defaults.items():
            fields.setdefault(name, value)
    fields["model"] = replica.served_name
    if output is not None:
        fields[request.output_field] = output
        if was_clamped:
            for name in rules.output_fields:
                if name in fields:
                    fields[name] = output  # both names may have come, with the same value
    if request.stream and rules.has_stream_options:
        # the client's own options with include_usage on: we always need the count
        own = request.fields.get("stream_options")
        fields["stream_options"] = _USAGE_ASKED if own is None else {**own, **_USAGE_ASKED}
    if replica.has_priority and rules.takes_priority:
        fields["priority"] = priority
    return msgspec.json.encode(fields)


def content_type_for(request: InferenceRequest) -> bytes:
    """The request's own for a form, since it names the boundary; else JSON's."""
    return JSON if request.form is None else request.form.content_type


_TEMPLATE_FIELDS = (
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)
_BLOCK_FIELDS = ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs")
_TEXT_FIELDS = ("prompt", "add_special_tokens")


def count_request(request: InferenceRequest, replica: ReplicaRecord) -> tuple[bytes, bytes]:
    """(path, body) that make the engine count the prompt, rendered exactly as the request itself would be.

    Only for a request that is countable; `count_of` reads the answer.
    """
    fields = request.fields
    path = b"/tokenize"
    body: dict[str, Any]
    match request.endpoint.rules.prompt:
        case Prompt.BLOCKS:
            path, body = b"/v1/messages/count_tokens", _some(fields, _BLOCK_FIELDS)
        case Prompt.CHAT:
            body = _some(fields, _TEMPLATE_FIELDS)
        case Prompt.ITEMS:
            body = _as_chat(fields)
        case Prompt.INPUT:
            body = {"prompt": fields["input"], **_some(fields, ("add_special_tokens",))}
        case _:
            body = _some(fields, _TEXT_FIELDS)
    return path, msgspec.json.encode({**body, "model": replica.served_name})


def _some(fields: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


def _as_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A response's instructions and text as the messages that vLLM makes of them."""
    messages = [{"role": "user", "content": fields["input"]}]
    instructions = fields.get("instructions")
    if instructions is not None and bytes(instructions) != b"null":
        messages.insert(0, {"role": "system", "content": instructions})
    return {"messages": messages, **_some(fields, ("chat_template_kwargs",))}


class _Count(msgspec.Struct):
    count: int | None = None  # /tokenize
    input_tokens: int | None = None  # /v1/messages/count_tokens


_count = msgspec.json.Decoder(_Count)


def count_of(answer: bytes) -> int | None:
    """Raises msgspec.MsgspecError, ValueError or RecursionError where the answer makes no sense."""
    found = _count.decode(answer)
    return found.input_tokens if found.count is None else found.count
