"""One inference request as the gateway sees it after decoding, and the caller behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.domain.endpoint import Endpoint
from gateway.domain.media import Media


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one key, user or route; None means no limit of that kind."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    in_flight: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None

    def is_empty(self) -> bool:
        return self == NO_LIMITS


NO_LIMITS = Limits()


class RateState(NamedTuple):
    """What is left of the tightest limit a minute of each kind, for `x-ratelimit-*`; None: not limited, or not known.

    `reset_…_s` is the time in seconds until the whole limit is free again if nothing more is asked.
    """

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_s: float | None = None
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_s: float | None = None


NO_RATE = RateState()


@dataclass(frozen=True, slots=True, eq=False)
class Principal:
    """The authenticated caller. Never holds the key itself.

    Equal only to itself: what admission binds to a caller is found by it on every request.
    """

    key_id: str
    user: str | None
    class_name: str
    models: tuple[str, ...]  # route names, or ("*",)
    key_limits: Limits = NO_LIMITS
    user_limits: Limits = NO_LIMITS

    def may_use(self, route: str) -> bool:
        return "*" in self.models or route in self.models


@dataclass(frozen=True, slots=True)
class Form:
    """A multipart body as it came, and where in it the model's name stands: it is all that is changed upstream."""

    body: bytes
    content_type: bytes  # with the boundary
    model_begin: int
    model_end: int


@dataclass(slots=True)
class InferenceRequest:
    """A decoded request. `fields` maps each top-level JSON field to its raw JSON bytes, in the client's order.

    Only the fields that the gateway owns are decoded here; everything else is carried as it came. Of a form, `fields`
    has none: `form` holds it whole.
    """

    id: str
    endpoint: Endpoint
    principal: Principal
    class_name: str
    model: str
    stream: bool
    wants_usage: bool  # the client itself asked for the usage event of a stream, or gets it anyway on this path
    max_output_tokens: int | None  # as asked (max_completion_tokens before max_tokens); None: the client said nothing
    output_field: str  # the one the client used, or the one we write when it used none; "": the path has no output
    n: int  # answers asked for in all: choices × prompts
    body_bytes: int
    is_countable: bool  # its prompt's tokens can be counted by a worker: text alone, one prompt
    fields: Mapping[str, Any]
    media: Media | None = None  # images and the like; None: it is text alone
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())  # the few that travel upstream
    prompts: int = 1  # each has a window for itself
    prompt_ids: int | None = None  # the prompt came as this many token ids in all; None: as text
    longest_ids: int = 0  # of those, in the longest prompt
    repeated_bytes: int = 0  # read by the engine beyond the body's own: a query is read again for each document
    form: Form | None = None

    @property
    def is_multimodal(self) -> bool:
        """What it costs in tokens, its bytes do not tell."""
        return self.media is not None
