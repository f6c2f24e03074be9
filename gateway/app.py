"""Composition root: resources → runtime → Litestar app with its lifespan. The only place that joins the parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from random import Random
from typing import Any

from litestar import Litestar, Request, Response
from litestar.di import Provide
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.types import Message, Scope

from gateway.admission.budget import Budget
from gateway.admission.capacity import Capacity
from gateway.admission.first_key import ensure_first_key
from gateway.admission.gate import Gate
from gateway.admission.key_ring import KeyRing
from gateway.admission.keys import KeyStore
from gateway.admission.link import RedisLink
from gateway.admission.slots import Slots
from gateway.config.load import LoadedConfig, metrics_key
from gateway.config.outside import own_authorities
from gateway.config.schema import process_count, slots_of
from gateway.config.store import connect
from gateway.config.tasks import end_task
from gateway.dispatch import Dispatcher
from gateway.domain.errors import (
    BadRequest,
    GatewayError,
    InternalError,
    StoreUnavailable,
    UnknownPath,
    WrongMethod,
)
from gateway.edge.models import ModelsController
from gateway.edge.ops import OpsController
from gateway.edge.request_ids import RequestIds, request_id_of
from gateway.edge.respond import error_body, error_headers, status_of
from gateway.fleet.registry import Registry
from gateway.fleet.sources.base import Source
from gateway.fleet.sources.static import StaticSource
from gateway.fleet.sources.supervisor import SupervisorSource
from gateway.routing.table import RouteTable, routes_of
from gateway.runtime import Runtime
from gateway.telemetry.access import AccessLog
from gateway.telemetry.instruments import Instruments
from gateway.telemetry.shared_values import slot_from_environment
from gateway.telemetry.traces import traces_from_environment
from gateway.upstream.attempt import Attempts
from gateway.upstream.trust import Trust
from gateway.upstream.wire import WireTransport

log = logging.getLogger(__name__)
OFTEN_MEANT = ("/chat/completions", "/completions", "/models")  # with a base URL that lacks its /v1
CLOSE_S = 5.0
PUBLISH_S = 1.0


def build(loaded: LoadedConfig) -> tuple[Litestar, Callable[[], Runtime]]:
    """The app, and a way to its runtime, which exists while the app's lifespan runs."""
    holder: list[Runtime] = []

    def runtime() -> Runtime:
        return holder[0]

    @contextlib.asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        async with running(loaded) as made:
            holder.append(made)
            yield

    app = Litestar(
        route_handlers=[ModelsController, OpsController],
        dependencies={"runtime": Provide(runtime, sync_to_thread=False)},
        exception_handlers={Exception: unhandled},
        lifespan=[lifespan],
        openapi_config=None,
        logging_config=None,
        before_send=[stamp_request_id],
    )
    return app, runtime


