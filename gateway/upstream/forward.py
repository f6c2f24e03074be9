"""Carries one reply of a replica to the caller: status, headers, body, and what it cost. Called by attempt.py."""

from __future__ import annotations

import asyncio
import re
import time
from asyncio import CancelledError

from gateway.domain.errors import EngineBusy, EngineDied, EngineFailed, UpstreamBroken, UpstreamError
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.domain.replica import ReplicaRecord
from gateway.upstream.engine_error import EngineError, normalise, without_key
from gateway.upstream.fast_path import FastPath
from gateway.upstream.journey import Journey
from gateway.upstream.tap import Tap
from gateway.upstream.taps import tap_for
from gateway.upstream.transport import UpstreamReply
from gateway.upstream.usage import reply_type, usage_of, was_given_up

MAX_PLAIN_BYTES = 64 << 20  # a whole reply is held in memory, so that a broken one is never sent as a success
MAX_ERROR_BYTES = 1 << 20
# How vLLM words the death of its core, plain and in streams: its EngineDeadError says nothing else (0.26 to 0.33,
# vllm/v1/engine/exceptions.py). It has to begin like this, since the words of other failures may repeat the request.
DEATH = "EngineCore encountered an issue"
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
# the request's own fault: the engine's word stands. Not 401 and 403: those are about our key, not the caller's.
PASSED_ON = frozenset({400, 404, 405, 409, 413, 415, 422, 501})
NO_SUCH_PATH = "Not Found"  # vLLM, of a path that its kind of model does not have; of an unknown model it says more
BUSY_RETRY_S = 2.0
COMMENTS = re.compile(rb"(?::[^\r\n]*|[\r\n])*")  # of an engine that says that it is alive, and empty lines
MAX_HELD_BYTES = 65_536
MAX_RETRY_S = 3600.0
END_S = 1.0  # within which the body of a stream has to end after its end mark; engines send both in one go


async def forward(journey: Journey, reply: UpstreamReply, replica: ReplicaRecord) -> Outcome:
    """Answers the caller. Raises UpstreamError; the caller has nothing while `journey.first_byte_at` is None."""
    if reply.status != 200:
        return await _refusal(journey, reply, replica)
    headers = [(b"x-poolgate-pool", replica.pool.encode())]
    if journey.was_clamped:
        headers.append((b"x-poolgate-clamped", journey.request.output_field.encode()))
    if journey.request.stream:
        return await _stream(journey, reply, headers, replica)
    return await _plain(journey, reply, headers)


async def _plain(journey: Journey, reply: UpstreamReply, headers: list[tuple[bytes, bytes]]) -> Outcome:
    endpoint = journey.request.endpoint
    body = await reply.read_all(MAX_PLAIN_BYTES)
    content_type = reply_type(() if endpoint.rules.is_object else reply.headers, body, endpoint)
    if content_type is None:
        raise EngineFailed("The engine's reply is not a JSON object.")
    if was_given_up(body, endpoint):
        raise EngineFailed("The engine gave up this request before it was finished.")
    try:
        usage = usage_of(body, endpoint)
    except ValueError as exc:
        raise EngineFailed("The engine's reply is not JSON.") from exc
    journey.first_byte_at = time.monotonic()
    journey.usage = usage or Usage(journey.prompt_tokens, 0)
    outcome = Outcome(Ending.COMPLETED, 200, journey.usage)
    journey.settle(outcome)
    journey.caller.reply(200, ((b"content-type", content_type), *headers), body)
    return outcome


async def _stream(
    journey: Journey, reply: UpstreamReply, headers: list[tuple[bytes, bytes]], replica: ReplicaRecord
) -> Outcome:
    caller = journey.caller
    journey.tap = tap = tap_for(journey.request)
    out = held = b""
    is_open = True
    while is_open and not out:  # nothing was sent yet, so a failure can still have a status of its own
        data = await reply.read()
        is_open = bool(data)
        out = tap.feed(data) if is_open else tap.finish()
        if tap.error is not None or tap.was_given_up:
            return _failed_at_once(journey, tap.error, replica)
        if len(held) < MAX_HELD_BYTES and COMMENTS.fullmatch(out) is not None:  # no event: the status can wait
            held, out = held + out, b""
    out = held + out
    if not is_open and not tap.saw_done:
        raise UpstreamBroken(CUT, response_began=True)
    journey.first_byte_at = time.monotonic()
    caller.start(200, (*STREAM_HEADERS, *headers))
    course = _Course(journey, tap, reply)
    fast = None
    try:
        if not course.pass_on(out):
            await caller.drained()
        if is_open:
            if course.outcome is None:
                caller.on_room = reply.resume
                if (chunks := caller.chunks) is not None:
                    fast = FastPath(chunks, asyncio.get_running_loop().time)
                    caller.fast_path = tap.fast_path = fast
            await reply.relay(course.take, fast)
            if course.outcome is None:
                was_told = tap.error is not None
                rest = tap.finish()
                if tap.error is not None and not was_told:  # it lacks its empty line: no client would read it
                    course.end(rest + EVENT_END)
                elif tap.saw_done:
                    course.pass_on(rest)
        if course.outcome is None:
            # half an event may be left: it is not passed on, it would spoil the error event that now comes
            raise UpstreamBroken(CUT, response_began=True)
    except (UpstreamError, CancelledError) as exc:
        if course.outcome is None:  # else the caller has all of it, and only the connection is lost
            if tap.error is None or isinstance(exc, CancelledError):
                raise
            return course.end(b"")  # the caller has the engine's own error event: one is enough
    finally:
        course.stop_waiting()
    return course.outcome


