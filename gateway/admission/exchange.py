"""One script call of budget.lua: what goes into it, and what its reply means. budget.py has one of them on its way.

The script is sent by its hash; a Redis that was restarted, or whose scripts were flushed, gets its text again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from gateway.admission.account import Account, Lease, Told, Waiter
from gateway.admission.limits import BACK_S, KEEP_S, PERIODS, SLOT_WAIT_S, Kind, Limit, Reading, wait_s
from gateway.admission.link import RedisLink
from gateway.admission.local import Ledger
from gateway.admission.period import PeriodUse
from gateway.domain.store_keys import TAG

ALIVE_MS = 30_000  # a process that says nothing for so long is no longer counted
SLOTS_S = 30.0  # slots whose process died come free after this
GATEWAYS_KEY = f"{TAG}:gateways"
MAX_ASKS = 128
MAX_AHEAD = 10_000


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Corrections of buckets: (key, second, delta, delta of what was taken ahead). Applied once, however often sent.

    `first` is the number of the first exchange that carries it: a later one must carry it too, until one is answered.
    """

    first: int
    since_s: float
    entries: list[tuple[str, int, int, int]]


@dataclass(slots=True)
class Wish:
    """What one account asks for: its waiting requests, and so much ahead of need."""

    account: Account
    waiters: list[Waiter]
    ahead: int
    unit: int
    slots: int


