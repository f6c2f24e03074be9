"""Sends one request to the first candidate that takes the connection. Called by dispatch.

Another candidate is tried only when no connection could be made: then no engine has seen the request.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import msgspec

from gateway.config.schema import TimeoutsSection
from gateway.domain.errors import ConnectFailed, GatewayError, UpstreamError, UpstreamTimeout
from gateway.domain.record import AccessRecord
from gateway.domain.replica import ReplicaRecord
from gateway.domain.request import Endpoint, InferenceRequest
from gateway.fleet.registry import Registry
from gateway.upstream.transport import Deadlines, Transport, UpstreamReply, UpstreamRequest

log = logging.getLogger(__name__)
MAX_ATTEMPTS = 2
MAX_COUNT_BYTES = 64 << 20  # /tokenize answers with every token's number
COUNT_DEADLINES = Deadlines(connect_s=1, first_byte_s=5, gap_s=5, total_s=10)
# what may travel upstream of the caller's own headers; everything else stays here
PASSED_HEADERS = frozenset({b"traceparent", b"tracestate", b"x-session-id"})


@dataclass(frozen=True, slots=True)
class Sent:
    """A reply whose head has come, and the replica that gave it."""

    reply: UpstreamReply
    replica: ReplicaRecord


class Attempts:
    def __init__(self, transport: Transport, fleet: Registry, timeouts: TimeoutsSection) -> None:
        self._transport = transport
        self._fleet = fleet
        self._deadlines = Deadlines(timeouts.connect_s, timeouts.first_byte_s, timeouts.gap_s, timeouts.total_s)

    @contextlib.asynccontextmanager
    async def send(
        self,
        request: InferenceRequest,
        candidates: Sequence[ReplicaRecord],
        body_for: Callable[[ReplicaRecord], bytes],
        record: AccessRecord,
    ) -> AsyncIterator[Sent]:
        """Gives the reply's head; closes the reply when the block ends. Raises UpstreamError."""
        failure: UpstreamError | None = None
        for replica in candidates[:MAX_ATTEMPTS]:
            record.attempts += 1
            record.pool, record.replica = replica.pool, replica.id
            self._fleet.begin(replica)
            try:
                upstream = UpstreamRequest(
                    b"POST",
                    request.endpoint.value.encode(),
                    headers_for(request, replica, record.attempts),
                    body_for(replica),
                )
                try:
                    reply = await self._transport.send(replica.url, upstream, self._deadlines)
                except UpstreamError as exc:
                    if not never_connected(exc):
                        raise
                    failure = exc
                    self._fleet.connect_failed(replica)
                    log.warning("replica %s does not take connections: %s", replica.id, exc.message)
                    continue
                try:
                    yield Sent(reply, replica)
                finally:
                    reply.close()
                return
            finally:
                self._fleet.end(replica)
        assert failure is not None
        raise failure

    async def count_tokens(self, request: InferenceRequest, replicas: Sequence[ReplicaRecord]) -> int | None:
        """The prompt's tokens by a replica's own tokenizer and chat template: the first that takes the connection.

        None when it cannot say; the engine that gets the request then decides for itself.
        """
        for replica in replicas[:MAX_ATTEMPTS]:
            body = tokenize_body(request, replica)
            upstream = UpstreamRequest(b"POST", b"/tokenize", headers_for(request, replica, 0), body)
            try:
                reply = await self._transport.send(replica.url, upstream, COUNT_DEADLINES)
                try:
                    answer = await reply.read_all(MAX_COUNT_BYTES)
                finally:
                    reply.close()
                return _count.decode(answer).count if reply.status == 200 else None
            except (GatewayError, msgspec.MsgspecError, ValueError, RecursionError) as exc:  # ValueError: bad UTF-8
                if not never_connected(exc):
                    log.warning("replica %s could not count a prompt: %s", replica.id, exc)
                    return None
                self._fleet.connect_failed(replica)
        return None


def never_connected(error: Exception) -> bool:
    """Refused, or no answer within the connect deadline (a host that is off the network): no engine saw the request."""
    return isinstance(error, ConnectFailed) or (isinstance(error, UpstreamTimeout) and error.deadline == "connect")


class _Count(msgspec.Struct):
    count: int


_count = msgspec.json.Decoder(_Count)
_TEMPLATE_FIELDS = (
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)


def tokenize_body(request: InferenceRequest, replica: ReplicaRecord) -> bytes:
    """The /tokenize request that renders the prompt exactly as the inference request would."""
    names = _TEMPLATE_FIELDS if request.endpoint is Endpoint.CHAT else ("prompt", "add_special_tokens")
    fields = {name: request.fields[name] for name in names if name in request.fields}
    return msgspec.json.encode({**fields, "model": replica.served_name})


def headers_for(request: InferenceRequest, replica: ReplicaRecord, attempt: int) -> tuple[tuple[bytes, bytes], ...]:
    """Our own headers and the caller's few that may pass. The caller's key never travels; the engine's own does."""
    own = [
        (b"content-type", b"application/json"),
        (b"x-request-id", (request.id if attempt <= 1 else f"{request.id}-{attempt}").encode()),
    ]
    if replica.api_key:
        own.append((b"authorization", b"Bearer " + replica.api_key.encode()))
    return (*own, *request.headers)
