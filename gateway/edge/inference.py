"""The proxied paths: Litestar `@asgi` handlers on the raw scope, since request objects would cost more than our work.

One handler call is one exchange: authenticate, read, decode, dispatch, and whatever happens, one reply and one record.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from litestar.handlers import ASGIRouteHandler, asgi
from litestar.types import Receive, Scope, Send
from opentelemetry.trace import Span

from gateway.dispatch import ending_of
from gateway.domain.errors import ClientGone, GatewayError, InternalError, ShuttingDown, WrongMethod
from gateway.domain.outcome import Ending
from gateway.domain.record import AccessRecord
from gateway.domain.request import Endpoint
from gateway.edge.authenticate import class_for, presented_key
from gateway.edge.context import Exchange
from gateway.edge.decode import decode
from gateway.edge.respond import error_event, respond_error, status_of
from gateway.runtime import Runtime
from gateway.telemetry.traces import without_broken_trace
from gateway.upstream.attempt import PASSED_HEADERS

log = logging.getLogger(__name__)


def inference_handlers(runtime: Callable[[], Runtime]) -> list[ASGIRouteHandler]:
    """One handler per proxied path. `runtime` gives the runtime of the moment; a request keeps its first one."""

    def handler(endpoint: Endpoint) -> ASGIRouteHandler:
        @asgi(endpoint.value, copy_scope=False, name=endpoint.name.lower())
        async def proxied(scope: Scope, receive: Receive, send: Send) -> None:
            await handle(runtime(), endpoint, Exchange(scope, receive, send))

        return proxied

    return [handler(endpoint) for endpoint in Endpoint]


async def handle(runtime: Runtime, endpoint: Endpoint, exchange: Exchange) -> None:
    record = AccessRecord(
        request_id=exchange.request_id,
        method=exchange.scope["method"],  # type: ignore[typeddict-item]
        path=endpoint.value,
        revision=runtime.revision,
        began_s=time.monotonic(),
    )
    span = runtime.traces.begin(exchange.scope["headers"], record) if runtime.traces else None
    runtime.exchanges.add(exchange)
    try:
        await answer(runtime, endpoint, exchange, record, span)
    except GatewayError as error:
        await fail(exchange, record, error)
    except asyncio.CancelledError:
        if exchange.is_gone:
            await fail(exchange, record, ClientGone("The caller hung up."))
        else:  # the drain time is over, or the server was told to stop at once: either way the caller is told
            record.ending = Ending.FAILED.value
            await fail(exchange, record, ShuttingDown("This gateway is shutting down.", retry_after_s=1))
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
    except Exception:
        log.exception("request %s failed", exchange.request_id)
        await fail(exchange, record, InternalError("Something went wrong in the gateway; its log has the details."))
    finally:
        exchange.unwatch()
        runtime.exchanges.discard(exchange)
        record.total_s = time.monotonic() - record.began_s
        record.status = record.status or exchange.status
        runtime.access.write(record)
        if span is not None and runtime.traces:
            runtime.traces.end(span, record)


async def answer(
    runtime: Runtime, endpoint: Endpoint, exchange: Exchange, record: AccessRecord, span: Span | None
) -> None:
    gateway = runtime.config.gateway
    if exchange.scope["method"] != "POST":  # type: ignore[typeddict-item]
        raise WrongMethod(f"Use POST for {endpoint.value}.", "POST")
    principal = await runtime.keys.authenticate(presented_key(exchange.scope["headers"]))
    record.key_id, record.user = principal.key_id, principal.user
    class_name = class_for(exchange.header(b"x-poolgate-class"), principal, runtime.config.classes)
    record.class_name = class_name
    body = await exchange.read_body(gateway.max_body_bytes, gateway.timeouts.body_s, gateway.timeouts.total_s)
    exchange.watch()
    request = decode(body, endpoint, principal, class_name, exchange.request_id)
    request.headers = without_broken_trace(h for h in exchange.scope["headers"] if h[0] in PASSED_HEADERS)
    if span is not None and runtime.traces:
        request.headers = runtime.traces.carry(span, request.headers)
    record.model, record.stream = request.model[:128], request.stream
    await runtime.dispatcher.serve(request, exchange, record)


async def fail(exchange: Exchange, record: AccessRecord, error: GatewayError) -> None:
    """Answers with `error`: as a whole reply, or as the last event of a stream that has begun.

    Where a part of a plain reply is out, nothing more can be said: the server cuts the connection.
    """
    record.error_code = record.error_code or error.code
    record.status = status_of(error)
    record.ending = record.ending or ending_of(error).value
    if isinstance(error, ClientGone) or exchange.is_gone:
        return
    try:
        if not exchange.has_started:
            await respond_error(exchange, error)
        elif record.stream:
            await exchange.end_with(error_event(error))
    except asyncio.CancelledError:
        if not exchange.is_gone:  # else the caller left while it was told
            raise
