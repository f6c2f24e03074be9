"""One span per request with the GenAI semantic conventions; off unless an OTLP endpoint is set in the environment.

Source of the attribute names: OpenTelemetry semantic conventions, "Generative client AI spans" (development status).
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.domain.record import AccessRecord

log = logging.getLogger(__name__)
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
TRACE_HEADERS = (b"traceparent", b"tracestate")
# W3C Trace Context, level 1: version ff and all-zero ids are invalid
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_propagator = TraceContextTextMapPropagator()
Headers = tuple[tuple[bytes, bytes], ...]


class Traces:
    """Exports in the background with a bounded queue (the SDK's); a dead collector costs spans, not requests."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("poolgate")

    def begin(self, headers: Iterable[tuple[bytes, bytes]], record: AccessRecord) -> Span:
        """A server span; child of the caller's trace when its traceparent is valid."""
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in without_broken_trace(headers)
            if name in TRACE_HEADERS
        }
        operation = OPERATIONS.get(record.path, "unknown")
        return self._tracer.start_span(
            operation, context=_propagator.extract(carrier), kind=SpanKind.SERVER, attributes={"url.path": record.path}
        )

    def carry(self, span: Span, headers: Headers) -> Headers:
        """`headers` for upstream with our span as the parent, so that the engine's own spans hang below it."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, context=set_span_in_context(span))
        ours = ((name.encode(), value.encode("latin-1")) for name, value in carrier.items())
        return (*(header for header in headers if header[0] not in TRACE_HEADERS), *ours)

    def end(self, span: Span, record: AccessRecord) -> None:
        attributes = {
            "gen_ai.operation.name": OPERATIONS.get(record.path, "unknown"),
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
            "http.response.status_code": record.status,
            "poolgate.request_id": record.request_id,
            "poolgate.route": record.route,
            "poolgate.pool": record.pool,
            "poolgate.replica": record.replica,
            "poolgate.class": record.class_name,
            "poolgate.ending": record.ending,
            "poolgate.ttft_s": record.ttft_s,
            "error.type": record.error_code,
        }
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if record.model:
            span.update_name(f"{attributes['gen_ai.operation.name']} {record.route or 'unknown'}")
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error_code or ""))
        span.end()

    def close(self, timeout_s: float) -> None:
        """Exports what waits, for at most `timeout_s`: a dead collector costs the last spans, not the stop."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            log.warning("the last request spans could not be exported within %g s", timeout_s)


def without_broken_trace(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """`headers` as they are, if they hold one valid traceparent; else without any trace context."""
    kept = tuple(headers)
    parents = [value for name, value in kept if name == b"traceparent"]
    if len(parents) == 1 and _TRACEPARENT.fullmatch(parents[0]):
        return kept
    return tuple(header for header in kept if header[0] not in TRACE_HEADERS)


def traces_from_environment(service_version: str) -> Traces | None:
    """None unless one of ENDPOINT_VARIABLES is set; the OTLP exporter reads its other settings itself."""
    if not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    resource = Resource.create({"service.name": "poolgate", "service.version": service_version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # its own shutdown waits half a minute
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)
