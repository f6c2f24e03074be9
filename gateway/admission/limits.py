"""What a decision about budgets is made of, and what it says to the caller. Pure; for all that decides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.domain.errors import LimitExceeded
from gateway.domain.request import Limits, RateState
from gateway.domain.store_keys import TAG

WINDOW_S = 60
SPAN_S = 1.0  # what is taken ahead may be spent for so long
KEEP_S = WINDOW_S + 1  # a bucket counts for so many seconds after its own: until its last possible spending is 60 s old
SLOT_WAIT_S = 1.0  # nobody knows when a slot comes free: ask again in a second
BACK_S = 1.0  # what another process took ahead and does not use is back by then


class Kind(StrEnum):
    REQUESTS = "requests_per_min"
    TOKENS = "tokens_per_min"
    IN_FLIGHT = "in_flight"
    DAY = "tokens_per_day"
    MONTH = "tokens_per_month"


UNITS = {
    Kind.REQUESTS: "requests a minute",
    Kind.TOKENS: "tokens a minute",
    Kind.IN_FLIGHT: "requests at once",
    Kind.DAY: "tokens a day",
    Kind.MONTH: "tokens a month",
}
PERIODS = frozenset({Kind.DAY, Kind.MONTH})  # they end at 00:00 UTC, see period.py
TOKEN_KINDS = PERIODS | {Kind.TOKENS}


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose limits: `id` is "key:<key id>", "user:<name>" or "route:<name>"."""

    id: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of one scope. `key` is where Redis keeps what is used of it."""

    scope: str
    kind: Kind
    value: int

    @property
    def key(self) -> str:
        return f"{TAG}:{self.kind}:{self.scope}"

    def ask(self, tokens: int) -> int:
        return tokens if self.kind in TOKEN_KINDS else 1


@dataclass(frozen=True, slots=True)
class Reading:
    """One limit at the moment of a decision.

    `used` includes this request if it was admitted. `wait_s`: 0 if the limit lets it pass, None if it never will.
    `allowed` is the limit's value, or this process's share of it while Redis is away.
    """

    limit: Limit
    allowed: int
    used: int
    wait_s: float | None
    reset_s: float

    @property
    def passes(self) -> bool:
        return self.wait_s == 0

    @property
    def remaining(self) -> int:
        return max(0, self.allowed - self.used)


def wait_s(buckets: Iterable[tuple[int, int]], now_s: float, excess: int) -> float:
    """Seconds until `excess` has left a window; 0 if there is none to leave. `buckets`: (second, amount), any order."""
    if excess <= 0:
        return 0.0
    for second, amount in sorted(buckets):
        excess -= amount
        if excess <= 0:
            return second + KEEP_S + 1 - now_s
    return 0.0


def limits_of(scopes: Iterable[Scope]) -> tuple[Limit, ...]:
    """Every limit that is set, in the order of the scopes."""
    return tuple(
        Limit(scope.id, kind, value)
        for scope in scopes
        for kind, value in (
            (Kind.REQUESTS, scope.limits.requests_per_min),
            (Kind.TOKENS, scope.limits.tokens_per_min),
            (Kind.IN_FLIGHT, scope.limits.in_flight),
            (Kind.DAY, scope.limits.tokens_per_day),
            (Kind.MONTH, scope.limits.tokens_per_month),
        )
        if value is not None
    )


def rate_state(readings: Sequence[Reading]) -> RateState:
    """The tightest limit a minute of each kind: the one with the least left (of equal ones, the smaller)."""
    requests = _tightest(readings, Kind.REQUESTS)
    tokens = _tightest(readings, Kind.TOKENS)
    return RateState(
        limit_requests=requests.allowed if requests else None,
        remaining_requests=requests.remaining if requests else None,
        reset_requests_s=requests.reset_s if requests else None,
        limit_tokens=tokens.allowed if tokens else None,
        remaining_tokens=tokens.remaining if tokens else None,
        reset_tokens_s=tokens.reset_s if tokens else None,
    )


def _tightest(readings: Sequence[Reading], kind: Kind) -> Reading | None:
    of_kind = (reading for reading in readings if reading.limit.kind is kind)
    return min(of_kind, key=lambda reading: (reading.remaining, reading.allowed), default=None)


def refusal(readings: Sequence[Reading], tokens: int) -> LimitExceeded:
    """The error for a request of `tokens` that at least one of `readings` holds up: it names the one to wait for."""
    blocking = max(
        (reading for reading in readings if not reading.passes),
        key=lambda reading: float("inf") if reading.wait_s is None else reading.wait_s,
    )
    limit, asked = blocking.limit, blocking.limit.ask(tokens)
    owner, _, name = limit.scope.partition(":")
    subject = f"The limit of {owner if owner != 'route' else 'model'} '{name}'"
    share = "" if blocking.allowed == limit.value else f" ({blocking.allowed} through this process for now)"
    facts = f"{subject}, {limit.value} {UNITS[limit.kind]}{share},"
    if blocking.wait_s is None:
        text = f"{facts} is less than the {asked} that this request asks for; waiting does not help: ask for less."
    else:
        wait_s = math.ceil(blocking.wait_s * 10) / 10
        text = f"{facts} is used up: {blocking.used} used, {asked} asked. Try again in {wait_s:.10g} s."
    return LimitExceeded(
        text, retry_after_s=blocking.wait_s, scope=limit.scope, kind=limit.kind.value, rate=rate_state(readings)
    )
