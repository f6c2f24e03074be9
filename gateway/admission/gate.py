"""May this caller have this, now? dispatch.py asks before it chooses a replica, and settles the ticket at the end."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.admission.budget import Budget, Reservation
from gateway.admission.limits import Scope
from gateway.domain.outcome import Outcome
from gateway.domain.request import Limits, Principal, RateState

__all__ = ["Gate", "RateState", "Ticket"]


class Ticket:
    """Proof of admission. Owned by whoever got it, who settles it exactly once."""

    __slots__ = ("_budget", "_is_settled", "_reservation")

    def __init__(self, budget: Budget, reservation: Reservation) -> None:
        self._budget = budget
        self._reservation = reservation
        self._is_settled = False

    @property
    def rate(self) -> RateState:
        """What the reply's `x-ratelimit-*` headers show."""
        return self._reservation.rate

    def settle(self, outcome: Outcome) -> None:
        """Give the slot back and put the real tokens in the reservation's place. Never raises; a second call is void.

        The request itself stays counted however it ended. Cancelling the caller does not stop the give-back.
        """
        if self._is_settled:
            return
        self._is_settled = True
        used = outcome.usage.total_tokens if outcome.usage is not None else 0
        self._budget.settle_soon(self._reservation, used)


class Gate:
    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    async def admit(self, principal: Principal, route_name: str, route_limits: Limits, reserve_tokens: int) -> Ticket:
        """Reserve one request of `reserve_tokens` in all limits of key, user and route, or in none.

        Raises LimitExceeded; StoreUnavailable when Redis is away under `on_outage = "closed"`.
        A request that no limit applies to costs no Redis call.
        """
        scopes = list(_scopes(principal, route_name, route_limits))
        return Ticket(self._budget, await self._budget.reserve(scopes, reserve_tokens))


def _scopes(principal: Principal, route_name: str, route_limits: Limits) -> Iterator[Scope]:
    if not principal.key_limits.is_empty():
        yield Scope(f"key:{principal.key_id}", principal.key_limits)
    if principal.user is not None and not principal.user_limits.is_empty():
        yield Scope(f"user:{principal.user}", principal.user_limits)
    if not route_limits.is_empty():
        yield Scope(f"route:{route_name}", route_limits)
