"""The data of an event, whichever way it is written."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.sse import payload_of


@pytest.mark.parametrize(
    ("event", "payload"),
    [
        (b"data: [DONE]\n\n", b"[DONE]"),
        (b"data:[DONE]\n\n", b"[DONE]"),
        (b'data:\t {"a": 1} \n\n', b'{"a": 1}'),
        (b"data: a\r\n\r\n", b"a"),
        (b"data: a\rdata: b\r\r", b"a\n b"),
        (b"data: a\ndata: b\n\n", b"a\n b"),
        (b"event: x\ndata: a\nid: 1\n\n", b"a"),
        (b"data: lacks its empty line", b"lacks its empty line"),
        (b"data:\n\n", b""),
        (b": keep-alive\n\n", None),
        (b"\n\n", None),
        (b"database: a\n\n", None),
    ],
)
def test_the_payload_is_what_stands_behind_data(event: bytes, payload: bytes | None) -> None:
    assert payload_of(event) == payload


@given(st.lists(st.sampled_from([b"data:", b"data: ", b"event: x", b": c", b"a", b"{}", b" ", b"\n", b"\r", b"\r\n"])))
def test_an_event_on_one_line_is_read_as_any_other(pieces: list[bytes]) -> None:
    event = b"".join(pieces)
    lines = [line[5:] for line in re.split(rb"\r\n|\n|\r", event) if line.startswith(b"data:")]
    assert payload_of(event) == (b"\n".join(lines).strip(b" \t\n") if lines else None)
