"""Turns an error into status, OpenAI-shaped body and headers; the only place where status numbers of errors stand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import msgspec

from gateway.domain import errors
from gateway.domain.errors import GatewayError
from gateway.domain.request import NO_RATE, RateState

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
    errors.NoReplica: 503,
    errors.StoreUnavailable: 503,
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
CLOSES = frozenset({408, 413})  # the rest of the body is still on its way: this connection is of no further use
JSON = (b"content-type", b"application/json")


class Starter(Protocol):
    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None: ...

    async def finish(self, data: bytes = b"") -> None: ...


def status_of(error: GatewayError) -> int:
    return STATUS[type(error)]


def envelope(message: str, kind: str, param: str | None, code: str | int | None) -> bytes:
    """OpenAI's error object, as JSON bytes."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_body(error: GatewayError) -> bytes:
    return envelope(error.message, TYPES.get(status_of(error), "internal_error"), error.param, error.code)


def error_event(error: GatewayError) -> bytes:
    """The one event that ends a stream which failed after its first byte."""
    return b"data: " + error_body(error) + b"\n\n"


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


async def respond_error(starter: Starter, error: GatewayError) -> None:
    body = error_body(error)
    await starter.start(status_of(error), [*error_headers(error), (b"content-length", b"%d" % len(body))])
    await starter.finish(body)


def refusal_headers(body: bytes, retry_after_s: int | None) -> list[tuple[bytes, bytes]]:
    """For the engine's own refusal, already in our envelope."""
    headers = [JSON, (b"x-poolgate-error-source", b"engine"), (b"content-length", b"%d" % len(body))]
    return headers if retry_after_s is None else [*headers, (b"retry-after", b"%d" % retry_after_s)]


def rate_headers(rate: RateState) -> list[tuple[bytes, bytes]]:
    """x-ratelimit-* as OpenAI names them; nothing for a kind that has no limit."""
    if rate is NO_RATE:
        return []
    headers = []
    for kind, limit, remaining, reset_s in (
        (b"requests", rate.limit_requests, rate.remaining_requests, rate.reset_requests_s),
        (b"tokens", rate.limit_tokens, rate.remaining_tokens, rate.reset_tokens_s),
    ):
        if limit is None:
            continue
        headers.append((b"x-ratelimit-limit-" + kind, b"%d" % limit))
        if remaining is not None:
            headers.append((b"x-ratelimit-remaining-" + kind, b"%d" % remaining))
        if reset_s is not None:
            headers.append((b"x-ratelimit-reset-" + kind, duration(reset_s)))
    return headers


def duration(seconds: float) -> bytes:
    """OpenAI's form: 250ms, 12s, 1m30s; rounded up, so that nobody comes back too early."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    whole = math.ceil(seconds)
    return b"%dm%ds" % divmod(whole, 60) if whole >= 60 else b"%ds" % whole
