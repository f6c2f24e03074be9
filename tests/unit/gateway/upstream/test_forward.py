"""Forwarder over scripted replies: what the caller gets, what is settled and when, in every way a reply can end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fakes.story import (
    DONE,
    FakeCaller,
    FakeReply,
    Silence,
    a_record,
    a_request,
    event,
    plain_answer,
    replica,
    usage_event,
)

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import (
    EngineBusy,
    EngineDied,
    EngineFailed,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.domain.request import InferenceRequest
from gateway.upstream import forward
from gateway.upstream.forward import Forwarder
from gateway.upstream.journey import Journey

ABORT_EVENT = event("", "abort")
ERROR_EVENT = b'data: {"error":{"message":"out of memory","type":"InternalServerError","code":500}}\n\n'
DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DEATH_EVENT = (
    b'data: {"error":{"message":"%b","type":"InternalServerError","param":null,"code":500}}\n\n' % DEATH.encode()
)


class Exchange:
    """One reply on its way to one caller."""

    def __init__(self, *parts: bytes | Exception | Silence, status: int = 200, **fields: Any) -> None:
        self.reply = FakeReply(*parts, status=status)
        self.request: InferenceRequest = a_request(**fields)
        self.caller = FakeCaller()
        self.log = self.caller.log
        self.journey = Journey(
            self.request, self.caller, a_record(), lambda _: b"", self._settle, prompt_tokens=30, was_clamped=False
        )

    async def run(self, *, was_clamped: bool = False) -> Outcome:
        self.journey.was_clamped = was_clamped
        return await Forwarder().forward(self.journey, self.reply, replica("a/0@h"))

    def _settle(self, outcome: Outcome) -> None:
        self.log.append(f"settled {outcome.ending} {outcome.usage}")


def stream(*parts: bytes | Exception | Silence, **fields: Any) -> Exchange:
    return Exchange(*parts, stream=True, **fields)


TWO = (event("Hel"), event("lo", "stop"))
SETTLED = "settled completed Usage(prompt_tokens=7, completion_tokens=2)"


# --- plain --------------------------------------------------------------------------------------------------


async def test_a_plain_answer_goes_through_byte_for_byte_after_it_was_settled() -> None:
    body = plain_answer(7, 2)
    made = Exchange(body[:20], body[20:])
    outcome = await made.run()
    assert outcome == Outcome(Ending.COMPLETED, 200, Usage(7, 2))
    assert made.caller.body == body
    assert made.caller.status == 200
    assert made.caller.headers == {
        b"content-type": b"application/json",
        b"x-poolgate-pool": b"a",
    }
    assert made.log == [SETTLED, "caller sees the end"]


async def test_a_clamped_request_is_told_which_field_was_cut() -> None:
    for made in (Exchange(plain_answer(), max_completion_tokens=9), stream(*TWO, DONE, max_completion_tokens=9)):
        await made.run(was_clamped=True)
        assert made.caller.headers[b"x-poolgate-clamped"] == b"max_completion_tokens"


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("spaced", [False, True])
async def test_a_plain_answer_that_the_engine_gave_up_is_no_success(reason: str, spaced: bool) -> None:
    body = plain_answer(finish=reason)
    made = Exchange(json.dumps(json.loads(body)).encode() if spaced else body)
    with pytest.raises(EngineFailed, match="gave up"):
        await made.run()
    assert not made.caller.status and not made.log


async def test_a_text_about_aborting_is_an_answer_like_any_other() -> None:
    answer = json.loads(plain_answer())
    answer["choices"][0]["message"]["content"] = '"finish_reason":"abort"'
    made = Exchange(json.dumps(answer, separators=(",", ":")).encode())
    assert (await made.run()).ending is Ending.COMPLETED


async def test_a_broken_plain_answer_is_never_sent_as_a_success() -> None:
    made = Exchange(plain_answer()[:30], UpstreamBroken("reset", response_began=True))
    with pytest.raises(UpstreamBroken):
        await made.run()
    assert not made.caller.status


async def test_an_answer_without_usage_costs_its_prompt() -> None:
    assert (await Exchange(b'{"choices":[]}').run()).usage == Usage(30, 0)


# --- streams ------------------------------------------------------------------------------------------------


async def test_a_stream_goes_through_read_by_read_with_the_headers_that_keep_proxies_from_holding_it() -> None:
    made = stream(*TWO, DONE)
    await made.run()
    assert made.caller.writes == [*TWO, DONE]
    assert made.caller.is_finished
    assert made.caller.headers == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
        b"x-poolgate-pool": b"a",
    }


async def test_the_slot_is_given_back_before_the_caller_can_see_the_end() -> None:
    made = stream(*TWO, usage_event(7, 2), DONE)
    assert await made.run() == Outcome(Ending.COMPLETED, 200, Usage(7, 2))
    assert made.log[:2] == [SETTLED, "caller sees the end"]
    assert sum(line.startswith("settled") for line in made.log) == 1


@pytest.mark.parametrize("asked", [True, False, None])
async def test_the_usage_event_reaches_only_a_caller_who_asked_for_it(asked: bool | None) -> None:
    made = stream(*TWO, usage_event(7, 2), DONE, stream_options=None if asked is None else {"include_usage": asked})
    outcome = await made.run()
    assert outcome.usage == Usage(7, 2)
    assert made.caller.body == b"".join((*TWO, *([usage_event(7, 2)] if asked else []), DONE))


async def test_everything_in_one_read_is_the_same_stream() -> None:
    made = stream(b"".join((*TWO, usage_event(7, 2), DONE)))
    assert await made.run() == Outcome(Ending.COMPLETED, 200, Usage(7, 2))
    assert made.caller.body == b"".join((*TWO, DONE))


async def test_a_stream_without_usage_costs_its_prompt_and_its_events() -> None:
    assert (await stream(*TWO, DONE).run()).usage == Usage(30, 2)


async def test_the_journey_tells_what_was_relayed_at_any_moment() -> None:
    silence = Silence()
    made = stream(*TWO, usage_event(7, 2), silence)
    assert made.journey.cut_off() == Usage(30, 0)
    task = asyncio.create_task(made.run())
    await silence.reached.wait()
    assert made.journey.cut_off() == Usage(7, 2)
    assert made.journey.first_byte_at is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- streams that fail before the first byte ----------------------------------------------------------------


@pytest.mark.parametrize(
    "reads",
    [
        [ERROR_EVENT, DONE],
        [ERROR_EVENT + DONE],
        [event("Hi") + ERROR_EVENT],
        [ABORT_EVENT, DONE],
        [event("") + ABORT_EVENT + DONE],
    ],
    ids=["error", "error in one read", "error behind text", "abort", "abort behind the role"],
)
async def test_a_failure_in_the_first_read_still_gets_a_status_of_its_own(reads: list[bytes]) -> None:
    made = stream(*reads)
    with pytest.raises(UpstreamError):
        await made.run()
    assert not made.caller.status and not made.log
    assert made.journey.first_byte_at is None


@pytest.mark.parametrize(
    "reads", [[], [b"data: {"], [b": ping\n\n"[:3]]], ids=["nothing", "half an event", "half a comment"]
)
async def test_a_stream_that_ends_before_its_first_event_is_no_success(reads: list[bytes]) -> None:
    made = stream(*reads)
    with pytest.raises(UpstreamBroken):
        await made.run()
    assert not made.caller.status


async def test_a_reset_before_the_first_byte_is_raised_as_it_is() -> None:
    made = stream(UpstreamTimeout("silent", deadline="first byte"))
    with pytest.raises(UpstreamTimeout):
        await made.run()
    assert not made.caller.status


# --- streams that fail after it -----------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [UpstreamBroken("reset"), UpstreamTimeout("silent", deadline="gap")])
async def test_a_failure_after_the_first_byte_is_raised_with_the_stream_left_open_for_an_error_event(
    failure: Exception,
) -> None:
    made = stream(*TWO, failure)
    with pytest.raises(type(failure)):
        await made.run()
    assert made.caller.status == 200 and not made.caller.is_finished
    assert made.caller.body == b"".join(TWO)
    assert not made.log
    assert made.journey.cut_off() == Usage(30, 2)


async def test_a_clean_end_without_the_end_mark_is_no_good_end() -> None:
    made = stream(event("Hel"), event("lo"))
    with pytest.raises(UpstreamBroken):
        await made.run()
    assert b"[DONE]" not in made.caller.body and not made.caller.is_finished
    assert not made.log


async def test_half_an_event_at_the_end_is_not_passed_on_in_front_of_the_error() -> None:
    made = stream(event("Hel"), event("lo")[:15])
    with pytest.raises(UpstreamBroken):
        await made.run()
    assert made.caller.body == event("Hel")


async def test_an_end_mark_that_lacks_only_its_empty_line_is_an_end_mark() -> None:
    made = stream(*TWO, usage_event(7, 2), DONE.rstrip())
    assert await made.run() == Outcome(Ending.COMPLETED, 200, Usage(7, 2))
    assert made.caller.body == b"".join((*TWO, DONE.rstrip()))
    assert made.log[0] == SETTLED


async def test_a_reset_behind_the_end_mark_takes_nothing_away() -> None:
    made = stream(*TWO, usage_event(7, 2), DONE, UpstreamBroken("reset", response_began=True))
    assert await made.run() == Outcome(Ending.COMPLETED, 200, Usage(7, 2))
    assert made.caller.is_finished


# --- the end mark -------------------------------------------------------------------------------------------


async def test_the_callers_reply_ends_with_the_end_mark_though_the_engine_does_not() -> None:
    silence = Silence()
    made = stream(*TWO, usage_event(7, 2), DONE, silence)
    task = asyncio.create_task(made.run())
    await silence.reached.wait()
    assert made.caller.is_finished and made.log == [SETTLED, "caller sees the end"]
    assert made.caller.writes == [*TWO, DONE]
    made.reply.close()
    assert await task == Outcome(Ending.COMPLETED, 200, Usage(7, 2))
    assert made.log == [SETTLED, "caller sees the end"], "settled once"


@pytest.mark.parametrize("reads", [[*TWO, DONE], [b"".join((*TWO, DONE))], [*TWO, DONE[:9], DONE[9:]]])
async def test_an_engine_that_never_ends_its_body_is_cut(reads: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "END_S", 0)
    made = stream(*reads, Silence())
    async with asyncio.timeout(5):
        assert (await made.run()).ending is Ending.COMPLETED
    assert made.reply.is_closed


async def test_what_stands_behind_the_end_mark_goes_out_with_it_and_what_comes_later_does_not() -> None:
    made = stream(*TWO, DONE + b": bye\n\n" + b"data: ha", b"lf\n\n", event("more"), DONE, ERROR_EVENT)
    assert await made.run() == Outcome(Ending.COMPLETED, 200, Usage(30, 2))
    assert made.caller.writes == [*TWO, DONE + b": bye\n\n" + b"data: ha"]
    assert made.log == ["settled completed Usage(prompt_tokens=30, completion_tokens=2)", "caller sees the end"]


async def test_a_caller_without_room_gets_its_end_all_the_same() -> None:
    made = stream(b"".join((*TWO, DONE)), event("more"), event("more"))
    made.caller.is_slow = True
    async with asyncio.timeout(5):
        assert (await made.run()).ending is Ending.COMPLETED
    assert made.caller.is_finished and not made.reply.was_held


@pytest.mark.parametrize("failing", [ERROR_EVENT, ABORT_EVENT], ids=["error", "abort"])
async def test_an_engines_own_failure_event_is_passed_on_and_counts_as_its_failure(failing: bytes) -> None:
    made = stream(event("Hel"), failing, DONE)
    outcome = await made.run()
    assert (outcome.ending, outcome.error_code, outcome.status) == (Ending.UPSTREAM_ERROR, "engine_failed", 200)
    assert made.caller.body == event("Hel") + failing + DONE


# --- refusals -----------------------------------------------------------------------------------------------


def error_body(status: int, message: str = "no") -> bytes:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": "x", "code": status}}).encode()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 413, 422, 501])
async def test_a_refusal_of_the_request_itself_is_passed_on_and_costs_nothing(status: int, is_stream: bool) -> None:
    made = Exchange(error_body(status), status=status, stream=is_stream)
    assert await made.run() == Outcome(Ending.ENGINE_REFUSED, status, None, str(status))
    assert made.caller.refusal == (status, "no", "BadRequestError", "x", status)
    assert not made.log


@pytest.mark.parametrize("message", ["context too long", "maximum context length is 5", "", "überlang"])
async def test_a_refusal_is_known_by_its_status_whatever_its_words(message: str) -> None:
    assert (await Exchange(error_body(400, message), status=400).run()).ending is Ending.ENGINE_REFUSED


async def test_a_400_of_a_hundred_megabytes_is_a_400_of_some_kilobytes() -> None:
    part = b"x" * 1_000_000
    made = Exchange(b'{"error":{"message":"', *[part] * 114, b'"}}', status=400)
    assert (await made.run()).ending is Ending.ENGINE_REFUSED
    assert made.caller.refusal is not None
    status, message, *_ = made.caller.refusal
    assert status == 400 and len(message) < 5000
    assert made.reply.bytes_read < 3_000_000, "the rest is not even read"


@pytest.mark.parametrize("body", [b"", error_body(413, "too long")[:30]])
async def test_a_refusal_whose_end_is_lost_to_a_reset_is_that_refusal(body: bytes) -> None:
    made = Exchange(*[body] * bool(body), UpstreamBroken("reset", response_began=True), status=413)
    assert (await made.run()).ending is Ending.ENGINE_REFUSED
    assert made.caller.refusal is not None and made.caller.refusal[0] == 413
    assert ("too l" in made.caller.refusal[1]) is bool(body)


async def test_a_failure_whose_end_is_lost_to_a_reset_may_be_what_broke_the_engine() -> None:
    made = Exchange(error_body(500)[:25], UpstreamBroken("reset", response_began=True), status=500)
    with pytest.raises(UpstreamBroken):
        await made.run()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_engine_is_busy_and_says_when_to_come_back(status: int, is_stream: bool) -> None:
    made = Exchange(error_body(status, "queue full"), status=status, stream=is_stream)
    with pytest.raises(EngineBusy, match="queue full") as caught:
        await made.run()
    assert caught.value.retry_after_s == 2
    assert not made.caller.has_started and not made.log


@pytest.mark.parametrize(
    ("given", "expected"),
    [(b"7", 7), (b"99999", 3600), (b"0", 2), (b"-1", 2), (b"soon", 2), (b"1" * 400, 2), ("²".encode(), 2), (b"", 2)],
)
async def test_a_busy_engines_own_time_is_passed_on_if_it_is_one(given: bytes, expected: float) -> None:
    made = Exchange(error_body(503), status=503)
    made.reply.headers = [(b"x-other", b"9"), (b"retry-after", given)]
    with pytest.raises(EngineBusy) as caught:
        await made.run()
    assert caught.value.retry_after_s == expected


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [401, 403])
async def test_what_an_engine_says_of_our_key_is_not_told(status: int, is_stream: bool) -> None:
    said = error_body(status, "Incorrect API key: sk-abc***xyz")
    made = stream(b"data: " + said + b"\n\n") if is_stream else Exchange(said, status=status)
    with pytest.raises(EngineFailed, match=f"{status}.*key") as caught:
        await made.run()
    assert "sk-" not in caught.value.message
    assert not made.caller.has_started and not made.log


@pytest.mark.parametrize("status", [500, 502, 302, 204])
async def test_any_other_status_is_the_engines_failure(status: int) -> None:
    made = Exchange(error_body(status, "why"), status=status)
    with pytest.raises(EngineFailed, match=f"{status}.*why"):
        await made.run()
    assert not made.caller.has_started and not made.log


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_death_of_an_engine_is_told_from_its_failures(is_stream: bool) -> None:
    made = Exchange(error_body(500, DEATH), status=500, stream=is_stream)
    with pytest.raises(EngineDied):
        await made.run()
    made = stream(DEATH_EVENT, DONE)
    with pytest.raises(EngineDied):
        await made.run()
    assert not made.caller.has_started


async def test_a_gateway_in_front_of_the_engine_tells_its_death_by_code() -> None:
    body = json.dumps({"error": {"message": "The engine died: …", "type": "upstream_error", "code": "engine_died"}})
    with pytest.raises(EngineDied):
        await Exchange(body.encode(), status=502).run()


@pytest.mark.parametrize("message", ["cannot do: tell me of EngineCore and EngineDeadError", "no: " + DEATH])
async def test_a_prompt_that_an_engine_repeats_does_not_set_it_aside(message: str) -> None:
    with pytest.raises(EngineFailed):
        await Exchange(error_body(500, message), status=500).run()
    made = stream(event("Hel"), b'data: {"error":{"message":"%b","code":500}}\n\n' % message.encode(), DONE)
    assert (await made.run()).error_code == "engine_failed"


@pytest.mark.parametrize("status", [400, 402, 408, 418, 499])
async def test_no_refusal_of_a_request_is_a_death(status: int) -> None:
    made = Exchange(error_body(status, DEATH), status=status)
    try:
        assert (await made.run()).ending is Ending.ENGINE_REFUSED
    except EngineFailed:
        assert status != 400


# --- a first event that says that there is no stream --------------------------------------------------------


def error_event(code: int | str | None) -> bytes:
    return (
        b"data: "
        + json.dumps({"error": {"message": "no", "type": "T", "param": None, "code": code}}).encode()
        + b"\n\n"
    )


async def test_a_first_event_is_answered_as_a_reply_with_its_code_would_be() -> None:
    made = stream(error_event(400), DONE)
    assert await made.run() == Outcome(Ending.ENGINE_REFUSED, 400, None, "400")
    assert made.caller.refusal == (400, "no", "T", None, 400)
    with pytest.raises(EngineBusy):
        await stream(error_event(503), DONE).run()


@pytest.mark.parametrize("code", [500, 401, 200, 0, -5, 10**6, "x", None])
async def test_a_first_event_with_any_other_code_is_the_engines_failure(code: int | str | None) -> None:
    with pytest.raises(EngineFailed):
        await stream(error_event(code), DONE).run()


# --- a caller that takes its time ---------------------------------------------------------------------------


async def test_a_caller_without_room_stops_the_relay_until_it_reads_on() -> None:
    made = stream(*TWO, usage_event(7, 2), DONE)
    made.caller.is_slow = True
    task = asyncio.create_task(made.run())
    seen = []
    async with asyncio.timeout(5):
        while not task.done():
            await asyncio.sleep(0)
            if len(made.caller.writes) > len(seen):
                seen = list(made.caller.writes)
                for _ in range(3):
                    await asyncio.sleep(0)
                assert made.caller.writes == seen, "nothing more is written to a caller that has no room"
                made.caller.read_on()
    assert made.reply.was_held and seen == [*TWO, DONE]
    assert await task == Outcome(Ending.COMPLETED, 200, Usage(7, 2))


async def test_a_caller_that_never_reads_on_costs_what_it_was_sent() -> None:
    made = stream(*TWO, DONE)
    made.caller.is_slow = True
    task = asyncio.create_task(made.run())
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made.journey.cut_off() == Usage(30, 1) and not made.log


# --- the other paths ----------------------------------------------------------------------------------------

RESPONSE_DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"Hi"}\n\n'
RESPONSE_END = (
    b'event: response.completed\ndata: {"type":"response.completed","response":{"status":"completed",'
    b'"usage":{"input_tokens":7,"output_tokens":2}}}\n\n'
)
BLOCK_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"Hi"},"index":0}\n\n'
MESSAGE_END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"input_tokens":7,"output_tokens":2}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
)
NAMED = [
    (Endpoint.RESPONSES, RESPONSE_DELTA, RESPONSE_END),
    (Endpoint.MESSAGES, BLOCK_DELTA, MESSAGE_END),
]


@pytest.mark.parametrize(("endpoint", "piece", "end"), NAMED)
async def test_a_stream_of_named_events_goes_through_whole_and_is_settled_by_its_last_event(
    endpoint: Endpoint, piece: bytes, end: bytes
) -> None:
    made = stream(piece, piece, end, endpoint=endpoint)
    assert await made.run() == Outcome(Ending.COMPLETED, 200, Usage(7, 2))
    assert made.caller.body == piece + piece + end
    assert made.log == [SETTLED, "caller sees the end"]


@pytest.mark.parametrize(("endpoint", "piece", "end"), NAMED)
async def test_the_last_named_event_ends_the_callers_reply(
    endpoint: Endpoint, piece: bytes, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "END_S", 0)
    made = stream(piece, end, piece, Silence(), endpoint=endpoint)
    async with asyncio.timeout(5):
        assert await made.run() == Outcome(Ending.COMPLETED, 200, Usage(7, 2))
    assert made.caller.body == piece + end and made.log == [SETTLED, "caller sees the end"]


@pytest.mark.parametrize(("endpoint", "piece", "end"), NAMED)
async def test_a_stream_of_named_events_without_its_last_one_is_no_good_end(
    endpoint: Endpoint, piece: bytes, end: bytes
) -> None:
    made = stream(piece, piece, endpoint=endpoint)
    with pytest.raises(UpstreamBroken):
        await made.run()
    assert made.journey.cut_off() == Usage(30, 2) and made.log == []


async def test_an_error_event_of_anthropics_is_passed_on_and_counts_as_the_engines_failure() -> None:
    error = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"no luck"}}\n\n'
    made = stream(BLOCK_DELTA, error, endpoint=Endpoint.MESSAGES)
    outcome = await made.run()
    assert (outcome.ending, outcome.error_code) == (Ending.UPSTREAM_ERROR, "engine_failed")
    assert made.caller.body == BLOCK_DELTA + error
    first = stream(error, endpoint=Endpoint.MESSAGES)
    with pytest.raises(EngineFailed, match="no luck"):
        await first.run()


@pytest.mark.parametrize("endpoint", [Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE])
async def test_what_generates_nothing_costs_its_prompt(endpoint: Endpoint) -> None:
    made = Exchange(b'{"data":[],"usage":{"prompt_tokens":7,"total_tokens":7}}', endpoint=endpoint)
    assert (await made.run()).usage == Usage(7, 0)


async def test_a_message_without_a_reason_to_stop_is_no_success() -> None:
    made = Exchange(b'{"type":"message","content":[],"usage":{"input_tokens":7}}', endpoint=Endpoint.MESSAGES)
    with pytest.raises(UpstreamError):
        await made.run()


async def test_a_transcript_is_passed_on_as_the_text_that_it_is() -> None:
    made = Exchange(b"Hello there.", endpoint=Endpoint.TRANSCRIPTIONS)
    made.reply.headers = [(b"content-type", b"text/plain; charset=utf-8")]
    made.journey.prompt_tokens = 0
    assert (await made.run()).usage == Usage(0, 0)
    assert made.caller.headers[b"content-type"] == b"text/plain; charset=utf-8"
    assert made.caller.body == b"Hello there."


async def test_a_page_of_html_is_no_transcript() -> None:
    made = Exchange(b"<html>", endpoint=Endpoint.TRANSCRIPTIONS)
    made.reply.headers = [(b"content-type", b"text/html")]
    with pytest.raises(EngineFailed):
        await made.run()


async def test_a_streamed_transcript_costs_no_tokens_as_a_plain_one() -> None:
    made = stream(*TWO, DONE, endpoint=Endpoint.TRANSCRIPTIONS)
    made.journey.prompt_tokens = 0
    assert (await made.run()).usage == Usage(0, 0)
    assert made.caller.body == b"".join((*TWO, DONE))


# --- replies that only look like one ---------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b'{"id": "c", "choices": [', b'{"id": "c"}}', b"{\xff}"])
async def test_half_a_json_object_is_no_success(body: bytes) -> None:
    with pytest.raises(EngineFailed):
        await Exchange(body).run()


async def test_an_engines_comment_does_not_spend_the_status() -> None:
    made = stream(b": ping\n\n", b'data: {"error":{"message":"no luck","code":500}}\n\n')
    with pytest.raises(EngineFailed, match="no luck"):
        await made.run()
    assert made.caller.status == 0
    made = stream(b": ping\n", b"\n: pong\n\n", *TWO, DONE)
    assert (await made.run()).ending is Ending.COMPLETED
    assert made.caller.body == b": ping\n\n: pong\n\n" + b"".join(TWO) + DONE
