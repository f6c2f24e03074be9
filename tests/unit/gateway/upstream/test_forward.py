"""forward() over scripted plain replies: what the caller gets, what is settled and when."""

from __future__ import annotations

import json

import pytest
from fakes.story import DONE, plain_answer

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import EngineFailed, UpstreamBroken, UpstreamError
from gateway.domain.outcome import Ending, Outcome, Usage

from .forwarding import SETTLED, TWO, Exchange, stream


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


@pytest.mark.parametrize("body", [b'{"id": "c", "choices": [', b'{"id": "c"}}', b"{\xff}"])
async def test_half_a_json_object_is_no_success(body: bytes) -> None:
    with pytest.raises(EngineFailed):
        await Exchange(body).run()


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
