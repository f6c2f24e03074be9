"""Brings one request to a replica, and to another one where that may help, until the first byte. Called by dispatch."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from gateway.config.schema import RetrySection, TimeoutsSection
from gateway.domain.errors import EngineDied, GatewayError, UpstreamError
from gateway.domain.outcome import Ending, Outcome
from gateway.domain.replica import ReplicaRecord
from gateway.domain.request import InferenceRequest
from gateway.fleet.registry import Registry
from gateway.upstream.body import JSON, content_type_for, count_of, count_request
from gateway.upstream.counts import Counts, key_of
from gateway.upstream.forward import forward
from gateway.upstream.journey import Journey
from gateway.upstream.retry import MAX_REFUSED, RetryBudget, never_connected, other_may_mend
from gateway.upstream.transport import Deadlines, Transport, UpstreamRequest

log = logging.getLogger(__name__)
MAX_COUNT_TRIES = 2
MAX_COUNT_BYTES = 64 << 20  # /tokenize answers with every token's number
COUNT_DEADLINES = Deadlines(connect_s=1, first_byte_s=5, gap_s=5, total_s=10)
# what may travel upstream of the caller's own headers; everything else stays here
PASSED_HEADERS = frozenset({b"traceparent", b"tracestate", b"x-session-id"})
ITS_ENGINE_DIED = "its engine died"
REFUSED = "refused a connection"


class Attempts:
    def __init__(
        self,
        transport: Transport,
        fleet: Registry,
        timeouts: TimeoutsSection,
        retry: RetrySection,
    ) -> None:
        self._transport = transport
        self._fleet = fleet
        self._deadlines = Deadlines(timeouts.connect_s, timeouts.first_byte_s, timeouts.gap_s, timeouts.total_s)
        self._retry = retry
        self._budget = RetryBudget(retry)
        self._counts = Counts()

    async def run(self, journey: Journey, candidates: Sequence[ReplicaRecord]) -> Outcome:
        """Answers the caller with the reply of the first candidate that gives one. Raises UpstreamError.

        A failed attempt is followed by another while `retry.py` says that it may help, the caller has got nothing, and
        the budget holds: attempts, time, share of all requests. Refused connections have a bound of their own. A pool
        that is full is passed over.
        """
        self._budget.request()
        began_s = time.monotonic()
        deadlines = self._deadlines
        asked = refused = 0
        rest = iter(candidates)
        replica = next(rest)
        while True:
            try:
                return await self._try(journey, replica, deadlines)
            except UpstreamError as exc:
                if never_connected(exc):
                    refused += 1
                else:
                    asked += 1
                spent_s = time.monotonic() - began_s
                if (
                    journey.first_byte_at is not None
                    or not other_may_mend(exc, replay_in_flight=self._retry.replay_in_flight)
                    or refused >= MAX_REFUSED
                    or asked >= self._retry.attempts
                    or spent_s > self._retry.within_s
                    or (after := await _next(rest, journey)) is None
                    or (asked and not self._budget.take())
                ):
                    raise
                # not the message: an engine's words may repeat the request, and hold line breaks
                log.warning("request %s goes on from replica %s: %s", journey.request.id, replica.id, exc.code)
                deadlines = replace(deadlines, total_s=max(0.001, self._deadlines.total_s - spent_s))
                replica = after

    async def _try(self, journey: Journey, replica: ReplicaRecord, deadlines: Deadlines) -> Outcome:
        record = journey.record
        record.attempts += 1
        journey.tap = None  # what an attempt before this one read was given to nobody
        record.pool, record.replica = replica.pool, replica.id
        request = journey.request
        self._fleet.begin(replica)
        try:
            upstream = UpstreamRequest(
                b"POST",
                request.endpoint.raw,
                headers_for(request, replica, record.attempts, content_type_for(request)),
                journey.body_for(replica),
                journey.sent,
            )
            reply = await self._transport.send(replica.url, upstream, deadlines)
            try:
                outcome = await forward(journey, reply, replica)
            finally:
                reply.close()
        except UpstreamError as exc:
            if never_connected(exc):
                self._fleet.set_aside(replica, REFUSED, exc.message)
            elif isinstance(exc, EngineDied):
                self._fleet.set_aside(replica, ITS_ENGINE_DIED)
            raise
        finally:
            self._fleet.end(replica)
        if outcome.ending is Ending.UPSTREAM_ERROR and outcome.error_code == EngineDied.code:  # told in mid-stream
            self._fleet.set_aside(replica, ITS_ENGINE_DIED)
        return outcome

    async def count_tokens(self, request: InferenceRequest, replicas: Sequence[ReplicaRecord]) -> int | None:
        """The prompt's tokens by a replica's own tokenizer and chat template: the first that takes the connection.

        None when it cannot say; the engine that gets the request then decides for itself. The same prompt is counted
        once for all who ask at the same time, and known for a while.
        """
        for replica in replicas[:MAX_COUNT_TRIES]:
            path, body = count_request(request, replica)
            upstream = UpstreamRequest(b"POST", path, headers_for(request, replica, 0, JSON), body)
            key = await key_of(replica.pool, path, body)
            try:
                return await self._counts.of(key, partial(self._count_by, replica, upstream))
            except GatewayError:  # nobody is there; the log has it
                continue
        return None

    async def _count_by(self, replica: ReplicaRecord, upstream: UpstreamRequest) -> int | None:
        """Raises the error of a connection that could not be made: another replica may say."""
        try:
            reply = await self._transport.send(replica.url, upstream, COUNT_DEADLINES)
            try:
                answer = await reply.read_all(MAX_COUNT_BYTES)
            finally:
                reply.close()
            return count_of(answer) if reply.status == 200 else None
        except (GatewayError, msgspec.MsgspecError, ValueError, RecursionError) as exc:  # ValueError: bad UTF-8
            if never_connected(exc):
                self._fleet.set_aside(replica, REFUSED, str(exc))
                raise
            log.warning("replica %s could not count a prompt: %s", replica.id, exc)
            return None


async def _next(rest: Iterator[ReplicaRecord], journey: Journey) -> ReplicaRecord | None:
    """The first of those that are left whose pool has a slot for the request."""
    for replica in rest:
        if journey.may_enter is None or await journey.may_enter(replica.pool):
            return replica
    return None


def headers_for(
    request: InferenceRequest, replica: ReplicaRecord, attempt: int, content_type: bytes
) -> tuple[tuple[bytes, bytes], ...]:
    """Our own headers and the caller's few that may pass. The caller's key never travels; the engine's own does."""
    own = [
        (b"content-type", content_type),
        (b"x-request-id", (request.id if attempt <= 1 else f"{request.id}-{attempt}").encode()),
    ]
    if replica.api_key:
        own.append((b"authorization", b"Bearer " + replica.api_key.encode()))
    return (*own, *request.headers)
