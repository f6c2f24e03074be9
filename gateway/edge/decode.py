"""Body bytes → InferenceRequest. Only fields that the gateway owns are decoded; the rest travels as it came.

The rules for each owned field are in docs/api.md, those of each path in domain/endpoint.py. Every refusal is a
BadRequest that names the element.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import BadRequest
from gateway.domain.request import InferenceRequest, Principal
from gateway.edge.fields import (
    DENIED_FIELDS,
    Fields,
    answers,
    boolean,
    output_tokens,
    owned,
    refuse_denied,
    refuse_stateful,
    refuse_values,
    string,
)
from gateway.edge.form import decode_form
from gateway.edge.prompts import PROMPT_CHECKS, PromptFacts

T = TypeVar("T")

_split = msgspec.json.Decoder(dict[str, msgspec.Raw])
_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


def decode(
    body: bytes,
    endpoint: Endpoint,
    principal: Principal,
    class_name: str,
    request_id: str,
    content_type: bytes | None = None,
) -> InferenceRequest:
    """Raises BadRequest; costs a few µs for an ordinary body, and time in proportion to the bytes for a large one.

    `content_type` is looked at only where the path takes a form.
    """
    rules = endpoint.rules
    if rules.is_form:
        return decode_form(body, content_type, endpoint, principal, class_name, request_id)
    return made_of(split(body), len(body), endpoint, principal, class_name, request_id)


def made_of(
    fields: Fields,
    body_bytes: int,
    endpoint: Endpoint,
    principal: Principal,
    class_name: str,
    request_id: str,
    prompt: PromptFacts | None = None,
) -> InferenceRequest:
    """The request of a body that is split. `prompt`: where its check has been done. Raises BadRequest."""
    rules = endpoint.rules
    if not DENIED_FIELDS.isdisjoint(fields):
        refuse_denied(fields)
    model = owned(fields, "model", string, "a string")
    if not model:
        raise BadRequest("'model' is missing: name one of the models that GET /v1/models lists.", param="model")
    stream = rules.streams and "stream" in fields and bool(owned(fields, "stream", boolean, "true or false"))
    wants_usage = take_stream_options(fields, stream) if rules.has_stream_options else True
    if rules.stateful_fields:
        refuse_stateful(fields, rules)
    if rules.allowed_values:
        refuse_values(fields, rules)
    if prompt is None:
        prompt = PROMPT_CHECKS[rules](fields, rules)
    output_field, max_output = output_tokens(fields, rules)
    return InferenceRequest(
        request_id,
        endpoint,
        principal,
        class_name,
        model,
        stream,
        wants_usage,
        max_output,
        output_field,
        answers(fields, rules) * prompt.prompts,
        body_bytes,
        prompt.is_countable,
        fields,
        prompt.media,
        (),
        prompt.prompts,
        prompt.ids,
        prompt.longest_ids,
        prompt.repeated_bytes,
    )


def split(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object, each value as the bytes it came in."""
    try:
        if not body.isascii():
            body.decode()  # msgspec does not look inside the values that it skips
    except UnicodeDecodeError as exc:
        raise BadRequest(f"The body is not valid UTF-8 (byte {exc.start}).") from exc
    return parsed(_split, body)


def parsed(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises BadRequest for what is no JSON object."""
    try:
        return decoder.decode(body)
    except UnicodeDecodeError as exc:
        raise BadRequest("The body is not valid UTF-8.") from exc
    except RecursionError as exc:
        raise BadRequest("The body is nested too deeply.") from exc
    except msgspec.ValidationError as exc:
        raise BadRequest("The body must be a JSON object.") from exc
    except msgspec.DecodeError as exc:
        raise BadRequest(f"The body is not valid JSON: {exc}.") from exc


def take_stream_options(fields: dict[str, Any], stream: bool) -> bool:
    """Whether the client asks for the usage event. Leaves `stream_options` split in `fields`, or none for null."""
    if "stream_options" not in fields:
        return False
    options = owned(fields, "stream_options", _options, "an object")
    if options is None:
        del fields["stream_options"]
        return False
    if not stream:
        raise BadRequest("'stream_options' goes only with 'stream': true.", param="stream_options")
    try:
        wants_usage = bool(owned(options, "include_usage", boolean, "true or false"))
    except BadRequest as exc:
        raise BadRequest(f"stream_options: {exc.message}", param="stream_options") from exc
    if not wants_usage:
        options.pop("continuous_usage_stats", None)  # has no meaning alone; it must not gain one when we ask for usage
    fields["stream_options"] = options
    return wants_usage
