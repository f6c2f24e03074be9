"""Turns an error into status, body and headers; the only place where status numbers of errors stand.

The body is OpenAI's object, or Anthropic's on the paths that have its shapes.
"""

from __future__ import annotations

import math

import msgspec

from gateway.domain import errors
from gateway.domain.endpoint import ErrorShape
from gateway.domain.errors import GatewayError
from gateway.domain.request import RateState

STATUS: dict[type[GatewayError], int] = {
    errors.BadRequest: 400,
    errors.ContextTooLong: 400,
    errors.InvalidKey: 401,
    errors.NotAllowed: 403,
    errors.UnknownModel: 404,
    errors.UnknownPath: 404,
    errors.WrongMethod: 405,
    errors.BodyTimeout: 408,
    errors.BodyTooLarge: 413,
    errors.UnsupportedEncoding: 415,
    errors.LimitExceeded: 429,
    errors.ClientGone: 499,
    errors.InternalError: 500,
    errors.UpstreamError: 502,
    errors.ConnectFailed: 502,
    errors.UpstreamBroken: 502,
    errors.UpstreamTimeout: 504,
    errors.EngineFailed: 502,
    errors.EngineDied: 502,
    errors.EngineBusy: 503,
    errors.NoReplica: 503,
    errors.PoolFull: 503,
    errors.QueueTimeout: 503,
    errors.StoreUnavailable: 503,
    errors.OutOfDescriptors: 503,
    errors.ShuttingDown: 503,
}

# OpenAI's names for the families that its clients know
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "invalid_request_error",
    502: "upstream_error",
    503: "service_unavailable_error",
    504: "upstream_error",
}
# Anthropic's; what it has no name for is invalid_request_error below 500 and api_error above
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
CLOSES = frozenset({408, 413})  # the rest of the body is still on its way: this connection is of no further use
JSON = (b"content-type", b"application/json")
ENGINE_REFUSED = (JSON, (b"x-poolgate-error-source", b"engine"))  # headers of the engine's own refusal in our envelope


def status_of(error: GatewayError) -> int:
    return STATUS[type(error)]


def envelope(
    shape: ErrorShape, status: int, message: str, kind: str, param: str | None, code: str | int | None
) -> bytes:
    """An error as JSON bytes. Anthropic's object has room for a message and a type, which the status decides."""
    if shape is ErrorShape.ANTHROPIC:
        return msgspec.json.encode({"type": "error", "error": {"type": anthropic_type(status), "message": message}})
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def anthropic_type(status: int) -> str:
    return ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")


def error_body(error: GatewayError, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
    status = status_of(error)
    return envelope(shape, status, error.message, TYPES.get(status, "internal_error"), error.param, error.code)


def event_of(body: bytes, shape: ErrorShape) -> bytes:
    """An error's body as the one event that ends a stream which failed after its first byte."""
    name = b"event: error\n" if shape is ErrorShape.ANTHROPIC else b""
    return b"%bdata: %b\n\n" % (name, body)


def error_headers(error: GatewayError) -> list[tuple[bytes, bytes]]:
    status = status_of(error)
    headers = [JSON, (b"x-poolgate-error-source", error.source.value.encode())]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if isinstance(error, errors.WrongMethod):
        headers.append((b"allow", error.allow.encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in CLOSES:
        headers.append((b"connection", b"close"))
    return headers


def rate_lines(rate: RateState) -> bytes:
    """x-ratelimit-* as OpenAI names them, as bytes of a head; nothing for a kind that has no limit."""
    requests, left_requests, reset_requests_s, tokens, left_tokens, reset_tokens_s = rate
    return _lines(_REQUESTS, requests, left_requests, reset_requests_s) + _lines(
        _TOKENS, tokens, left_tokens, reset_tokens_s
    )


def _names(kind: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """The lines of one kind, ready to be filled: all three, then each alone."""
    limit = b"x-ratelimit-limit-" + kind + b": %d\r\n"
    remaining = b"x-ratelimit-remaining-" + kind + b": %d\r\n"
    reset = b"x-ratelimit-reset-" + kind + b": %b\r\n"
    return limit + remaining + reset, limit, remaining, reset


_REQUESTS, _TOKENS = _names(b"requests"), _names(b"tokens")


def _lines(names: tuple[bytes, ...], limit: int | None, left: int | None, reset_s: float | None) -> bytes:
    if limit is None:
        return b""
    if left is not None and reset_s is not None:
        return names[0] % (limit, left, duration(reset_s))
    lines = names[1] % limit
    if left is not None:
        lines += names[2] % left
    if reset_s is not None:
        lines += names[3] % duration(reset_s)
    return lines


def duration(seconds: float) -> bytes:
    """OpenAI's form: 250ms, 12s, 1m30s; rounded up, so that nobody comes back too early."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    whole = math.ceil(seconds)
    return b"%dm%ds" % divmod(whole, 60) if whole >= 60 else b"%ds" % whole
