"""The story of one request, top to bottom: resolve → fit → admit → choose → wait → send → relay → settle.

Called by edge/inference.py with a decoded request; everything it needs is handed to it. Errors are raised to the caller
as GatewayError; the ticket is settled exactly once however the story ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

from gateway.admission import length
from gateway.admission.account import Ticket
from gateway.admission.gate import Gate
from gateway.admission.length import Fit
from gateway.admission.slots import Slot, Slots
from gateway.config.schema import Config
from gateway.domain.errors import ClientGone, ContextTooLong, GatewayError, InternalError, LimitExceeded, UpstreamError
from gateway.domain.outcome import Ending, Outcome
from gateway.domain.record import AccessRecord
from gateway.domain.replica import ReplicaRecord
from gateway.domain.request import InferenceRequest, RateState
from gateway.domain.route import PoolOrder, Route
from gateway.fleet.registry import Registry
from gateway.fleet.snapshot import Snapshot
from gateway.routing.choose import beginning_with, by_load, choose, not_ready, pools_to_wait_for
from gateway.routing.table import RouteTable
from gateway.upstream.attempt import Attempts
from gateway.upstream.body import body_for
from gateway.upstream.forward import STREAM_HEADERS
from gateway.upstream.journey import Downstream, Headers, Journey


class Caller(Downstream, Protocol):
    """The downstream side of an exchange, plus what every reply tells about limits."""

    rate: RateState
    queue_s: float | None

    def comment_every(self, interval_s: float, headers: Headers) -> None:
        """Break each silence of that length with an SSE comment, opening the stream with `headers` if need be."""
        ...


class Dispatcher:
    """One per runtime; holds no state of a request."""

    def __init__(
        self,
        config: Config,
        routes: RouteTable,
        gate: Gate,
        slots: Slots,
        fleet: Registry,
        attempts: Attempts,
        rng: Random,
    ) -> None:
        self._sse_keepalive_s = config.gateway.sse_keepalive_s
        self._classes = config.classes
        self._pools = config.pools
        self.routes = routes
        self._gate = gate
        self._slots = slots
        self._fleet = fleet
        self._attempts = attempts
        self._rng = rng

    async def serve(self, request: InferenceRequest, caller: Caller, record: AccessRecord) -> None:
        """Answers `caller` or raises GatewayError; fills `record` as it goes."""
        if self._sse_keepalive_s and request.stream:
            caller.comment_every(self._sse_keepalive_s, STREAM_HEADERS)
        route = self.routes.resolve(request.model, request.principal)
        record.route = route.name
        order = route.order_for(request.class_name)
        snapshot = self._fleet.snapshot()
        windows = snapshot.windows(order)
        if not windows:
            raise not_ready(order, snapshot)
        try:
            fit = await length.fit(request, route, windows, lambda: self._count(request, snapshot, windows))
        except ContextTooLong as exc:
            if self._may_a_larger_pool_come(order, windows):
                raise not_ready(order, snapshot) from exc
            raise

        ticket = self._gate.try_admit(request.principal, route.name, route.limits, fit.reserve_tokens)
        if ticket is None:
            ticket = await self._admit(request, route, fit, caller)
        caller.rate = ticket.rate
        record.admit_s = time.monotonic() - record.began_s
        journey = Journey(
            request,
            caller,
            record,
            lambda replica: self._body(request, route, fit, replica),
            ticket.settle,
            fit.prompt_tokens,
            fit.was_clamped,
        )
        outcome = Outcome(Ending.FAILED, 500, None)
        try:
            candidates = choose(order, self._fleet.snapshot(), fit.pools, self._rng)
            if request.endpoint.rules.costs_tokens:
                pools = pools_to_wait_for(order, candidates)
                ticket.slot = slot = self._slots.take(pools, request.class_name)
                if slot is None:
                    ticket.slot = slot = await self._wait(pools, request, fit, caller, record)
                    candidates = choose(order, self._fleet.snapshot(), fit.pools, self._rng)
                candidates = beginning_with(slot.pool, candidates)
                journey.may_enter = slot.move
            outcome = await self._attempts.run(journey, candidates)
        except GatewayError as exc:
            usage = journey.cut_off() if journey.first_byte_at is not None else None  # an error reply costs nothing
            outcome = Outcome(ending_of(exc), 0, usage, exc.code)
            raise
        except asyncio.CancelledError:
            usage = journey.cut_off() if journey.was_sent else None  # once asked, an engine may have read the prompt
            outcome = Outcome(Ending.CLIENT_GONE, 499, usage)
            raise
        except Exception:  # a defect of ours: what the engine did is paid all the same
            outcome = Outcome(Ending.FAILED, 500, journey.cut_off() if journey.first_byte_at is not None else None)
            raise
        finally:
            ticket.settle(outcome)
            note(record, outcome, journey)

    def _may_a_larger_pool_come(self, order: PoolOrder, windows: Mapping[str, int | None]) -> bool:
        """Could a pool that is not ready hold more than those that are (`windows`)? One that does not say, could."""
        largest = max(window or 0 for window in windows.values())
        absent = [self._pools[pool].max_model_len for pool in order.pools() if pool not in windows]
        return any(window is None or window > largest for window in absent)

    async def _admit(self, request: InferenceRequest, route: Route, fit: Fit, caller: Caller) -> Ticket:
        """By Redis' word: what this process holds of the limits does not cover the request."""
        try:
            return await self._gate.admit(request.principal, route.name, route.limits, fit.reserve_tokens)
        except LimitExceeded as exc:
            caller.rate = exc.rate
            raise

    async def _wait(
        self, pools: Sequence[str], request: InferenceRequest, fit: Fit, caller: Caller, record: AccessRecord
    ) -> Slot:
        principal = request.principal
        user = f"key:{principal.key_id}" if principal.user is None else f"user:{principal.user}"
        began_s = time.monotonic()
        record.pool = pools[0]
        try:
            return await self._slots.wait(pools, request.class_name, user, fit.reserve_tokens)
        finally:
            caller.queue_s = record.queue_s = time.monotonic() - began_s

    async def _count(
        self, request: InferenceRequest, snapshot: Snapshot, windows: Mapping[str, int | None]
    ) -> int | None:
        """Exact prompt tokens from a ready replica; the pools of one route share a tokenizer or are near enough."""
        pools = sorted(windows, key=lambda pool: windows[pool] or 0, reverse=True)
        replicas = [
            r for pool in pools for r in by_load(snapshot.ready(pool), snapshot, self._rng) if r.engine == "vllm"
        ]
        return await self._attempts.count_tokens(request, replicas)

    def _body(self, request: InferenceRequest, route: Route, fit: Fit, replica: ReplicaRecord) -> bytes:
        return body_for(
            request,
            replica,
            defaults=route.defaults,
            output=fit.output_for(replica.max_model_len),
            was_clamped=fit.was_clamped,
            priority=self._classes[request.class_name].priority,
        )


def ending_of(error: GatewayError) -> Ending:
    """How a request ended that was answered with `error`, wherever on its way that was."""
    match error:
        case ClientGone():
            return Ending.CLIENT_GONE
        case UpstreamError():
            return Ending.UPSTREAM_ERROR
        case InternalError():
            return Ending.FAILED
        case _:
            return Ending.REFUSED


def note(record: AccessRecord, outcome: Outcome, journey: Journey) -> None:
    record.status = outcome.status  # 0: that of the error that is raised
    record.ending = outcome.ending.word
    record.error_code = outcome.error_code
    if outcome.usage is not None:
        record.prompt_tokens = outcome.usage.prompt_tokens
        record.completion_tokens = outcome.usage.completion_tokens
    if journey.first_byte_at is not None:
        record.ttft_s = journey.first_byte_at - record.began_s
