"""/v1/models: what this key may use. Ordinary Litestar controllers; the list is small and rarely asked for."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from gateway.domain.errors import UnknownModel
from gateway.domain.request import Principal
from gateway.domain.route import Route
from gateway.edge.authenticate import presented_key
from gateway.fleet.snapshot import Snapshot
from gateway.routing.choose import describe
from gateway.runtime import Runtime


class ModelsController(Controller):
    """Aliases are listed beside their routes, so that every name that works can be found and retrieved."""

    path = "/v1/models"

    @get()
    async def list_models(self, request: Request[Any, Any, Any], runtime: NamedDependency[Runtime]) -> dict[str, Any]:
        principal = await _principal(request, runtime)
        return {
            "object": "list",
            "data": [card for route in _routes(runtime, principal) for card in cards(route, runtime)],
        }

    @get("/{model_id:path}")
    async def retrieve(
        self, request: Request[Any, Any, Any], runtime: NamedDependency[Runtime], model_id: FromPath[str]
    ) -> dict[str, Any]:
        principal = await _principal(request, runtime)
        name = model_id.removeprefix("/")  # the server has decoded it, once
        for route in _routes(runtime, principal):
            for card in cards(route, runtime):
                if card["id"] == name:
                    return card
        raise UnknownModel(f"The model '{name[:128]}' does not exist.", param="model")


async def _principal(request: Request[Any, Any, Any], runtime: Runtime) -> Principal:
    return await runtime.keys.authenticate(presented_key(request.scope["headers"]))


def _routes(runtime: Runtime, principal: Principal) -> list[Route]:
    return runtime.dispatcher.routes.visible_to(principal)


def cards(route: Route, runtime: Runtime) -> list[dict[str, Any]]:
    """OpenAI's model objects for a route and its aliases, with what a caller may want to know besides."""
    snapshot = runtime.fleet.snapshot()
    state = pool_state(route, snapshot)
    windows = [w for pool in route.order.pools() if (w := snapshot.window(pool))]
    return [
        {
            "id": name,
            "object": "model",
            "created": runtime.started_s,
            "owned_by": "poolgate",
            "parent": None if name == route.name else route.name,
            "max_model_len": max(windows, default=None),
            "max_output_tokens": route.max_output_tokens,
            "state": state,
        }
        for name in (route.name, *route.aliases)
    ]


def pool_state(route: Route, snapshot: Snapshot) -> str:
    """'ready' as soon as one pool of the order can serve, else what its pools are doing."""
    pools = route.order.pools()
    if any(snapshot.ready(pool) for pool in pools):
        return "ready"
    return describe([replica for pool in pools for replica in snapshot.replicas(pool)])
