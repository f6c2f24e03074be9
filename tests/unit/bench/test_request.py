"""The request that all load tools send."""

from __future__ import annotations

import json

from bench.request import Target, body, raw

TARGET = Target(8080, "chat", "sk-k")


def test_the_body_has_the_size_that_the_figures_speak_of() -> None:
    assert 1_150 <= len(body("bench-alias", is_stream=False)) <= 1_250


def test_a_stream_asks_for_its_usage() -> None:
    fields = json.loads(body("chat", is_stream=True))
    assert fields["stream"] is True and fields["stream_options"] == {"include_usage": True}
    assert "stream" not in json.loads(body("chat", is_stream=False))


def test_the_raw_request_announces_just_its_body() -> None:
    head, _, content = raw(TARGET, is_stream=True).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n")
    assert f"Content-Length: {len(content)}".encode() in head.split(b"\r\n")
