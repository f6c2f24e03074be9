"""The handlers of the proxied paths, which turns.py calls with an exchange each.

One call is one exchange: authenticate, read, decode, dispatch, and whatever happens, one reply and one record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.dispatch import ending_of
from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import ClientGone, GatewayError, InternalError, ShuttingDown, WrongMethod
from gateway.domain.outcome import Ending
from gateway.domain.record import AccessRecord
from gateway.edge.authenticate import class_for, presented_key
from gateway.edge.context import Exchange
from gateway.edge.decode import decode
from gateway.edge.lane import Handler
from gateway.edge.large import LARGE_BYTES, decode_large
from gateway.edge.respond import error_body, error_headers, status_of
from gateway.runtime import Runtime
from gateway.telemetry.traces import without_broken_trace
from gateway.upstream.attempt import PASSED_HEADERS

log = logging.getLogger(__name__)


def inference_handlers(runtime: Callable[[], Runtime]) -> dict[bytes, Handler]:
    """One handler per proxied path. `runtime` gives the runtime of the moment; a request keeps its first one."""

    def handler(endpoint: Endpoint) -> Handler:
        path, errors = endpoint.value, endpoint.rules.errors

        def proxied(exchange: Exchange) -> Coroutine[Any, Any, None]:
            exchange.errors = errors
            return handle(runtime(), endpoint, path, exchange)

        return proxied

    return {endpoint.raw: handler(endpoint) for endpoint in Endpoint}


async def handle(runtime: Runtime, endpoint: Endpoint, path: str, exchange: Exchange) -> None:
    record = AccessRecord(
        request_id=exchange.request_id,
        method=exchange.method,
        path=path,
        revision=runtime.revision,
        began_s=time.monotonic(),
    )
    span = runtime.traces.begin(exchange.headers, record) if runtime.traces else None
    runtime.exchanges.add(exchange)
    try:
        gateway = runtime.config.gateway
        if exchange.method != "POST":
            raise WrongMethod(f"Use POST for {path}.", "POST")
        presented = presented_key(exchange.headers)
        principal = runtime.keys.known(presented) or await runtime.keys.authenticate(presented)
        record.key_id, record.user = principal.key_id, principal.user
        class_name = class_for(exchange.header(b"x-poolgate-class"), principal, runtime.config.classes)
        record.class_name = class_name
        body = await exchange.read_body(gateway.max_body_bytes, gateway.timeouts.body_s, gateway.timeouts.total_s)
        if len(body) > LARGE_BYTES and not endpoint.rules.is_form:
            async with runtime.large_bodies:
                request = await decode_large(body, endpoint, principal, class_name, exchange.request_id)
        else:
            content_type = exchange.header(b"content-type") if endpoint.rules.is_form else None
            request = decode(body, endpoint, principal, class_name, exchange.request_id, content_type)
        if passed := exchange.headers_of(PASSED_HEADERS):
            request.headers = without_broken_trace(passed)
        if span is not None and runtime.traces:
            request.headers = runtime.traces.carry(span, request.headers)
        record.model, record.stream = request.model[:128], request.stream
        await runtime.dispatcher.serve(request, exchange, record)
    except GatewayError as error:
        fail(exchange, record, error)
    except asyncio.CancelledError:
        if exchange.is_gone:
            fail(exchange, record, ClientGone("The caller hung up."))
        else:  # the drain time is over, or the server was told to stop at once: either way the caller is told
            record.ending = Ending.FAILED.value
            fail(exchange, record, ShuttingDown("This gateway is shutting down.", retry_after_s=1))
    except Exception:
        log.exception("request %s failed", exchange.request_id)
        fail(exchange, record, InternalError("Something went wrong in the gateway; its log has the details."))
    finally:
        exchange.close()
        runtime.exchanges.discard(exchange)
        record.total_s = (exchange.ended_at or time.monotonic()) - record.began_s
        record.status = record.status or exchange.status
        runtime.access.write(record)
        runtime.instruments.observe(record)
        if span is not None and runtime.traces:
            runtime.traces.end(span, record)


def fail(exchange: Exchange, record: AccessRecord, error: GatewayError) -> None:
    """Answers with `error`: as a whole reply, or as the last event of a stream that has begun."""
    record.error_code = record.error_code or error.code
    record.status = status_of(error)
    record.ending = record.ending or ending_of(error).value
    if isinstance(error, ClientGone) or exchange.is_gone or exchange.response_complete:
        return
    exchange.fail(record.status, error_headers(error), error_body(error, exchange.errors))
