"""StreamTap: what goes out, and which facts are read, however a stream is cut into reads."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gateway.domain.outcome import Usage
from gateway.upstream.engine_error import EngineError
from gateway.upstream.relay import MAX_EVENT_BYTES, StreamTap

USAGE = {
    "prompt_tokens": 33,
    "total_tokens": 81,
    "completion_tokens": 48,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def event(content: str | None, finish: str | None = None, **more: object) -> bytes:
    """As vLLM 0.32 writes it: compact JSON, text not escaped to ASCII."""
    delta = {"role": "assistant", "content": ""} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return data({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice], **more})


def data(document: object) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def usage_event(**usage: object) -> bytes:
    return data({"id": "chatcmpl-1", "choices": [], "usage": usage or USAGE, "system_fingerprint": "vllm-0.32.0"})


DONE = b"data: [DONE]\n\n"
# every separator that a line splitter of text would fall for, and texts that look like what the tap searches
TRAPS = [
    "Hi",
    "한국어",
    "🙂",
    "a\u2028b\u2029c\u0085d",
    'say "usage": {"x":1}',
    "usage",
    "finish_reason",
    "error",
    "[DONE]",
    "\n\n",
    "\r\n",
]
CONTENT = [event(None), *(event(TRAPS[i % len(TRAPS)]) for i in range(46)), event("", "length")]
STREAM = b"".join((*CONTENT, usage_event(), DONE))
WITHOUT_USAGE = b"".join((*CONTENT, DONE))


@dataclass
class Facts:
    events: int
    usage: Usage | None
    saw_done: bool
    was_given_up: bool
    error: str | None  # its message


def message_of(tap: StreamTap) -> str | None:
    return None if tap.error is None else tap.error.message


def facts_of(tap: StreamTap) -> Facts:
    return Facts(tap.events, tap.usage, tap.saw_done, tap.was_given_up, message_of(tap))


def run(reads: list[bytes], *, drop: bool) -> tuple[bytes, StreamTap]:
    tap = StreamTap(drop)
    out = b"".join([*(tap.feed(read) for read in reads), tap.finish()])
    return out, tap


def cut(stream: bytes, offsets: list[int]) -> list[bytes]:
    bounds = [0, *sorted(offsets), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(bounds)]


FIXED = Facts(48, Usage(33, 48), saw_done=True, was_given_up=False, error=None)
LINE_ENDS = [b"\n", b"\r\n", b"\r"]


@pytest.mark.parametrize("line_end", LINE_ENDS)
@settings(max_examples=350, deadline=None)
@given(offsets=st.lists(st.integers(0, len(STREAM) + 100), max_size=60), drop=st.booleans())
def test_events_cut_anywhere_give_the_same_bytes_and_facts(line_end: bytes, offsets: list[int], drop: bool) -> None:
    stream = STREAM.replace(b"\n", line_end)
    out, tap = run(cut(stream, offsets), drop=drop)
    assert out == (WITHOUT_USAGE.replace(b"\n", line_end) if drop else stream)
    assert facts_of(tap) == FIXED


@pytest.mark.parametrize("line_end", LINE_ENDS)
@pytest.mark.parametrize("drop", [True, False])
def test_a_stream_that_comes_byte_by_byte_is_the_same_stream(line_end: bytes, drop: bool) -> None:
    stream = STREAM.replace(b"\n", line_end)
    out, tap = run([stream[i : i + 1] for i in range(len(stream))], drop=drop)
    assert out == (WITHOUT_USAGE.replace(b"\n", line_end) if drop else stream)
    assert facts_of(tap) == FIXED


PIECES = {
    event("x"): True,
    event("y", usage=None): True,
    event("z", usage=USAGE): True,
    usage_event(): False,
    b": keep-alive\n\n": True,
    b"\n": True,
    b"event: ping\ndata: {}\nid: 7\n\n": True,
    b'data: {"choices":\ndata: [{"index":0}]}\n\n': True,
    b'data: {"choices":[ ],\ndata: "usage":{"prompt_tokens":1}}\n\n': False,
    DONE: True,
}


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.sampled_from(list(PIECES)), st.sampled_from(LINE_ENDS)), max_size=12),
    offsets=st.lists(st.integers(0, 2500), max_size=20),
)
def test_only_usage_events_are_taken_out_of_any_mix_of_events_and_line_ends(
    pieces: list[tuple[bytes, bytes]], offsets: list[int]
) -> None:
    written = [(piece.replace(b"\n", line_end), PIECES[piece]) for piece, line_end in pieces]
    # an empty line of LF right behind a line of CR would read as one CR LF
    assume(not any(a.endswith(b"\r") and b.startswith(b"\n") for (a, _), (b, _) in itertools.pairwise(written)))
    out, _ = run(cut(b"".join(p for p, _ in written), offsets), drop=True)
    assert out == b"".join(p for p, is_kept in written if is_kept)


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("read", [event("x"), event("x") * 3, DONE, b": ping\n\n", event("a", "stop") + DONE])
def test_whole_events_go_through_as_the_very_same_object(read: bytes, drop: bool) -> None:
    assert StreamTap(drop).feed(read) is read


def test_without_dropping_every_read_goes_through_at_once_even_half_an_event() -> None:
    tap = StreamTap(drop_usage_event=False)
    for i in range(0, len(STREAM), 7):
        read = STREAM[i : i + 7]
        assert tap.feed(read) is read
    assert tap.finish() == b""
    assert facts_of(tap) == FIXED


@pytest.mark.parametrize("line_end", LINE_ENDS)
def test_a_client_never_waits_for_the_next_event_to_see_this_one(line_end: bytes) -> None:
    tap = StreamTap(drop_usage_event=True)
    whole = event("x").replace(b"\n", line_end)
    half = event("y").replace(b"\n", line_end)[:20]
    assert tap.feed(whole + half) == whole
    assert tap.feed(b"") == b""
    assert tap.finish() == half


@pytest.mark.parametrize("line_end", LINE_ENDS)
def test_the_line_feed_of_a_dropped_event_that_comes_late_is_dropped_too(line_end: bytes) -> None:
    usage = usage_event().replace(b"\n", line_end)
    for at in range(1, len(usage)):
        tap = StreamTap(drop_usage_event=True)
        assert tap.feed(event("x")) + tap.feed(usage[:at]) + tap.feed(usage[at:]) + tap.feed(DONE) == event("x") + DONE


def test_line_ends_may_change_from_event_to_event_within_a_read() -> None:
    usage = usage_event().replace(b"\n", b"\r")
    out, tap = run([usage + event("x")], drop=True)
    assert out == event("x")
    assert (tap.events, tap.usage) == (1, Usage(33, 48))


def test_usage_with_a_choice_in_the_same_event_is_not_dropped() -> None:
    reads = [event("a", usage={**USAGE, "completion_tokens": n}) for n in (1, 2, 3)]
    out, tap = run(reads, drop=True)
    assert out == b"".join(reads)
    assert tap.usage == Usage(33, 3)  # continuous_usage_stats: the last one counts
    assert tap.events == 3


def test_a_usage_event_at_the_end_that_lacks_only_its_empty_line_is_read_and_dropped() -> None:
    out, tap = run([event("a"), usage_event()[:-1]], drop=True)
    assert out == event("a")
    assert tap.usage == Usage(33, 48)


def test_half_an_event_at_the_end_is_passed_on_but_not_counted() -> None:
    for drop in (True, False):
        out, tap = run([event("a"), event("b")[:-9]], drop=drop)
        assert out == event("a") + event("b")[:-9]
        assert tap.events == 1


def test_a_stream_that_just_stops_shows_no_end_mark() -> None:
    out, tap = run([event("a")] * 5, drop=True)
    assert out == event("a") * 5
    assert facts_of(tap) == Facts(5, None, False, False, None)


def test_plain_completions_are_read_like_chat() -> None:
    # vLLM 0.32, POST /v1/completions
    text = (
        b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" a","logprobs":null,'
        b'"finish_reason":null,"stop_reason":null}]}\n\n'
    )
    last = text.replace(b'"finish_reason":null', b'"finish_reason":"length"')
    out, tap = run([text, last, usage_event(), DONE], drop=True)
    assert out == text + last + DONE
    assert facts_of(tap) == Facts(2, Usage(33, 48), True, False, None)


def test_spaces_in_the_json_change_nothing() -> None:
    reads = [STREAM.replace(b'":', b'": ').replace(b"[]", b"[ ]")]
    _, tap = run(reads, drop=True)
    assert facts_of(tap) == FIXED


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("is_one_read", [False, True])
def test_a_finish_reason_that_gives_up_is_seen(reason: str, is_one_read: bool) -> None:
    reads = [event("a"), event("", reason), DONE]
    _, tap = run([b"".join(reads)] if is_one_read else reads, drop=False)
    assert tap.was_given_up


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "content_filter", "repetition", "any other"])
def test_any_other_finish_reason_is_an_end_like_any_other(reason: str) -> None:
    _, tap = run([event("a"), event("", reason), DONE], drop=False)
    assert tap.events == 2 and tap.saw_done and not tap.was_given_up


def test_one_aborted_choice_of_several_is_seen() -> None:
    choices = [{"index": 0, "finish_reason": None}, {"index": 1, "finish_reason": "abort"}]
    _, tap = run([data({"choices": choices})], drop=False)
    assert tap.was_given_up


NO_REASON = "The engine answered 500 Internal Server Error and gave no reason."


def test_a_choice_that_gives_up_is_seen_beside_choices_that_go_on() -> None:
    goes_on, gives_up = {"index": 0, "finish_reason": None}, {"index": 1, "finish_reason": "abort"}
    for events in (
        [[goes_on, gives_up]],
        [[gives_up, goes_on]],
        [[goes_on, goes_on], [gives_up]],
        [[gives_up], [goes_on, goes_on]],
    ):
        read = b"".join(data({"choices": choices}) for choices in events)
        for reads in ([read], cut(read, [len(read) // 2])):
            _, tap = run(reads, drop=False)
            assert tap.was_given_up, events


# --- how engines write nearly all of their events, and what looks like it --------------------------------------


@pytest.mark.parametrize("nothing", [b'"finish_reason":null', b'"finish_reason": null', b'"finish_reason" :\tnull'])
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("drop", [True, False])
def test_pieces_of_an_answer_are_counted_however_many_a_read_has(nothing: bytes, count: int, drop: bool) -> None:
    tap = StreamTap(drop)
    read = b"".join(event(TRAPS[i % len(TRAPS)]) for i in range(count)).replace(b'"finish_reason":null', nothing)
    assert tap.feed(read) is read
    assert facts_of(tap) == Facts(count, None, False, False, None)
    read = read.replace(nothing, b'"finish_reason":"stop"')
    assert tap.feed(read) is read
    assert facts_of(tap) == Facts(2 * count, None, False, False, None)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (usage_event(), Facts(2, Usage(33, 48), False, False, None)),
        (DONE, Facts(2, None, True, False, None)),
        (event("", "stop"), Facts(3, None, False, False, None)),
        (event("", "abort"), Facts(3, None, False, True, None)),
        (data({"error": {"message": "x"}}), Facts(2, None, False, False, "x")),
        (event("c", usage=USAGE), Facts(3, Usage(33, 48), False, False, None)),
        (event("c", error={"message": "x"}), Facts(2, None, False, False, "x")),
        (event("c", usage=None, error=None), Facts(3, None, False, False, None)),
        (b": a comment\n\n", Facts(2, None, False, False, None)),
        (b"event: x\n" + event("c"), Facts(3, None, False, False, None)),
        (event("c").replace(b"\n", b"\r\n"), Facts(3, None, False, False, None)),
    ],
    ids=[
        "usage",
        "end",
        "stop",
        "abort",
        "error",
        "running usage",
        "error beside",
        "nulls",
        "comment",
        "named",
        "CRLF",
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_a_read_has_to_tell_is_seen_wherever_it_stands_among_pieces_of_an_answer(
    last: bytes, expected: Facts, place: int
) -> None:
    events = [event("a"), event("b")]
    events.insert(place, last)
    for reads in ([b"".join(events)], events, cut(b"".join(events), [10, 200, 300])):
        _, tap = run(reads, drop=True)
        assert facts_of(tap) == expected


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        # vLLM 0.32, EngineCore killed during a stream
        (
            b'{"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", '
            b'"type": "InternalServerError", "param": null, "code": 500}}',
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        ),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b'{"error":{"type":"x"}}', NO_REASON),
        (b'{"error":[1]}', NO_REASON),
        (b'{"error":{"message":"' + b"m" * 5000 + b'"}}', "m" * 4093 + "…"),
        (b'{"type":"error","error":{"type":"NotFoundError","message":"gone"}}', "gone"),
    ],
)
def test_a_failure_inside_the_first_event_is_seen_as_failure(payload: bytes, message: str) -> None:
    read = b"data: " + payload + b"\n\n"
    out, tap = run([read, DONE], drop=True)
    assert out == read + DONE
    assert message_of(tap) == message
    assert tap.events == 0


def test_an_error_event_tells_what_the_engine_would_have_answered() -> None:
    _, tap = run(
        [data({"error": {"message": "too long", "type": "BadRequestError", "param": "x", "code": 400}})], drop=True
    )
    assert tap.error == EngineError("too long", "BadRequestError", "x", 400)


def test_the_first_error_stands() -> None:
    _, tap = run([data({"error": {"message": "first"}}), data({"error": {"message": "second"}})], drop=True)
    assert message_of(tap) == "first"


def test_the_word_error_in_a_text_is_no_error() -> None:
    _, tap = run([event('"error":{"message":"x"}'), event("error"), event("x", error=None)], drop=True)
    assert tap.error is None
    assert tap.events == 3


def test_content_has_started_with_the_first_choice() -> None:
    tap = StreamTap(drop_usage_event=True)
    tap.feed(b": ping\n\n")
    assert tap.events == 0
    tap.feed(event(None))
    assert tap.events > 0


@pytest.mark.parametrize("drop", [True, False])
def test_an_event_without_end_goes_through_unread_and_memory_stays_bounded(drop: bool) -> None:
    tap = StreamTap(drop)
    read = b"x" * 65_536
    out = tap.feed(b'data: {"choices":[{"text":"')
    for _ in range(40):
        out += tap.feed(read)
        assert len(tap._tail) <= MAX_EVENT_BYTES
    assert len(out) == 27 + 40 * 65_536
    assert len(tap._tail) <= 2
    end = b'"}]}\n\n' + event("next") + usage_event()
    out = tap.feed(end) + tap.finish()
    assert out == (end[: -len(usage_event())] if drop else end)
    assert tap.events == 2
    assert tap.usage == Usage(33, 48)


def test_a_character_cut_in_half_or_broken_is_never_decoded() -> None:
    bad = b'data: {"choices":[{"delta":{"content":"\xc3\x28"},"finish_reason":null}]}\n\n'
    out, tap = run([bad, bad.replace(b"null", b'"stop"')], drop=True)
    assert out == bad + bad.replace(b"null", b'"stop"')
    assert tap.events == 2


def test_usage_in_an_event_that_is_no_json_is_passed_over() -> None:
    read = b'data: {"choices":[],"usage":{"prompt_tokens":\n\n'
    out, tap = run([read], drop=True)
    assert out == read
    assert tap.usage is None