def _failed_at_once(journey: Journey, error: EngineError | None, replica: ReplicaRecord) -> Outcome:
    """The first event of a stream says that there is no stream. Raises as a plain reply with that status would."""
    if error is None:
        raise EngineFailed("The engine gave up this request before it began.")
    return _refused(journey, status_in(error), error, None, replica)


async def _refusal(journey: Journey, reply: UpstreamReply, replica: ReplicaRecord) -> Outcome:
    body = await beginning_of(reply, MAX_ERROR_BYTES, may_break=reply.status in PASSED_ON)
    return _refused(journey, reply.status, normalise(reply.status, body), retry_after_of(reply), replica)


def _refused(
    journey: Journey, status: int, error: EngineError, retry_after_s: float | None, replica: ReplicaRecord
) -> Outcome:
    if status in (401, 403):  # its words are about our key, and may repeat a part of it
        raise EngineFailed(f"The engine answered {status}: it refused the gateway's key.")
    if replica.api_key:
        error = without_key(error, replica.api_key)
    if status == 404 and error.message == NO_SUCH_PATH:
        model, path = journey.request.model[:128], journey.request.endpoint.value
        told = f"The model '{model}' does not serve {path}: its engine has no such path."
        error = EngineError(told, error.type, "model", "path_not_served")
    if status in PASSED_ON:
        journey.caller.refuse(status, error.message, error.type, error.param, error.code)
        return Outcome(Ending.ENGINE_REFUSED, status, None, str(error.code) if error.code is not None else None)
    if status in (429, 503):
        raise EngineBusy(f"The engine is busy: {error.message}", retry_after_s=retry_after_s or BUSY_RETRY_S)
    if tells_death(status, error):
        raise EngineDied(f"The engine died: {error.message}")
    raise EngineFailed(f"The engine answered {status}: {error.message}")


class _Course:
    """A stream under way: each read goes through the tap to the caller, in the callback that brought it.

    The end mark ends the caller's reply at once. What the engine sends behind it, in later reads, goes nowhere: it is
    only waited for, END_S long, so that its connection can serve again.
    """

    __slots__ = ("_journey", "_reply", "_tap", "_timer", "_write", "outcome")

    def __init__(self, journey: Journey, tap: Tap, reply: UpstreamReply) -> None:
        self._journey = journey
        self._tap = tap
        self._write = journey.caller.write
        self._reply = reply
        self._timer: asyncio.TimerHandle | None = None
        self.outcome: Outcome | None = None  # known once the end mark came

    def take(self, data: bytes) -> bool:
        if self.outcome is not None:
            return True
        tap = self._tap
        out = tap.feed(data)
        if tap.saw_done:
            return self.pass_on(out)
        return self._write(out) if out else True

    def pass_on(self, out: bytes) -> bool:
        if not self._tap.saw_done:
            return self._write(out) if out else True
        if not self._reply.is_whole:
            self._timer = asyncio.get_running_loop().call_later(END_S, self._reply.close)
        self.end(out + self._tap.finish())
        return True

    def end(self, out: bytes) -> Outcome:
        """The caller's reply ends, with `out`."""
        self.outcome = outcome = ended(self._journey, self._tap)
        self._journey.settle(outcome)
        self._journey.caller.finish(out)
        return outcome

    def stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


EVENT_END = b"\n\n"
CUT = "The engine ended the stream before it was finished."


def ended(journey: Journey, tap: Tap) -> Outcome:
    usage = journey.cut_off()
    if has_died(tap):
        return Outcome(Ending.UPSTREAM_ERROR, 200, usage, EngineDied.code)
    if tap.error is not None or tap.was_given_up:
        return Outcome(Ending.UPSTREAM_ERROR, 200, usage, EngineFailed.code)
    return Outcome(Ending.COMPLETED, 200, usage)


def has_died(tap: Tap) -> bool:
    """By an error event in mid-stream."""
    return tap.error is not None and tells_death(status_in(tap.error), tap.error)


def status_in(error: EngineError) -> int:
    """That of an error event, which it has as its code."""
    return error.code if isinstance(error.code, int) and 400 <= error.code < 600 else 500


def tells_death(status: int, error: EngineError) -> bool:
    """Did the engine's core die, by its own word or by that of a gateway like this one in front of it?"""
    return status >= 500 and (error.message.startswith(DEATH) or error.code == EngineDied.code)


async def beginning_of(reply: UpstreamReply, limit_bytes: int, *, may_break: bool) -> bytes:
    """The body, or its first `limit_bytes`: engines have put the whole request into each of a thousand findings.

    With `may_break` also what came before the connection broke. An engine that refuses a body before it has read all
    of it closes in its face, which resets the connection, and takes back what of its answer was not yet on its way.
    """
    parts: list[bytes] = []
    size = 0
    try:
        while size < limit_bytes and (data := await reply.read()):
            parts.append(data)
            size += len(data)
    except UpstreamBroken:
        if not may_break:
            raise
    return b"".join(parts)[:limit_bytes]


def retry_after_of(reply: UpstreamReply) -> float | None:
    """The engine's own Retry-After, where it is a number of seconds."""
    for name, value in reply.headers:
        if name == b"retry-after" and value.isdigit() and len(value) < 6:
            return min(float(value), MAX_RETRY_S) or None
    return None
