"""Reserves and settles budgets in Redis, one script call per decision; gate.py calls it, app.py starts and closes it.

While Redis is away `redis.on_outage` decides: `share` (this process goes on alone with the limit divided by the
gateway processes last seen alive), `open` (no limits) or `closed` (StoreUnavailable).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from gateway.admission.limits import Kind, Limit, Reading, Scope, limits_of, rate_state, refusal
from gateway.admission.link import PATIENT_S, PROBE_S, RedisLink
from gateway.admission.local import LocalBudget
from gateway.config.tasks import end_task
from gateway.domain.errors import StoreUnavailable
from gateway.domain.request import NO_RATE, RateState

log = logging.getLogger(__name__)
T = TypeVar("T")

LEASE_S = 30.0  # a slot whose process died comes free after this
RENEW_S = 10.0
GATEWAYS_KEY = "poolgate:gateways"
MAX_TOKENS = 10**15  # a larger ask is more than any limit; doubles count exactly up to here
MAX_OWED = 10_000


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one request holds. `bucket_s` is the Redis second of its charge; None: decided without Redis."""

    lease_id: str
    limits: tuple[Limit, ...]
    tokens: int
    bucket_s: int | None
    charged_s: float  # on this process's clock
    rate: RateState


NOTHING = Reservation("", (), 0, None, 0.0, NO_RATE)  # of a request that no limit applies to: never asks Redis


@dataclass(frozen=True, slots=True)
class _GiveBack:
    keys: tuple[str, ...]
    args: tuple[str | int, ...]
    since_s: float


