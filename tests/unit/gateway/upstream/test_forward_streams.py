"""forward() over scripted streams: what the caller gets, what is settled and when, in every way a stream can end."""

from __future__ import annotations

import asyncio

import pytest
from fakes.story import DONE, Silence, event, usage_event

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import EngineFailed, UpstreamBroken, UpstreamError, UpstreamTimeout
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.upstream import forward

from .forwarding import ABORT_EVENT, DEATH_EVENT, ERROR_EVENT, SETTLED, TWO, stream


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
    await silence.reached()
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
    await silence.reached()
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


@pytest.mark.parametrize(
    "end",
    [None, UpstreamBroken("reset", response_began=True), UpstreamTimeout("silent", deadline="gap")],
    ids=["a clean end", "a reset", "silence"],
)
@pytest.mark.parametrize(
    ("failing", "code"), [(ERROR_EVENT, "engine_failed"), (DEATH_EVENT, "engine_died")], ids=["error", "death"]
)
async def test_an_engines_error_event_without_an_end_mark_gets_no_second_one_of_ours(
    failing: bytes, code: str, end: Exception | None
) -> None:
    made = stream(event("Hel"), failing, *([] if end is None else [end]))
    outcome = await made.run()
    assert (outcome.ending, outcome.error_code) == (Ending.UPSTREAM_ERROR, code)
    assert made.caller.body == event("Hel") + failing and made.caller.is_finished
    assert outcome.usage == Usage(30, 1)


@pytest.mark.parametrize("asked", [True, False], ids=["usage", "no usage"])
@pytest.mark.parametrize("line_end", [b"", b"\n"], ids=["no line end", "one"])
async def test_an_error_event_that_lacks_its_empty_line_gets_it(line_end: bytes, asked: bool) -> None:
    failing = ERROR_EVENT.rstrip(b"\n") + line_end
    made = stream(event("Hel"), failing, stream_options={"include_usage": asked})
    outcome = await made.run()
    assert (outcome.ending, outcome.error_code) == (Ending.UPSTREAM_ERROR, "engine_failed")
    assert made.caller.body == event("Hel") + failing + b"\n\n" and made.caller.is_finished


async def test_an_engines_comment_does_not_spend_the_status() -> None:
    made = stream(b": ping\n\n", b'data: {"error":{"message":"no luck","code":500}}\n\n')
    with pytest.raises(EngineFailed, match="no luck"):
        await made.run()
    assert made.caller.status == 0
    made = stream(b": ping\n", b"\n: pong\n\n", *TWO, DONE)
    assert (await made.run()).ending is Ending.COMPLETED
    assert made.caller.body == b": ping\n\n: pong\n\n" + b"".join(TWO) + DONE


async def test_a_streamed_transcript_costs_no_tokens_as_a_plain_one() -> None:
    made = stream(*TWO, DONE, endpoint=Endpoint.TRANSCRIPTIONS)
    made.journey.prompt_tokens = 0
    assert (await made.run()).usage == Usage(0, 0)
    assert made.caller.body == b"".join((*TWO, DONE))


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
