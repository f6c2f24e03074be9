"""Request spans through the SDK's in-memory exporter: names, attributes, parents, and that they are off by default."""

from __future__ import annotations

import threading

import pytest
from fakes.story import a_record
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway.domain.record import AccessRecord
from gateway.telemetry.traces import ENDPOINT_VARIABLES, Traces, traces_from_environment, without_broken_trace

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = (b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())
STATE = (b"tracestate", b"vendor=x")


class World:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.traces = Traces(provider)

    def span_of(self, record: AccessRecord, *headers: tuple[bytes, bytes]) -> ReadableSpan:
        self.traces.end(self.traces.begin(headers, record), record)
        return self.exporter.get_finished_spans()[-1]


def a_full_record() -> AccessRecord:
    record = a_record()
    record.model, record.route, record.pool, record.replica = "gpt", "chat", "a", "a/0@h"
    record.status, record.ending, record.class_name = 200, "completed", "default"
    record.prompt_tokens, record.completion_tokens, record.ttft_s = 7, 0, 0.25
    return record


def test_a_span_follows_the_conventions_for_generative_ai() -> None:
    span = World().span_of(a_full_record())
    assert (span.name, span.kind) == ("chat chat", SpanKind.SERVER)
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "url.path": "/v1/chat/completions",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "gpt",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 0,
        "http.response.status_code": 200,
        "poolgate.request_id": "req-1",
        "poolgate.route": "chat",
        "poolgate.pool": "a",
        "poolgate.replica": "a/0@h",
        "poolgate.class": "default",
        "poolgate.ending": "completed",
        "poolgate.ttft_s": 0.25,
    }


def test_completions_are_an_operation_of_their_own() -> None:
    record = a_full_record()
    record.path = "/v1/completions"
    assert World().span_of(record).name == "text_completion chat"


def test_a_name_never_holds_what_a_client_made_up() -> None:
    record = a_record()
    record.model, record.status, record.error_code = "x" * 100, 404, "model_not_found"
    assert World().span_of(record).name == "chat unknown"


@pytest.mark.parametrize(
    ("status", "is_error"), [(200, False), (400, False), (429, False), (499, False), (500, True), (503, True)]
)
def test_only_failures_on_our_side_are_errors_of_the_span(status: int, is_error: bool) -> None:
    record = a_full_record()
    record.status, record.error_code = status, "some_code"
    span = World().span_of(record)
    assert (span.status.status_code is StatusCode.ERROR) == is_error
    assert (span.attributes or {})["error.type"] == "some_code"


def test_a_valid_traceparent_is_the_spans_parent() -> None:
    span = World().span_of(a_record(), VALID, STATE)
    assert span.parent is not None and span.context is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)


INVALID = [
    (b"traceparent", b""),
    (b"traceparent", b"x"),
    (b"traceparent", b"\xff\xfe"),
    (b"traceparent", VALID[1].upper()),
    (b"traceparent", VALID[1] + b" x"),
    (b"traceparent", f"00-{'0' * 32}-{PARENT}-01".encode()),
    (b"traceparent", f"00-{TRACE}-{'0' * 16}-01".encode()),
    (b"traceparent", f"ff-{TRACE}-{PARENT}-01".encode()),
    (b"x-other", VALID[1]),
]


@pytest.mark.parametrize("header", INVALID)
def test_an_invalid_traceparent_begins_a_trace_of_its_own(header: tuple[bytes, bytes]) -> None:
    span = World().span_of(a_record(), header, STATE)
    assert span.parent is None
    assert span.context is not None and not span.context.trace_state


def test_two_parents_are_none() -> None:
    assert World().span_of(a_record(), VALID, VALID).parent is None


@settings(deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=80))
def test_no_header_breaks_a_request(parent: bytes, state: bytes) -> None:
    World().span_of(a_record(), (b"traceparent", parent), (b"tracestate", state))
    World().span_of(a_record(), VALID, (b"tracestate", state))


@pytest.mark.parametrize("given", [(VALID, STATE), (VALID,), ()])
def test_the_engine_gets_our_span_as_its_parent(given: tuple[tuple[bytes, bytes], ...]) -> None:
    traces = World().traces
    span = traces.begin(given, a_record())
    session = (b"x-session-id", b"s")
    carried = traces.carry(span, without_broken_trace((*given, session)))
    context = span.get_span_context()
    expected = {
        b"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode(),
        b"x-session-id": b"s",
    }
    if STATE in given:
        expected[b"tracestate"] = STATE[1]
    assert dict(carried) == expected and len(carried) == len(expected)


def test_the_callers_trace_state_does_not_come_under_our_new_trace() -> None:
    traces = World().traces
    broken = ((b"traceparent", b"x"), STATE)
    carried = dict(traces.carry(traces.begin(broken, a_record()), broken))
    assert b"tracestate" not in carried and carried[b"traceparent"].startswith(b"00-")


def test_headers_without_a_whole_trace_context_lose_it_and_nothing_else() -> None:
    session = (b"x-session-id", b"s")
    assert without_broken_trace([VALID, STATE, session]) == (VALID, STATE, session)
    assert without_broken_trace([STATE, session]) == (session,)
    assert without_broken_trace([]) == ()


def test_traces_are_off_unless_the_environment_names_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert traces_from_environment("1.0") is None
    monkeypatch.setenv(ENDPOINT_VARIABLES[0], "")
    assert traces_from_environment("1.0") is None


@pytest.mark.parametrize("name", ENDPOINT_VARIABLES)
def test_an_endpoint_in_the_environment_switches_them_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    traces = traces_from_environment("1.0")
    assert traces is not None
    traces.close(10)


def test_the_stop_does_not_wait_for_a_dead_collector(caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()

    class Stuck(SpanProcessor):
        def shutdown(self) -> None:
            go_on.wait()

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Stuck())
    Traces(provider).close(0.01)
    assert "could not be exported" in caplog.text
    go_on.set()


def test_spans_that_wait_are_exported_at_a_clean_end() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    traces = Traces(provider)
    traces.end(traces.begin([], a_record()), a_record())
    traces.close(10)
    assert len(exporter.get_finished_spans()) == 1
