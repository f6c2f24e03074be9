"""The taps of /v1/responses and /v1/messages: which facts are read however a stream is cut, and that all bytes pass."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from fakes.story import a_request
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.endpoint import Endpoint
from gateway.domain.outcome import Usage
from gateway.upstream.relay import StreamTap
from gateway.upstream.taps import MAX_EVENT_BYTES, MessagesTap, NamedTap, ResponsesTap, tap_for


def named(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + compact({**fields, "type": kind}) + b"\n\n"


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def delta(text: str = "Hello") -> bytes:
    return named("response.output_text.delta", delta=text, item_id="msg_1")


def completed(kind: str = "response.completed", **response: Any) -> bytes:
    usage = {"input_tokens": 33, "output_tokens": 4, "total_tokens": 37}
    return named(kind, response={"id": "resp_1", "status": "completed", "usage": usage, **response})


def block(text: str = "Hello") -> bytes:
    return named("content_block_delta", delta={"type": "text_delta", "text": text}, index=0)


def message_delta(reason: str | None = "end_turn", **usage: Any) -> bytes:
    told = usage or {"input_tokens": 33, "output_tokens": 5}
    return named("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage=told)


BEGUN = named("response.created", response={"status": "in_progress", "usage": None})
RESPONSE = [BEGUN, delta(), delta(' "event: error"\n.delta\ndata: x'), named("response.output_text.done"), completed()]
START = named("message_start", message={"id": "m", "usage": {"input_tokens": 33, "output_tokens": 0}})
BLOCK_START = named("content_block_start", content_block={"type": "text", "text": ""}, index=0)
STOP = named("message_stop")
MESSAGE = [START, BLOCK_START, named("ping"), block(), block("\u2028\n\nevent: error"), message_delta(), STOP]


def message_of(tap: NamedTap) -> str | None:
    return None if tap.error is None else tap.error.message


def run(tap: NamedTap, reads: Iterable[bytes]) -> NamedTap:
    for read in reads:
        assert tap.feed(read) is read  # nothing is changed and nothing held back
    assert tap.finish() == b""
    return tap


def facts(tap: NamedTap) -> tuple[Any, ...]:
    return tap.events, tap.usage, tap.saw_done, tap.was_given_up, message_of(tap)


WHOLE_RESPONSE = (2, Usage(33, 4), True, False, None)
WHOLE_MESSAGE = (2, Usage(33, 5), True, False, None)


def test_each_path_has_its_own_tap() -> None:
    assert isinstance(tap_for(a_request(endpoint=Endpoint.RESPONSES)), ResponsesTap)
    assert isinstance(tap_for(a_request(endpoint=Endpoint.MESSAGES)), MessagesTap)
    for endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.TRANSCRIPTIONS):
        assert isinstance(tap_for(a_request(endpoint=endpoint)), StreamTap)


def test_an_event_in_each_read_is_how_engines_write() -> None:
    assert facts(run(ResponsesTap(), RESPONSE)) == WHOLE_RESPONSE
    assert facts(run(MessagesTap(), MESSAGE)) == WHOLE_MESSAGE


def test_the_whole_stream_in_one_read() -> None:
    assert facts(run(ResponsesTap(), [b"".join(RESPONSE)])) == WHOLE_RESPONSE
    assert facts(run(MessagesTap(), [b"".join(MESSAGE)])) == WHOLE_MESSAGE


def test_byte_by_byte() -> None:
    for events, tap, expected in ((RESPONSE, ResponsesTap(), WHOLE_RESPONSE), (MESSAGE, MessagesTap(), WHOLE_MESSAGE)):
        stream = b"".join(events)
        assert facts(run(tap, [stream[i : i + 1] for i in range(len(stream))])) == expected


def test_line_ends_of_another_kind() -> None:
    for end in (b"\r\n", b"\r"):
        assert facts(run(ResponsesTap(), [e.replace(b"\n", end) for e in RESPONSE])) == WHOLE_RESPONSE
        assert facts(run(MessagesTap(), [e.replace(b"\n", end) for e in MESSAGE])) == WHOLE_MESSAGE


def test_an_engine_that_leaves_out_the_names_is_read_all_the_same() -> None:
    bare = [event.split(b"\n", 1)[1] for event in RESPONSE]
    assert facts(run(ResponsesTap(), bare)) == WHOLE_RESPONSE


@settings(deadline=None)
@given(st.data())
def test_however_a_stream_is_cut_the_facts_are_the_same(data: st.DataObject) -> None:
    for events, tap, expected in ((RESPONSE, ResponsesTap(), WHOLE_RESPONSE), (MESSAGE, MessagesTap(), WHOLE_MESSAGE)):
        stream = b"".join(events)
        cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8)))
        reads = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        assert facts(run(tap, reads)) == expected


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=40) | st.sampled_from([*RESPONSE, *MESSAGE, b"\n\n", b"data: ", b"\r"]), max_size=12)
)
def test_any_bytes_pass_unchanged(reads: Sequence[bytes]) -> None:
    run(ResponsesTap(), reads)
    run(MessagesTap(), reads)


# --- how responses end --------------------------------------------------------------------------------------


def test_deltas_of_other_kinds_count_as_pieces_of_the_answer() -> None:
    kinds = ("response.reasoning_text.delta", "response.function_call_arguments.delta", "response.refusal.delta")
    tap = run(ResponsesTap(), [b"".join(named(kind, delta="x") for kind in kinds)])
    assert tap.events == 3 and not tap.saw_done


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
def test_a_response_that_ended_is_whole(kind: str) -> None:
    assert facts(run(ResponsesTap(), [BEGUN, completed(kind)])) == (0, Usage(33, 4), True, False, None)


def test_a_failed_response_has_ended_with_an_error() -> None:
    tap = run(ResponsesTap(), [BEGUN, completed("response.failed", error={"code": "x", "message": "no luck"})])
    assert (tap.saw_done, message_of(tap)) == (True, "no luck")


def test_a_cancelled_response_was_given_up() -> None:
    assert run(ResponsesTap(), [completed(status="cancelled")]).was_given_up


@pytest.mark.parametrize(
    "event",
    [
        named("error", code="x", message="no luck", param=None),
        named("error", error={"message": "no luck"}),
        b'data: {"error":{"message":"no luck"}}\n\n',
    ],
)
def test_an_error_event_ends_a_response_in_whatever_shape(event: bytes) -> None:
    tap = run(ResponsesTap(), [BEGUN, delta(), event])
    assert (tap.saw_done, message_of(tap), tap.events) == (True, "no luck", 1)


@pytest.mark.parametrize("response", [None, {}, {"usage": {"input_tokens": "x"}}, {"usage": None}, 5])
def test_an_end_without_readable_usage_is_an_end(response: Any) -> None:
    tap = run(ResponsesTap(), [named("response.completed", response=response)])
    assert (tap.saw_done, tap.usage) == (True, None)


def test_a_last_event_that_lacks_its_empty_line_counts() -> None:
    assert run(ResponsesTap(), [delta(), completed()[:-2]]).saw_done
    assert not run(ResponsesTap(), [delta(), completed()[:-20]]).saw_done


def test_a_last_event_of_a_megabyte_is_read() -> None:
    event = completed(output=[{"text": "x" * (1 << 20)}])
    tap = run(ResponsesTap(), [event[i : i + 65_536] for i in range(0, len(event), 65_536)])
    assert (tap.saw_done, tap.usage) == (True, Usage(33, 4))


def test_one_beyond_all_measure_is_an_end_too_and_memory_stays_bounded() -> None:
    tap = ResponsesTap()
    head = b'event: response.completed\ndata: {"response":{"output":[{"text":"'
    tap.feed(head)
    for _ in range(MAX_EVENT_BYTES // 65_536 + 4):
        tap.feed(b"x" * 65_536)
        assert len(tap._tail) <= MAX_EVENT_BYTES
    assert len(tap._tail) < 1024
    tap.feed(b'"}]}}\n')
    tap.feed(b"\n" + delta())
    assert (tap.saw_done, tap.usage, tap.events) == (True, None, 1)


# --- how messages end ---------------------------------------------------------------------------------------


def test_the_prompt_is_told_at_the_beginning_and_the_output_at_the_end() -> None:
    tap = MessagesTap()
    for event in (START, block()):
        tap.feed(event)
    assert tap.usage is None  # what is told at the beginning would make an answer that is cut off cost nothing
    tap.feed(message_delta(output_tokens=9))
    assert tap.usage == Usage(33, 9)
    again = message_delta(input_tokens=3, cache_read_input_tokens=30, output_tokens=9)
    assert run(MessagesTap(), [START, again]).usage == Usage(33, 9)


def test_a_message_without_a_reason_to_stop_was_given_up() -> None:
    tap = run(MessagesTap(), [START, block(), message_delta(None), STOP])
    assert tap.was_given_up and tap.saw_done


def test_an_error_event_ends_a_message() -> None:
    error = named("error", error={"type": "overloaded_error", "message": "no luck"})
    tap = run(MessagesTap(), [START, block(), error])
    assert (tap.saw_done, message_of(tap), tap.events) == (True, "no luck", 1)
    assert "gave no reason" in str(message_of(run(MessagesTap(), [named("error")])))


def test_a_message_that_breaks_off_is_not_whole() -> None:
    tap = run(MessagesTap(), [START, block(), block()[:-10]])
    assert not tap.saw_done and tap.events >= 1
