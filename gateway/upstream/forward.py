"""Carries one reply of a replica to the caller: status, headers, body, and what it cost. Called by dispatch."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from gateway.domain.errors import UpstreamBroken, UpstreamError
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.domain.request import InferenceRequest
from gateway.upstream.attempt import Sent
from gateway.upstream.engine_error import normalise
from gateway.upstream.relay import StreamTap, usage_of
from gateway.upstream.transport import UpstreamReply

MAX_PLAIN_BYTES = 64 << 20  # a whole reply is held in memory, so that a broken one is never sent as a success
MAX_ERROR_BYTES = 1 << 20
ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')  # quotes inside a text are escaped, so no text looks like this


class Downstream(Protocol):
    """The caller's side of an exchange."""

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None: ...

    async def write(self, data: bytes) -> None: ...

    async def finish(self, data: bytes = b"") -> None: ...

    async def refuse(
        self, status: int, message: str, kind: str, param: str | None, code: str | int | None, retry_after_s: int | None
    ) -> None:
        """The engine's own refusal, in our envelope."""
        ...


@dataclass(slots=True)
class Progress:
    """How far a reply came; read when it is cut off."""

    prompt_tokens: int  # counted or estimated beforehand; holds where the engine does not tell
    events: int = 0
    usage: Usage | None = None
    first_byte_at: float | None = None  # monotonic; None: the caller has got nothing yet


Settle = Callable[[Outcome], "asyncio.Task[None]"]


class Forwarder:
    async def forward(
        self,
        request: InferenceRequest,
        sent: Sent,
        downstream: Downstream,
        progress: Progress,
        settle: Settle,
        was_clamped: bool,
    ) -> Outcome:
        """Answers the caller. `settle` is called as soon as the cost is known: before the caller can see the end of
        the reply, so that its next call finds the slot free. Raises UpstreamError."""
        if sent.reply.status != 200:
            return await self._refusal(sent, downstream)
        headers = [(b"x-poolgate-pool", sent.replica.pool.encode())]
        if was_clamped:
            headers.append((b"x-poolgate-clamped", request.output_field.encode()))
        if request.stream:
            return await self._stream(request, sent, downstream, progress, settle, headers)
        return await self._plain(sent, downstream, progress, settle, headers)

    async def _plain(
        self,
        sent: Sent,
        downstream: Downstream,
        progress: Progress,
        settle: Settle,
        headers: list[tuple[bytes, bytes]],
    ) -> Outcome:
        body = await sent.reply.read_all(MAX_PLAIN_BYTES)
        if not body.lstrip()[:1] == b"{":
            raise UpstreamBroken("The engine's reply is not a JSON object.", response_began=True)
        if ABORTED.search(body) is not None:
            raise UpstreamError("The engine gave up this request before it was finished.")
        progress.first_byte_at = time.monotonic()
        progress.usage = usage_of(body) or Usage(progress.prompt_tokens, 0)
        outcome = Outcome(Ending.COMPLETED, 200, progress.usage)
        await asyncio.shield(settle(outcome))
        await downstream.start(
            200, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
        )
        await downstream.finish(body)
        return outcome

    async def _stream(
        self,
        request: InferenceRequest,
        sent: Sent,
        downstream: Downstream,
        progress: Progress,
        settle: Settle,
        headers: list[tuple[bytes, bytes]],
    ) -> Outcome:
        tap = StreamTap(drop_usage_event=not request.wants_usage)
        reply = sent.reply
        outcome: Outcome | None = None
        is_open = True
        while is_open:
            try:
                data = await reply.read()
            except UpstreamError:
                if outcome is None:
                    raise
                data = b""  # the caller has the end mark: nothing that matters can be missing
            is_open = bool(data)
            out = tap.feed(data) if is_open else tap.finish()
            progress.events, progress.usage = tap.events, tap.usage
            if progress.first_byte_at is None and (tap.error is not None or tap.finish_abort):
                # nothing was sent yet, so the failure can still have a status of its own
                raise UpstreamError(f"The engine failed: {tap.error or 'it gave up this request'}")
            if tap.saw_done and outcome is None:
                outcome = ended(tap, progress)
                await asyncio.shield(settle(outcome))
            if not is_open and outcome is None:
                # half an event may be left: it is not passed on, it would spoil the error event that now comes
                raise UpstreamBroken("The engine ended the stream before it was finished.", response_began=True)
            if not out:
                continue
            if progress.first_byte_at is None:
                progress.first_byte_at = time.monotonic()
                await downstream.start(200, [*STREAM_HEADERS, *headers])
            await downstream.write(out)
        assert outcome is not None
        await downstream.finish()
        return outcome

    async def _refusal(self, sent: Sent, downstream: Downstream) -> Outcome:
        reply = sent.reply
        body = await beginning_of(reply, MAX_ERROR_BYTES)
        message, kind, param, code = normalise(reply.status, body)
        if reply.status in PASSED_ON:
            await downstream.refuse(reply.status, message, kind, param, code, None)
            return Outcome(Ending.ENGINE_REFUSED, reply.status, None, str(code) if code is not None else None)
        if reply.status in (429, 503):
            await downstream.refuse(503, message, kind, param, code, BUSY_RETRY_S)
            return Outcome(Ending.UPSTREAM_ERROR, 503, None, "engine_busy")
        raise UpstreamError(f"The engine answered {reply.status}: {message}")


STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
# the request's own fault: the engine's word stands. Not 401 and 403: those are about our key, not the caller's.
PASSED_ON = frozenset({400, 404, 405, 409, 413, 415, 422, 501})
BUSY_RETRY_S = 2


async def beginning_of(reply: UpstreamReply, limit_bytes: int) -> bytes:
    """The body, or its first `limit_bytes`: engines have put the whole request into each of a thousand findings."""
    parts: list[bytes] = []
    size = 0
    while size < limit_bytes and (data := await reply.read()):
        parts.append(data)
        size += len(data)
    return b"".join(parts)[:limit_bytes]


def ended(tap: StreamTap, progress: Progress) -> Outcome:
    usage = progress.usage or Usage(progress.prompt_tokens, progress.events)
    if tap.error is not None or tap.finish_abort:
        return Outcome(Ending.UPSTREAM_ERROR, 200, usage, "engine_failed")
    return Outcome(Ending.COMPLETED, 200, usage)
