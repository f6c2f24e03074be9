"""What a model name resolves to: pools in the order in which they may serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.domain.media import MEDIA_TOKENS, MediaTokens
from gateway.domain.request import NO_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class Target:
    pool: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class PoolOrder:
    """Targets share the load by weight; a fallback pool serves only when no target has a ready replica.

    Equal only to itself: what is worked out for it is kept under it, and looked up for every request.
    """

    targets: tuple[Target, ...]
    fallback: tuple[str, ...] = ()

    def pools(self) -> tuple[str, ...]:
        return (*(t.pool for t in self.targets), *self.fallback)


@dataclass(frozen=True, slots=True)
class Route:
    """One route of one config revision. `by_class` overrides `order` for the callers of a class."""

    name: str
    aliases: tuple[str, ...]
    order: PoolOrder
    by_class: Mapping[str, PoolOrder] = field(default_factory=dict)
    max_output_tokens: int | None = None
    clamp_output: bool = True  # over the cap: clamp (True) or refuse (False)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = NO_LIMITS
    media_tokens: MediaTokens = MEDIA_TOKENS  # of the pool that takes most for it

    def order_for(self, class_name: str) -> PoolOrder:
        return self.by_class.get(class_name, self.order)