def wish_of(account: Account, now_s: float, recent_s: float) -> Wish:
    """Takes the waiting requests out of the account's queue.

    What is taken ahead follows what was spent since the last take, if that was not more than `recent_s` ago: twice as
    much, so that a steady caller's lease lasts its whole second, and an occasional caller's is nothing.
    """
    waiters = [waiter for waiter in account.waiters[:MAX_ASKS] if not waiter.future.done()]
    del account.waiters[:MAX_ASKS]
    lease = account.lease
    spent = lease.spent if now_s - lease.taken_s <= recent_s else 0
    if waiters:
        account.unit = max(1, *(waiter.tokens for waiter in waiters))
    ahead = min(MAX_AHEAD, max(0, 2 * spent + len(waiters) - (spent == 0)))
    busy = max(account.peak, account.peak_before, account.running + len(waiters))
    slots = max(0, 2 * busy - account.slots - len(waiters)) if ahead and account.slot_ledgers else 0
    return Wish(account, waiters, ahead, account.unit, slots)


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to one wish, as budget.lua documents it.

    `readings`: used, taken ahead, newest second, buckets; of a day or month: used, taken ahead, the second it ends.
    """

    verdicts: list[int]
    ahead: int
    slots: int
    idle: int
    is_scarce: int  # 1: yes
    readings: list[list[int]]

    def lease(self, wish: Wish, sent_s: float, until_s: float, now_ms: int) -> Lease:
        """What was granted, not yet spent. `sent_s`, `until_s` on this process's clock; `now_ms` on Redis'."""
        account = wish.account
        passed = [waiter.tokens for waiter, verdict in zip(wish.waiters, self.verdicts, strict=True) if verdict]
        requests, tokens = len(passed) + self.ahead, sum(passed) + self.ahead * wish.unit
        lease = Lease(now_ms // 1000, sent_s, until_s, requests, tokens, None)
        lease.ahead = (self.ahead, self.ahead * wish.unit)
        lease.is_open = self.ahead > 0 or not account.has_windows
        lease.is_scarce = self.is_scarce == 1
        lease.told = told(account.limits, self.readings, sent_s, now_ms)
        return lease

    def tell(self, account: Account, lease: Lease) -> None:
        """The ledgers of days and months learn what all have used: of `lease`, they are told as it is spent."""
        for ledger, (used, *_) in zip(account.ledgers, self.readings, strict=True):
            if isinstance(ledger.window, PeriodUse):
                ledger.window.told(used - lease.given_tokens, lease.taken_s)

    def refused(self, limits: Sequence[Limit], tokens: int, now_ms: int) -> list[Reading]:
        return [
            reading(limit, told, limit.ask(tokens), now_ms) for limit, told in zip(limits, self.readings, strict=True)
        ]


def reading(limit: Limit, reply: Sequence[int], ask: int, now_ms: int) -> Reading:
    """Where a limit stands for one more request of `ask`."""
    used, ahead, last = reply[:3]
    now_s, excess = now_ms / 1000, used + ask - limit.value
    if limit.kind is Kind.IN_FLIGHT:
        return Reading(limit, limit.value, used, SLOT_WAIT_S if excess > 0 else 0.0, 0.0)
    if limit.kind in PERIODS:
        reset_s = free_s = last - now_s
    else:
        reset_s = last + KEEP_S + 1 - now_s if last else 0.0
        free_s = wait_s(zip(reply[3::2], reply[4::2], strict=True), now_s, excess)
    wait: float | None = 0.0
    if ask > limit.value:
        wait = None
    elif excess > 0:
        wait = min(free_s, BACK_S) if excess <= ahead else free_s
    return Reading(limit, limit.value, used, wait, reset_s)


def told(limits: Sequence[Limit], readings: Sequence[Sequence[int]], at_s: float, now_ms: int) -> Told:
    """The limit a minute of each kind with the least left; of equal ones, the smaller.

    `at_s` is `now_ms` on our clock.
    """
    least: dict[Kind, tuple[int, int, float]] = {}
    for limit, (used, _, newest, *_) in zip(limits, readings, strict=True):
        resets_s = newest + KEEP_S + 1 - now_ms / 1000 if newest else 0.0
        this = (limit.value - used, limit.value, at_s + resets_s)
        if limit.kind not in least or this < least[limit.kind]:
            least[limit.kind] = this
    requests, tokens = least.get(Kind.REQUESTS), least.get(Kind.TOKENS)
    return Told(
        *((requests[1], requests[0], requests[2]) if requests else (None, 0, 0.0)),
        *((tokens[1], tokens[0], tokens[2]) if tokens else (None, 0, 0.0)),
    )


@dataclass(frozen=True, slots=True)
class Answer:
    processes: int
    now_ms: int
    grants: list[Grant]


@dataclass(slots=True)
class Exchange:
    """`number` rises with each exchange of a process; `processes`: at least so many are assumed to share.

    `answered` is the number of the last one whose reply came: what an executed one after it took is undone.
    """

    process: str
    number: int
    answered: int
    processes: int
    gives: list[GiveBack]
    slots: list[Ledger]
    wishes: list[Wish]
    keys: dict[str, int] = field(default_factory=dict)

    def encode(self) -> tuple[list[str], bytes]:
        """KEYS and ARGV[1]."""
        self.keys = {GATEWAYS_KEY: 1, f"{TAG}:process:{self.process}": 2}
        body = {
            "process": self.process,
            "number": self.number,
            "answered": self.answered,
            "alive_ms": ALIVE_MS,
            "slots_ms": int(SLOTS_S * 1000),
            "processes": self.processes,
            "gives": [
                {"first": give.first, "entries": [(self._at(key), *rest) for key, *rest in give.entries]}
                for give in self.gives
            ],
            "slots": [(self._at(ledger.key), ledger.held) for ledger in self.slots],
            "takes": [
                {
                    "asks": [waiter.tokens for waiter in wish.waiters],
                    "ahead": wish.ahead,
                    "unit": wish.unit,
                    "slots": wish.slots,
                    "limits": [
                        (self._at(ledger.key), limit.kind.value, limit.value)
                        for limit, ledger in zip(wish.account.limits, wish.account.ledgers, strict=True)
                    ],
                }
                for wish in self.wishes
            ],
        }
        return list(self.keys), msgspec.json.encode(body)

    def _at(self, key: str) -> int:
        return self.keys.setdefault(key, len(self.keys) + 1)


class Script:
    """budget.lua over one link."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._text = files("gateway.admission").joinpath("budget.lua").read_text()
        self._sha = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    async def send(self, exchange: Exchange, timeout_s: float | None) -> Answer:
        """Raises StoreUnavailable; then nobody knows whether it was, or will be, executed."""
        keys, body = exchange.encode()

        async def run(redis: Redis) -> Any:
            try:
                return await redis.evalsha(self._sha, len(keys), *keys, cast(Any, body))
            except NoScriptError:  # EVAL caches it again
                return await redis.eval(self._text, len(keys), *keys, cast(Any, body))

        _, processes, now_ms, *grants = await self._link.call(run, timeout_s=timeout_s)
        return Answer(max(1, processes), now_ms, [Grant(*grant) for grant in grants])
