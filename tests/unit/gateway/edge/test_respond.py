"""Headers and bodies of refusals. That every error has a status is a contract test (test_error_table)."""

from __future__ import annotations

import json

import pytest

from gateway.domain import errors
from gateway.domain.endpoint import ErrorShape
from gateway.domain.request import NO_RATE, RateState
from gateway.edge.respond import ENGINE_REFUSED, duration, error_body, error_headers, event_of, rate_lines


def headers_of(error: errors.GatewayError) -> dict[bytes, bytes]:
    headers = error_headers(error)
    assert len(dict(headers)) == len(headers), "no header twice"
    return dict(headers)


def test_the_body_is_openais_error_object() -> None:
    error = errors.ContextTooLong("too long", param="messages")
    assert json.loads(error_body(error)) == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }


def test_an_error_event_is_one_whole_sse_event() -> None:
    event = event_of(error_body(errors.UpstreamBroken("line\nbreak")), ErrorShape.OPENAI)
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == "line\nbreak"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, b"1"), (0.01, b"1"), (1, b"1"), (1.01, b"2"), (59.2, b"60"), (3600.5, b"3601")]
)
def test_retry_after_is_whole_seconds_rounded_up_and_never_zero(seconds: float, shown: bytes) -> None:
    assert headers_of(errors.LimitExceeded("full", retry_after_s=seconds))[b"retry-after"] == shown


def test_no_retry_after_where_waiting_does_not_help() -> None:
    assert b"retry-after" not in headers_of(errors.LimitExceeded("more than the whole limit"))
    assert b"retry-after" not in headers_of(errors.BadRequest("no"))


def test_every_refusal_says_who_spoke() -> None:
    assert headers_of(errors.BadRequest("x"))[b"x-poolgate-error-source"] == b"client"
    assert headers_of(errors.NoReplica("x", retry_after_s=5))[b"x-poolgate-error-source"] == b"gateway"
    assert headers_of(errors.UpstreamBroken("x"))[b"x-poolgate-error-source"] == b"engine"
    assert dict(ENGINE_REFUSED)[b"x-poolgate-error-source"] == b"engine"


def test_a_401_names_the_scheme() -> None:
    assert headers_of(errors.InvalidKey())[b"www-authenticate"] == b"Bearer"


@pytest.mark.parametrize("error", [errors.BodyTooLarge("x"), errors.BodyTimeout("x")])
def test_a_connection_whose_request_is_still_on_its_way_is_closed(error: errors.GatewayError) -> None:
    assert headers_of(error)[b"connection"] == b"close"


# --- x-ratelimit-* ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, b"0ms"),
        (0.0001, b"1ms"),
        (0.25, b"250ms"),
        (1, b"1s"),
        (1.2, b"2s"),
        (59.01, b"1m0s"),
        (60, b"1m0s"),
        (90, b"1m30s"),
        (3600, b"60m0s"),
    ],
)
def test_reset_is_in_openais_form_and_never_too_early(seconds: float, shown: bytes) -> None:
    assert duration(seconds) == shown


def lines(rate: RateState) -> dict[bytes, bytes]:
    """As they stand in a head: each ends its line, none is there twice."""
    head = rate_lines(rate)
    assert not head or head.endswith(b"\r\n")
    pairs = [line.split(b": ") for line in head.split(b"\r\n")[:-1]]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_limits_are_told_as_openai_names_them() -> None:
    rate = RateState(60, 59, 1.0, 1000, 0, 0.5)
    assert lines(rate) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"500ms",
    }


def test_nothing_is_told_of_a_kind_without_a_limit_or_a_figure_that_is_not_known() -> None:
    assert rate_lines(NO_RATE) == rate_lines(RateState()) == b""
    assert lines(RateState(limit_tokens=5)) == {b"x-ratelimit-limit-tokens": b"5"}
