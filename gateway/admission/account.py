"""What one set of limits has in this process: the lease it spends from, its slots, and the tickets spent from them.

gate.py admits from it without asking anybody; budget.py fills it. Nothing here waits or talks to Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from gateway.admission.limits import TOKEN_KINDS, Kind, Limit
from gateway.admission.local import Ledger
from gateway.admission.slots import Slot
from gateway.domain.outcome import Ending, Outcome
from gateway.domain.request import NO_RATE, RateState

UNLIMITED = 1 << 60  # units or slots where no limit of that kind applies
MAX_TOKENS = 10**15  # a larger ask is more than any limit; doubles count exactly up to here
FOREVER = float("inf")


class Told(NamedTuple):
    """The tightest limit a minute of each kind as Redis last told it; `free` is what is left beyond the lease."""

    limit_requests: int | None = None
    free_requests: int = 0
    reset_requests_at: float = 0.0  # on this process's clock
    limit_tokens: int | None = None
    free_tokens: int = 0
    reset_tokens_at: float = 0.0


class Lease:
    """Units charged in one second of Redis' clock, to be spent here for a short time. Owned by its account.

    `bucket_s` None: decided without Redis, `rate` is then what the headers show. It outlives its time as long as
    tickets spent from it run, to gather in `debt` what their real tokens differ from the reserved ones.
    """

    __slots__ = (
        "ahead",
        "bucket_s",
        "debt",
        "debt_requests",
        "given_requests",
        "given_tokens",
        "is_open",
        "is_scarce",
        "noted_requests",
        "noted_tokens",
        "rate",
        "requests",
        "seen",
        "taken_s",
        "tokens",
        "told",
        "until_s",
    )

    def __init__(
        self, bucket_s: int | None, taken_s: float, until_s: float, requests: int, tokens: int, rate: RateState | None
    ) -> None:
        self.bucket_s = bucket_s
        self.taken_s = taken_s
        self.until_s = until_s
        self.requests = self.given_requests = requests
        self.tokens = self.given_tokens = tokens
        self.ahead = (0, 0)  # requests and tokens of it that were taken ahead of need
        self.is_open = False  # it may keep units for requests to come
        self.is_scarce = False  # little is left of a limit: what comes back goes to Redis at once
        self.seen = 0  # spent, as of the last look at whether it is used
        self.noted_requests = self.noted_tokens = 0  # spent, as far as the ledgers' windows know
        self.debt = 0  # tokens: used - reserved of settled tickets, not yet sent
        self.debt_requests = 0  # of refused requests, negative, not yet sent
        self.told: Told | None = None
        self.rate = rate

    @property
    def spent(self) -> int:
        return self.given_requests - self.requests


class Waiter:
    """A request that Redis decides about."""

    __slots__ = ("future", "tokens", "tries")

    def __init__(self, future: asyncio.Future[Ticket], tokens: int) -> None:
        self.future = future
        self.tokens = tokens
        self.tries = 0


class Keeper(Protocol):
    """Whoever tells Redis what comes back. Neither call raises."""

    def owe(self, account: Account, lease: Lease) -> None:
        """`lease.debt` has changed."""
        ...

    def release(self, account: Account) -> None:
        """More slots are idle than may be."""
        ...


class Account:
    """One per set of limits. A slot is free for this process as soon as its ticket is settled."""

    __slots__ = (
        "__weakref__",
        "clock",
        "has_windows",
        "idle",
        "keeper",
        "lease",
        "ledgers",
        "limits",
        "peak",
        "peak_before",
        "quiet_ticks",
        "request_ledgers",
        "running",
        "slot_ledgers",
        "slots",
        "token_ledgers",
        "unit",
        "waiters",
    )

    def __init__(
        self, limits: tuple[Limit, ...], ledgers: tuple[Ledger, ...], keeper: Keeper, clock: Callable[[], float]
    ) -> None:
        self.limits = limits
        self.ledgers = ledgers
        self.keeper = keeper
        self.clock = clock
        self.request_ledgers = tuple(ledger for ledger in ledgers if ledger.kind is Kind.REQUESTS)
        self.token_ledgers = tuple(ledger for ledger in ledgers if ledger.kind in TOKEN_KINDS)
        self.slot_ledgers = tuple(ledger for ledger in ledgers if ledger.kind is Kind.IN_FLIGHT)
        self.has_windows = bool(self.request_ledgers or self.token_ledgers)
        self.lease = Lease(None, -FOREVER, -FOREVER, 0, 0, None)
        self.running = 0
        self.slots = 0 if self.slot_ledgers else UNLIMITED  # held in Redis, used or idle
        self.idle = 0 if self.slot_ledgers else UNLIMITED  # so many of them may be idle
        self.peak = self.peak_before = 0  # most that ran at once, in this and in the last tick
        self.quiet_ticks = 0  # ticks in a row in which nothing was spent
        self.unit = 1  # tokens that a request lately asked for
        self.waiters: list[Waiter] = []

    def admit(self, tokens: int) -> Ticket | None:
        """A ticket out of what this process holds; None where that does not cover the request."""
        lease = self.lease
        if (
            lease.requests < 1
            or lease.tokens < tokens
            or self.running >= self.slots
            or self.waiters
            or self.clock() >= lease.until_s
        ):
            return None
        return self.spend(lease, tokens)

    def spend(self, lease: Lease, tokens: int) -> Ticket:
        lease.requests -= 1
        lease.tokens -= tokens
        self.running = running = self.running + 1
        if running > self.peak:
            self.peak = running
        return Ticket(self, lease, tokens)

    def settle(self, lease: Lease, reserved: int, used: int, *, is_refused: bool = False) -> None:
        self.running -= 1
        if self.slots - self.running > self.idle:
            self.keeper.release(self)
        delta = used - reserved
        if delta and self.token_ledgers:
            if lease is self.lease and lease.is_open and lease.tokens >= delta:
                lease.tokens -= delta  # the same bucket: to be spent again, or given back with the lease
            else:
                lease.debt += delta
                self.keeper.owe(self, lease)
        if is_refused and self.request_ledgers:
            if lease is self.lease and lease.is_open:
                lease.requests += 1
            else:
                lease.debt_requests -= 1
                self.keeper.owe(self, lease)


class Ticket:
    """Proof of admission. Owned by whoever got it, who settles it exactly once, with its `slot` of the pool."""

    __slots__ = ("_account", "_is_settled", "_lease", "_left_requests", "_left_tokens", "_tokens", "slot")

    def __init__(self, account: Account, lease: Lease, tokens: int) -> None:
        self._account = account
        self._lease = lease
        self._tokens = tokens
        self._left_requests = lease.requests
        self._left_tokens = lease.tokens
        self._is_settled = False
        self.slot: Slot | None = None

    @property
    def rate(self) -> RateState:
        """What the reply's `x-ratelimit-*` headers show: what was left when this was admitted, as far as known."""
        lease = self._lease
        if lease.rate is not None:
            return lease.rate
        told = lease.told
        if told is None:
            return NO_RATE
        limit_requests, free_requests, reset_requests_at, limit_tokens, free_tokens, reset_tokens_at = told
        now_s = self._account.clock()
        requests = tokens = reset_requests_s = reset_tokens_s = None
        if limit_requests is not None:
            requests = free_requests + self._left_requests
            requests = requests if requests > 0 else 0  # max() takes five times as long, as below
            reset_requests_s = reset_requests_at - now_s if reset_requests_at > now_s else 0.0
        if limit_tokens is not None:
            tokens = free_tokens + self._left_tokens
            tokens = tokens if tokens > 0 else 0
            reset_tokens_s = reset_tokens_at - now_s if reset_tokens_at > now_s else 0.0
        return RateState(limit_requests, requests, reset_requests_s, limit_tokens, tokens, reset_tokens_s)

    def settle(self, outcome: Outcome) -> None:
        """Its slots are free, real tokens take the reservation's place. Never raises; a second call is void.

        A request that was refused after all counts no more; any other stays counted however it ended. What Redis has to
        know is sent in the background.
        """
        if self._is_settled:
            return
        self._is_settled = True
        if self.slot is not None:
            self.slot.release()
        usage = outcome.usage
        used = 0 if usage is None else usage.prompt_tokens + usage.completion_tokens
        self._account.settle(self._lease, self._tokens, clamped(used), is_refused=outcome.ending is Ending.REFUSED)


def clamped(tokens: int) -> int:
    return min(max(0, tokens), MAX_TOKENS)
