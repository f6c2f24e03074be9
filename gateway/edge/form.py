"""A multipart/form-data body → InferenceRequest: finds the few parts that the gateway owns and keeps the bytes whole.

Called by decode.py. The reader is strict: two readers of one form must not see two different models, so whatever
RFC 7578 leaves open (blanks around a boundary, a name without quotes, text before the first part) is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import BadRequest
from gateway.domain.media import Media
from gateway.domain.request import Form, InferenceRequest, Principal
from gateway.edge.fields import MAX_N, refuse_denied

MAX_PARTS = 128
MAX_VALUE_BYTES = 1024  # of a part that is read here
MAX_PART_HEADER_BYTES = 4096
_BOUNDARY = re.compile(
    rb"""multipart/form-data\s*;\s*boundary=(?:"([0-9A-Za-z'()+_,./:=?-]{1,70})"|([0-9A-Za-z'+_.-]{1,70}))\s*""",
    re.IGNORECASE,
)
_DISPOSITION = re.compile(
    rb"""form-data;[ ]?name="([^"\\\r\n]*)"((?:;[ ]?filename\*?=(?:"[^"\r\n]*"|[^";\r\n]+)){0,2})""", re.IGNORECASE
)
_YES = frozenset(("true", "1", "yes", "on", "t", "y"))
_NO = frozenset(("false", "0", "no", "off", "f", "n", ""))


@dataclass(frozen=True, slots=True)
class Part:
    """Where the value of one part stands in the body."""

    name: str
    is_file: bool
    begin: int
    end: int


def decode_form(
    body: bytes,
    content_type: bytes | None,
    endpoint: Endpoint,
    principal: Principal,
    class_name: str,
    request_id: str,
) -> InferenceRequest:
    """Raises BadRequest."""
    found = parts_of(body, content_type)
    refuse_denied(part.name for part in found)
    by_name = {part.name: part for part in found if not part.is_file}
    model = by_name.get("model")
    name = _text(body, model)
    if model is None or not name:
        raise BadRequest("'model' is missing: name one of the models that GET /v1/models lists.", param="model")
    for field in endpoint.rules.prompt_fields:
        if not any(part.name == field and part.is_file for part in found):
            raise BadRequest(f"'{field}' is missing: send it as a file.", param=field)
    n = _text(body, by_name.get("n"))
    if n is not None and (not n.isascii() or not n.isdigit() or not 1 <= int(n) <= MAX_N):
        raise BadRequest(f"'n' must be a whole number from 1 to {MAX_N}.", param="n")
    return InferenceRequest(
        id=request_id,
        endpoint=endpoint,
        principal=principal,
        class_name=class_name,
        model=name,
        stream=endpoint.rules.streams and _flag(body, by_name.get("stream")),
        wants_usage=True,  # a form has no stream_options; what its stream tells is what was asked for
        max_output_tokens=None,
        output_field="",
        n=1,
        body_bytes=len(body),
        is_countable=False,
        fields={},
        media=Media(body_bytes=len(body)),
        form=Form(body, content_type or b"", model.begin, model.end),
    )


def parts_of(body: bytes, content_type: bytes | None) -> list[Part]:
    """The parts in their order, no two values of one name among those that are read here. Raises BadRequest."""
    match = _BOUNDARY.fullmatch((content_type or b"").strip())
    if match is None:
        raise BadRequest("The body must be multipart/form-data, and Content-Type must name its boundary.")
    mark = b"--" + (match[1] or match[2])
    if not body.startswith(mark + b"\r\n"):
        raise _broken("it does not begin with its boundary")
    parts: list[Part] = []
    at = len(mark) + 2
    while True:
        head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEADER_BYTES)
        if head_end < 0:
            raise _broken("the head of a part does not end")
        begin = head_end + 4
        end = body.find(b"\r\n" + mark, begin)
        if end < 0:
            raise _broken("its last part does not end")
        parts.append(_part(body[at:head_end], begin, end))
        if len(parts) > MAX_PARTS:
            raise BadRequest(f"The form has more than {MAX_PARTS} parts.")
        at = end + 2 + len(mark)
        after = body[at : at + 2]
        if after == b"--":
            if body[at + 2 :] not in (b"", b"\r\n"):
                raise _broken("something follows its end")
            break
        if after != b"\r\n":
            raise _broken("a boundary is followed by something else than the end of its line")
        at += 2
    names = [part.name for part in parts]
    for name in ("model", "stream", "n"):
        if names.count(name) > 1:
            raise BadRequest(f"'{name}' is there twice.", param=name)
    return parts


def _part(head: bytes, begin: int, end: int) -> Part:
    found = None
    for line in head.split(b"\r\n"):
        header, colon, value = line.partition(b":")
        if not colon or b"\n" in line or b"\r" in line or header != header.strip():
            raise _broken("a part has a header that is none")
        if header.lower() != b"content-disposition":
            continue
        match = _DISPOSITION.fullmatch(value.strip())
        if match is None or found is not None:
            raise _broken('a part must have one Content-Disposition, form-data; name="…"')
        found = match
    if found is None:
        raise _broken("a part has no Content-Disposition")
    try:
        name = found[1].decode()
    except UnicodeDecodeError as exc:
        raise _broken("the name of a part is not valid UTF-8") from exc
    return Part(name, bool(found[2]), begin, end)


def _text(body: bytes, part: Part | None) -> str | None:
    if part is None:
        return None
    if part.end - part.begin > MAX_VALUE_BYTES:
        raise BadRequest(f"'{part.name}' is longer than {MAX_VALUE_BYTES} bytes.", param=part.name)
    try:
        return body[part.begin : part.end].decode()
    except UnicodeDecodeError as exc:
        raise BadRequest(f"'{part.name}' is not valid UTF-8.", param=part.name) from exc


def _flag(body: bytes, part: Part | None) -> bool:
    value = (_text(body, part) or "").lower()
    if value not in _YES | _NO:
        raise BadRequest("'stream' must be true or false.", param="stream")
    return value in _YES


def _broken(why: str) -> BadRequest:
    return BadRequest(f"The form cannot be read: {why}.")
