"""forward() over replies by which an engine says no, as a status or as the first event of a stream."""

from __future__ import annotations

import json

import pytest
from fakes.story import DONE, event

from gateway.domain.errors import EngineBusy, EngineDied, EngineFailed, UpstreamBroken
from gateway.domain.outcome import Ending, Outcome

from .forwarding import DEATH, DEATH_EVENT, Exchange, error_body, stream


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