class Budget:
    """One per process and config revision's outage policy. `start()` runs its background task, `aclose()` ends it."""

    def __init__(
        self,
        link: RedisLink,
        *,
        on_outage: Literal["share", "open", "closed"],
        expected_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expected_processes`: how many gateways to assume until Redis told how many are alive."""
        self._link = link
        self._on_outage = on_outage
        self._clock = clock
        self._process_id = uuid.uuid4().hex
        self._text = files("gateway.admission").joinpath("budget.lua").read_text()
        self._sha = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()
        self._local = LocalBudget()
        self._held: dict[str, Reservation] = {}
        self._owed: dict[str, _GiveBack] = {}  # give-backs that Redis has not confirmed, by lease id
        self._owes = asyncio.Event()
        self._calls: set[asyncio.Task[Any]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self.processes = max(1, expected_processes)  # gateways alive, as last heard

    # --- one request --------------------------------------------------------------------------------------------------

    async def reserve(self, scopes: Sequence[Scope], tokens: int) -> Reservation:
        """All limits of `scopes` charged with one request of `tokens`, or none of them.

        Raises LimitExceeded, or StoreUnavailable under `closed`. A caller cancelled meanwhile owes nothing: what was
        reserved for it is given back. The caller settles the reservation exactly once.
        """
        limits = limits_of(scopes)
        if not limits:
            return NOTHING
        decision = self._spawn(self._decide(limits, min(max(0, tokens), MAX_TOKENS)))
        try:
            return await asyncio.shield(decision)
        except asyncio.CancelledError:
            self._spawn(self._undo(decision))
            raise

    async def settle(self, reservation: Reservation, used_tokens: int) -> None:
        """Real tokens replace the reserved ones in the second of their charge; the slot comes free. Never raises.

        A second call for the same reservation does nothing. Cancelling the caller does not stop the give-back. What
        Redis does not confirm is sent again for a minute; after that it has lapsed by itself.
        """
        if self._held.pop(reservation.lease_id, None) is None:
            return
        delta = min(max(0, used_tokens), MAX_TOKENS) - reservation.tokens
        self._local.settle(reservation.limits, reservation.charged_s, delta)
        slots = _slots(reservation.limits)
        tokens = tuple(limit.key for limit in reservation.limits if limit.kind is Kind.TOKENS)
        if reservation.bucket_s is None or delta == 0:
            tokens = ()
        if not slots and not tokens:
            return
        lease = reservation.lease_id
        give_back = _GiveBack(
            (_marker(lease), *slots, *tokens),
            ("settle", lease, reservation.bucket_s or 0, delta if tokens else 0, len(slots)),
            self._clock(),
        )
        await asyncio.shield(self._spawn(self._give_back(lease, give_back)))

    def settle_soon(self, reservation: Reservation, used_tokens: int) -> None:
        """As `settle`, without waiting."""
        self._spawn(self.settle(reservation, used_tokens))

    async def _decide(self, limits: tuple[Limit, ...], tokens: int) -> Reservation:
        lease = uuid.uuid4().hex
        args: list[str | int] = ["reserve", tokens, lease, int(LEASE_S * 1000)]
        for limit in limits:
            args += (limit.kind.value, limit.value)
        bucket_s: int | None
        try:
            reply = await self._script([limit.key for limit in limits], args)
        except StoreUnavailable:
            if self._on_outage == "closed":
                raise
            if self._on_outage == "open":
                return NOTHING
            now_s = self._clock()
            readings = self._local.read(limits, tokens, self.processes, now_s)
            bucket_s = None
        else:
            now_s = self._clock()
            readings = readings_of(limits, reply)
            bucket_s = reply[1]
        if not all(reading.passes for reading in readings):
            raise refusal(readings, tokens)
        self._local.charge(limits, tokens, now_s)
        if bucket_s is None:
            readings = self._local.read(limits, 0, self.processes, now_s)
        reservation = Reservation(lease, limits, tokens, bucket_s, now_s, rate_state(readings))
        self._held[lease] = reservation
        return reservation

    async def _undo(self, decision: asyncio.Task[Reservation]) -> None:
        """The caller left while `decision` was on its way to Redis."""
        await asyncio.wait([decision])
        if not decision.cancelled() and decision.exception() is None:
            await self.settle(decision.result(), 0)

    async def _give_back(self, lease: str, give_back: _GiveBack) -> None:
        try:
            await self._script(give_back.keys, give_back.args, timeout_s=PATIENT_S)
        except StoreUnavailable:
            self._owe(lease, give_back)

    def _owe(self, lease: str, give_back: _GiveBack) -> None:
        if len(self._owed) < MAX_OWED:
            self._owed[lease] = give_back
            self._owes.set()

    async def _script(
        self, keys: Sequence[str], args: Sequence[str | int], *, timeout_s: float | None = None
    ) -> list[int]:
        async def run(redis: Redis) -> Any:
            try:
                return await redis.evalsha(self._sha, len(keys), *keys, *cast(Any, args))
            except NoScriptError:  # Redis was restarted, or its scripts were flushed: EVAL caches it again
                return await redis.eval(self._text, len(keys), *keys, *cast(Any, args))

        return cast(list[int], await self._link.call(run, timeout_s=timeout_s))

    # --- what goes on beside the requests -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to renew leases and to count as alive; in a running event loop, once."""
        self._keeper = asyncio.create_task(self._keep(), name="budget-leases")

    async def aclose(self, deadline_s: float = PATIENT_S) -> None:
        """End the background task, after at most `deadline_s` for the give-backs that are on their way or owed."""
        if self._keeper is not None:
            await end_task(self._keeper)
            self._keeper = None
        with contextlib.suppress(TimeoutError, StoreUnavailable):
            async with asyncio.timeout(deadline_s):
                while self._calls:
                    await asyncio.wait(self._calls)
                if self._owed:
                    await self.renew()
                await self._link.call(lambda redis: redis.zrem(GATEWAYS_KEY, self._process_id))
        for call in set(self._calls):
            await end_task(call)

    async def _keep(self) -> None:
        """Every 10 s, and soon after a give-back failed: renew what is held, repeat what is owed, count as alive."""
        while True:
            try:
                await self.renew()
            except StoreUnavailable:
                pass  # the link has logged it
            except Exception:
                log.exception("renewing leases failed; the next try is in %.0f s", RENEW_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._owes.wait()
                await asyncio.sleep(PROBE_S)  # a moment for Redis to come back, and for more to gather

    async def renew(self) -> None:
        """One round trip for all of it. Raises StoreUnavailable."""
        self._owes.clear()
        now_s = self._clock()
        owed = {lease: owed for lease, owed in self._owed.items() if now_s - owed.since_s < 2 * LEASE_S}
        self._owed = dict(owed)
        held = {lease: slots for lease, reservation in self._held.items() if (slots := _slots(reservation.limits))}
        by_key: dict[str, list[str]] = {}
        for lease, keys in held.items():
            for key in keys:
                by_key.setdefault(key, []).append(lease)

        async def run(redis: Redis) -> list[Any]:
            pipe = redis.pipeline(transaction=False)
            pipe.script_load(self._text)
            for key, leases in by_key.items():
                pipe.evalsha(self._sha, 1, key, "renew", int(LEASE_S * 1000), *leases)
            for give_back in owed.values():
                pipe.evalsha(self._sha, len(give_back.keys), *give_back.keys, *cast(Any, give_back.args))
            pipe.evalsha(self._sha, 1, GATEWAYS_KEY, "beat", self._process_id, int(LEASE_S * 1000))
            return await pipe.execute()

        try:
            replies = await self._link.call(run, timeout_s=PATIENT_S)
        except StoreUnavailable:
            if self._owed:
                self._owes.set()
            raise
        self.processes = max(1, int(replies[-1]))
        for lease in owed:
            self._owed.pop(lease, None)
        for lease, keys in held.items():
            if lease not in self._held and lease not in self._owed:
                # settled while its renewal was on the way, which may have taken the slot again
                self._owe(lease, _GiveBack((_marker(lease), *keys), ("settle", lease, 0, 0, len(keys)), now_s))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that ends by its own deadline; kept until then, whoever stops waiting for it."""
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task


def _slots(limits: Sequence[Limit]) -> tuple[str, ...]:
    return tuple(limit.key for limit in limits if limit.kind is Kind.IN_FLIGHT)


def _marker(lease: str) -> str:
    """Where Redis notes that the tokens of a lease have been corrected."""
    return f"{{poolgate}}:settled:{lease}"


def readings_of(limits: Sequence[Limit], reply: Sequence[int]) -> list[Reading]:
    """`reply` as budget.lua documents it for `reserve`."""
    return [
        Reading(limit, limit.value, used, None if wait_ms < 0 else wait_ms / 1000, reset_ms / 1000)
        for limit, used, wait_ms, reset_ms in zip(limits, reply[2::3], reply[3::3], reply[4::3], strict=True)
    ]
