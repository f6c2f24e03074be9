"""Makes one error of the four shapes in which vLLM words its refusals; forward.py and the taps call it.

Source: answers of vLLM 0.32.0, and its documentation up to 0.33.
1. `{"error": {"message", "type", "param", "code"}}`, most of them; Anthropic's paths add `"type": "error"` beside it
2. `{"error": "Unauthorized"}`, a wrong engine key
3. `{"detail": "Not Found"}`, or a list of findings: an unknown path, a wrong method, bad UTF-8
4. `{"object": "error", "message", …}`, releases before 0.10, and plain text from the server under the engine
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

MAX_MESSAGE_BYTES = 4096  # one engine put its whole request into each of thousands of findings
MAX_NAME_CHARS = 256
MAX_FINDINGS = 20
HIDDEN = "[key]"
# Where a document that cannot be read says why: the first of these names, with a text. Quotes inside a text are
# escaped, so none that is repeated in there looks like this.
_TOLD = re.compile(rb'"(?:error|message|detail|msg)"\s*:\s*"')
_TEXT = re.compile(rb'(?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u])*')
MAX_TEXT_BYTES = 6 * MAX_MESSAGE_BYTES  # of JSON for so much of a message, which may be all escapes


class EngineError(NamedTuple):
    """The fields of OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | int | None


def normalise(status: int, body: bytes) -> EngineError:
    """What the engine said. `body` may be cut off or be no JSON at all; never raises."""
    try:
        document: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # ValueError: UnicodeDecodeError, for bad UTF-8
        document = _beginning_of_text(body) or _plain_text(body)
    fields: dict[str, Any] = {}
    message: Any = document
    if isinstance(document, dict):
        inner = document.get("error")
        if isinstance(inner, dict):
            fields, message = inner, inner.get("message")
        elif isinstance(inner, str):
            message = inner
        elif "detail" in document:
            message = _detail(document["detail"])
        else:
            fields, message = document, document.get("message")
    if not isinstance(message, str) or not message.strip():
        message = f"The engine answered {status} {_phrase(status)} and gave no reason.".replace("  ", " ")
    return EngineError(
        _cut(message.strip()), _name(fields.get("type")) or _type_of(status), _name(fields.get("param")), _code(fields)
    )


def without_key(error: EngineError, key: str) -> EngineError:
    """The same without the engine's key, which some servers repeat when they say what came."""
    message, kind, param, code = (v.replace(key, HIDDEN) if isinstance(v, str) and key in v else v for v in error)
    return EngineError(str(message), str(kind), None if param is None else str(param), code)


def _beginning_of_text(body: bytes) -> str | None:
    """What half a document says, as far as it goes; an engine repeats a large request, and the reply is cut."""
    if body[:1] not in (b"{", b"[") or (told := _TOLD.search(body)) is None:
        return None
    text = _TEXT.match(body[: told.end() + MAX_TEXT_BYTES], told.end())
    assert text is not None  # it may be empty
    try:
        message: str = json.loads(b'"%b"' % text[0].decode("utf-8", "ignore").encode(), strict=False)
    except ValueError:  # an escape that JSON does not know
        return None
    is_whole = body[text.end() : text.end() + 1] == b'"'
    return message if is_whole or not message.strip() else message + "…"


def _plain_text(body: bytes) -> str | None:
    """Text for people, if it is that: half a JSON document or a page of HTML says nothing to a caller."""
    text = body[: MAX_MESSAGE_BYTES + 1].decode("utf-8", "replace").strip()
    return text if text and text[0] not in '{["<' and text.isprintable() else None


def _detail(detail: Any) -> str | None:
    """FastAPI's own refusals: a sentence, or a list of `{"loc": [...], "msg": "…"}`."""
    if isinstance(detail, str):
        return detail
    if not isinstance(detail, list):
        return None
    findings = []
    for finding in detail[:MAX_FINDINGS]:
        if isinstance(finding, dict) and isinstance(finding.get("msg"), str):
            place = finding.get("loc")
            where = ".".join(map(str, place[:16])) if isinstance(place, list) else ""
            findings.append(f"{where}: {finding['msg']}" if where else finding["msg"])
    return "; ".join(findings)


def _code(fields: dict[str, Any]) -> str | int | None:
    code = fields.get("code")
    if isinstance(code, int) and not isinstance(code, bool) and abs(code) < 1 << 31:
        return code
    return _name(code)


def _name(value: Any) -> str | None:
    return value[:MAX_NAME_CHARS] if isinstance(value, str) and value else None


def _cut(message: str) -> str:
    raw = message.encode("utf-8", "replace")
    if len(raw) <= MAX_MESSAGE_BYTES:
        return raw.decode()
    return raw[: MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "…"


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _type_of(status: int) -> str:
    by_status = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return by_status.get(status, "invalid_request_error" if status < 500 else "server_error")
