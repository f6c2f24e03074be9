"""Every error the gateway raises on purpose; `edge/respond.py` alone turns one into a status and a body.

Each error carries a stable `code` (documented in docs/errors.md), who is at fault (`source`), whether trying again
can help (`retry`), a public message, and where it applies the request field that it is about (`param`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from gateway.domain.request import NO_RATE, RateState


class Source(StrEnum):
    """Who caused an error: told to the caller in `x-poolgate-error-source`."""

    CLIENT = "client"
    GATEWAY = "gateway"
    ENGINE = "engine"


class Retry(StrEnum):
    """What may help: nothing, another replica at once, or the same call later."""

    NEVER = "never"
    OTHER_REPLICA = "other_replica"
    LATER = "later"


class GatewayError(Exception):
    """Base of all. `retry_after_s` is set when `retry` is LATER, and by an engine that is busy."""

    code: ClassVar[str] = "gateway_error"
    source: ClassVar[Source] = Source.GATEWAY
    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


# --- the caller's request -------------------------------------------------------------------------------------------


class BadRequest(GatewayError):
    """The body cannot be understood, or a field has a value that no engine would take."""

    code = "invalid_request"
    source = Source.CLIENT


class ContextTooLong(BadRequest):
    """Prompt and asked output do not fit the window of any pool of the route."""

    code = "context_length_exceeded"


class BodyTooLarge(GatewayError):
    """The body passed `gateway.max_body_bytes` while it was read."""

    code = "request_too_large"
    source = Source.CLIENT


class UnsupportedEncoding(GatewayError):
    """The body is compressed in a way that is not accepted; the message says which are."""

    code = "unsupported_content_encoding"
    source = Source.CLIENT


class BodyTimeout(GatewayError):
    """The caller stopped sending its body before the end."""

    code = "request_timeout"
    source = Source.CLIENT


class ClientGone(GatewayError):
    """The caller hung up; nobody is left to answer."""

    code = "client_closed_request"
    source = Source.CLIENT


class InvalidKey(GatewayError):
    """No key, a malformed one, an unknown one, an expired one or a revoked one: all look the same from outside."""

    code = "invalid_api_key"
    source = Source.CLIENT
    MESSAGE: ClassVar[str] = "No valid API key was given. Send 'Authorization: Bearer KEY' or 'x-api-key: KEY'."

    def __init__(self, message: str = MESSAGE) -> None:
        super().__init__(message)


class NotAllowed(GatewayError):
    """The key is good but may not do this (model not on its list, class above its own)."""

    code = "not_allowed"
    source = Source.CLIENT


class UnknownModel(GatewayError):
    """No route has this name or alias."""

    code = "model_not_found"
    source = Source.CLIENT


class UnknownPath(GatewayError):
    """The gateway does not serve this path."""

    code = "unknown_path"
    source = Source.CLIENT


class WrongMethod(GatewayError):
    """The path exists, with other methods: those of `allow`, as the header of that name lists them."""

    code = "method_not_allowed"
    source = Source.CLIENT

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class LimitExceeded(GatewayError):
    """A limit of the caller's own key, user, or of the model as a whole is used up; `retry_after_s` says until when.

    `retry_after_s` is None when the request asks for more than the whole limit: no waiting helps then.
    `scope` ("key:alice-dev", "user:alice", "route:chat") and `kind` ("tokens_per_min") name the limit; `rate` is
    what the reply's `x-ratelimit-*` headers show.
    """

    code = "rate_limit_exceeded"
    source = Source.CLIENT
    retry = Retry.LATER

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        scope: str = "",
        kind: str = "",
        rate: RateState = NO_RATE,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.scope = scope
        self.kind = kind
        self.rate = rate


# --- the gateway and what stands behind it ---------------------------------------------------------------------------


class NoReplica(GatewayError):
    """No replica of the route's pools can serve now (loading, failed, none running)."""

    code = "model_not_ready"
    retry = Retry.LATER


class PoolFull(GatewayError):
    """Every slot of the pool is taken, and as many of the caller's class wait as may (`classes.NAME.queue_max`)."""

    code = "pool_full"
    retry = Retry.LATER


class QueueTimeout(GatewayError):
    """No slot of the pool came free while the caller's class waits (`classes.NAME.queue_s`)."""

    code = "queue_timeout"
    retry = Retry.LATER


class StoreUnavailable(GatewayError):
    """Redis did not answer in time and `redis.on_outage` is `closed`, or the key can only be looked up there."""

    code = "store_unavailable"
    retry = Retry.LATER


class OutOfDescriptors(GatewayError):
    """This gateway process may open no more files: it has no connection for the request. No replica is to blame."""

    code = "gateway_full"
    retry = Retry.LATER


class ShuttingDown(GatewayError):
    """This gateway process is draining."""

    code = "shutting_down"
    retry = Retry.LATER


class UpstreamError(GatewayError):
    """Base of what goes wrong between the gateway and a replica."""

    code = "upstream_error"
    source = Source.ENGINE


class ConnectFailed(UpstreamError):
    """No connection to the replica could be made; it never saw the request."""

    code = "upstream_connect_failed"
    retry = Retry.OTHER_REPLICA


class UpstreamBroken(UpstreamError):
    """The connection ended or made no sense before the reply was whole.

    `response_began`: at least one byte of the reply had come. Even without one the replica may have begun to work,
    unless `request_sent` is False: then it never had the whole request.
    """

    code = "upstream_broken"

    def __init__(self, message: str, *, response_began: bool = False, request_sent: bool = True) -> None:
        super().__init__(message)
        self.response_began = response_began
        self.request_sent = request_sent


class UpstreamTimeout(UpstreamError):
    """The replica was silent past a deadline; the message names which one.

    `deadline` is "connect" (the replica never saw the request), "first byte", "gap" or "total".
    """

    code = "upstream_timeout"

    def __init__(self, message: str, *, deadline: str | None = None) -> None:
        super().__init__(message)
        self.deadline = deadline


class EngineFailed(UpstreamError):
    """The engine answered that it failed, or gave the request up; it lives, and so may another replica of it."""

    code = "engine_failed"
    retry = Retry.OTHER_REPLICA


class EngineBusy(UpstreamError):
    """The engine takes no more for now (429, 503)."""

    code = "engine_busy"
    retry = Retry.OTHER_REPLICA


class EngineDied(UpstreamError):
    """The engine's core died while it had this request, which may be what killed it.

    Another replica gets the request only where the config says so (`gateway.retry.replay_in_flight`).
    """

    code = "engine_died"


class InternalError(GatewayError):
    """A defect of ours; details are in the log under the request id."""

    code = "internal_error"


class ConfigError(GatewayError):
    """config.toml cannot be used. `findings` holds one line per fault: key path, what is wrong, the way out."""

    code = "config_error"

    def __init__(self, findings: list[str]) -> None:
        super().__init__("\n".join(findings))
        self.findings = findings


class WorkerError(GatewayError):
    """Base of the supervisor's errors."""

    code = "worker_error"