@contextlib.asynccontextmanager
async def running(loaded: LoadedConfig) -> AsyncIterator[Runtime]:
    """A runtime with its background tasks; on exit they end, tickets are settled and records written."""
    config = loaded.config
    async with contextlib.AsyncExitStack() as stack:
        link = RedisLink.open(loaded)
        stack.push_async_callback(link.aclose)
        ring = KeyRing(config, link)
        keys = KeyStore(loaded, ring)
        stack.push_async_callback(keys.aclose)
        budget = Budget(link, on_outage=config.redis.on_outage, expected_processes=process_count(config))
        budget.start()
        stack.push_async_callback(budget.aclose)
        transport = WireTransport(trust_of(loaded))
        stack.push_async_callback(transport.aclose)
        sources: list[Source] = [StaticSource(config, time.time())]
        if not all(pool.urls for pool in config.pools.values()):
            fleet_redis = connect(loaded, timeout_s=1.0)  # off the request path: a slower answer is better than none
            stack.push_async_callback(fleet_redis.aclose)
            sources.append(SupervisorSource(fleet_redis))
        fleet = Registry(sources)
        slots = Slots(slots_of(config.pools), config.classes, lambda pool: len(fleet.snapshot().ready(pool)))
        capacity = Capacity(link, slots, expected_processes=process_count(config))
        capacity.start()
        stack.push_async_callback(capacity.aclose)
        runtime = Runtime(
            loaded=loaded,
            keys=keys,
            dispatcher=Dispatcher(
                config,
                RouteTable(routes_of(config)),
                Gate(budget),
                slots,
                fleet,
                Attempts(transport, fleet, config.gateway.timeouts, config.gateway.retry),
                Random(),
            ),
            fleet=fleet,
            slots=slots,
            access=AccessLog(sys.stdout.buffer),
            traces=traces_from_environment(version("poolgate")),
            instruments=Instruments(*slot_from_environment()),
            is_redis_away=lambda: link.is_away,
            metrics_key=metrics_key(config),
        )
        await make_first_key(loaded, link)
        await fleet.refresh()
        tasks = [asyncio.create_task(fleet.run()), asyncio.create_task(publish(runtime))]
        try:
            yield runtime
        finally:
            for task in tasks:
                await end_task(task)
            await asyncio.to_thread(runtime.access.close, CLOSE_S)
            if runtime.traces is not None:
                await asyncio.to_thread(runtime.traces.close, CLOSE_S)
            runtime.instruments.close()


def trust_of(loaded: LoadedConfig) -> Trust:
    """Reads at the start what the first request would have to wait for."""
    trust = Trust(own_authorities(loaded))
    if any(url.startswith("https:") for pool in loaded.config.pools.values() for url in pool.urls or []):
        trust.public()
    return trust


async def make_first_key(loaded: LoadedConfig, link: RedisLink) -> None:
    """A config without keys gets one, so that the first call can be made; without Redis that has to wait."""
    try:
        path = await ensure_first_key(loaded, link)
    except StoreUnavailable:
        log.warning("Redis does not answer: no first key could be made; restart when it does, or use static keys")
        return
    if path is not None:
        log.info("the first key is in %s", path)


async def publish(runtime: Runtime) -> None:
    """Tells the gauges of this process, which another one may be asked for."""
    while True:
        await asyncio.sleep(PUBLISH_S)
        runtime.publish()


def unhandled(request: Request[Any, Any, Any], exc: Exception) -> Response[bytes]:
    """Errors outside the proxied paths: ours, Litestar's (unknown path, wrong method, bad query), or a defect."""
    if isinstance(exc, GatewayError):
        error = exc
    elif isinstance(exc, NotFoundException):
        path = request.scope["path"][:128]
        tip = f" Did you mean /v1{path}?" if path in OFTEN_MEANT else ""
        error = UnknownPath(f"There is no {path} here.{tip}")
    elif isinstance(exc, MethodNotAllowedException):
        error = WrongMethod(f"{request.scope['path'][:128]} does not take {request.method}.", "GET, HEAD, OPTIONS")
    elif isinstance(exc, HTTPException) and exc.status_code < 500:
        error = BadRequest(exc.detail[:500])
    else:
        log.error("%s %s failed", request.method, request.scope["path"], exc_info=exc)
        error = InternalError("Something went wrong in the gateway; its log has the details.")
    headers = {name.decode(): value.decode("latin-1") for name, value in error_headers(error)}
    return Response(error_body(error), status_code=status_of(error), headers=headers, media_type="application/json")


async def stamp_request_id(message: Message, scope: Scope) -> None:
    """X-Request-Id on every reply of the app; the proxied paths, which never come here, write their own."""
    if message["type"] != "http.response.start":
        return
    headers = list(message["headers"])
    if not any(name == b"x-request-id" for name, _ in headers):
        headers.append((b"x-request-id", request_id_of(scope["headers"], RequestIds().new).encode()))
        message["headers"] = headers
