"""Model name or alias → route. Built once per config revision; called by dispatch for every request."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.config.schema import Config, OrderSection, RouteSection, limits_from
from gateway.domain.errors import NotAllowed, UnknownModel
from gateway.domain.media import MediaTokens
from gateway.domain.request import Principal
from gateway.domain.route import PoolOrder, Route, Target


class RouteTable:
    """Immutable after construction."""

    def __init__(self, routes: list[Route]) -> None:
        self.routes = tuple(routes)
        self._by_name = {name: route for route in routes for name in (route.name, *route.aliases)}

    def find(self, model: str) -> Route | None:
        return self._by_name.get(model)

    def resolve(self, model: str, principal: Principal) -> Route:
        """Raises UnknownModel, or NotAllowed when the key's list lacks the route."""
        route = self._by_name.get(model)
        if route is None:
            raise UnknownModel(
                f"The model '{clip(model)}' does not exist. GET /v1/models lists what this key may use.", param="model"
            )
        if not principal.may_use(route.name):
            raise NotAllowed(f"This key may not use the model '{clip(model)}'.", param="model")
        return route

    def visible_to(self, principal: Principal) -> list[Route]:
        return [route for route in self.routes if principal.may_use(route.name)]


def clip(text: str, limit: int = 128) -> str:
    """A caller's text for an error message: bounded, so that no reply grows with the request."""
    return text if len(text) <= limit else text[:limit] + "…"


def routes_of(config: Config) -> list[Route]:
    return [_route(name, section, config) for name, section in config.routes.items()]


def _route(name: str, section: RouteSection, config: Config) -> Route:
    return Route(
        name=name,
        aliases=tuple(section.aliases),
        order=_order(section),
        by_class={class_name: _order(order) for class_name, order in section.by_class.items()},
        max_output_tokens=section.max_output_tokens,
        clamp_output=section.on_max_output == "clamp",
        defaults=dict(section.defaults),
        limits=limits_from(section.limits),
        media_tokens=_media_tokens([section, *section.by_class.values()], config),
    )


def _media_tokens(orders: Sequence[RouteSection | OrderSection], config: Config) -> MediaTokens:
    """The most that any pool of them takes for a part: what is reserved has to do for the one that is chosen."""
    pools = [config.pools[pool] for order in orders for pool in _order(order).pools()]
    return MediaTokens(
        image=max(pool.image_tokens for pool in pools),
        audio=max(pool.audio_tokens for pool in pools),
        video=max(pool.video_tokens for pool in pools),
    )


def _order(section: RouteSection | OrderSection) -> PoolOrder:
    return PoolOrder(tuple(Target(t.pool, t.weight) for t in section.targets), tuple(section.fallback))
