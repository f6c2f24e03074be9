"""May this caller have this, now? dispatch.py asks before it chooses a replica, and settles the ticket at the end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from gateway.admission.account import MAX_TOKENS, Account, Ticket, clamped
from gateway.admission.budget import Budget
from gateway.admission.limits import Scope
from gateway.domain.request import Limits, Principal

MAX_CALLERS = 10_000


class Gate:
    """One per config revision: what limits a route has is taken when a caller first uses it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bound: OrderedDict[Principal, dict[str, Account]] = OrderedDict()  # the longest unused goes first

    def try_admit(
        self, principal: Principal, route_name: str, route_limits: Limits, reserve_tokens: int
    ) -> Ticket | None:
        """A ticket if this process holds enough of every limit of the request, or none applies. Asks nobody.

        None: `admit` has to ask; that is no refusal.
        """
        try:
            account = self._bound[principal][route_name]
        except KeyError:
            account = self._bind(principal, route_name, route_limits)
        else:
            self._bound.move_to_end(principal)
        return account.admit(reserve_tokens if 0 <= reserve_tokens <= MAX_TOKENS else clamped(reserve_tokens))

    async def admit(self, principal: Principal, route_name: str, route_limits: Limits, reserve_tokens: int) -> Ticket:
        """Reserve one request of `reserve_tokens` in all limits of key, user and route, or in none.

        Raises LimitExceeded; StoreUnavailable when Redis is away under `on_outage = "closed"`. A caller cancelled
        meanwhile owes nothing. A request that no limit applies to costs no Redis call.
        """
        return await self._budget.admit(self._bind(principal, route_name, route_limits), reserve_tokens)

    def _bind(self, principal: Principal, route_name: str, route_limits: Limits) -> Account:
        routes = self._bound.get(principal)
        if routes is None:
            routes = self._bound[principal] = {}
            if len(self._bound) > MAX_CALLERS:
                self._bound.popitem(last=False)
        account = routes.get(route_name)
        if account is None:
            scopes = list(_scopes(principal, route_name, route_limits))
            account = routes[route_name] = self._budget.account(scopes)
        return account


def _scopes(principal: Principal, route_name: str, route_limits: Limits) -> Iterator[Scope]:
    if not principal.key_limits.is_empty():
        yield Scope(f"key:{principal.key_id}", principal.key_limits)
    if principal.user is not None and not principal.user_limits.is_empty():
        yield Scope(f"user:{principal.user}", principal.user_limits)
    if not route_limits.is_empty():
        yield Scope(f"route:{route_name}", route_limits)
