"""One span per request with the GenAI semantic conventions; off unless an OTLP endpoint is set in the environment.

Source of the attribute names: OpenTelemetry semantic conventions, "Generative client AI spans" (development status).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.domain.record import AccessRecord

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_propagator = TraceContextTextMapPropagator()


class Traces:
    """Exports in the background with a bounded queue (the SDK's); a dead collector costs spans, not requests."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("poolgate")

    def begin(self, headers: Iterable[tuple[bytes, bytes]], record: AccessRecord) -> Span:
        """A server span; child of the caller's trace when its traceparent is valid."""
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in headers if name in (b"traceparent", b"tracestate")
        }
        operation = OPERATIONS.get(record.path, "unknown")
        return self._tracer.start_span(
            operation, context=_propagator.extract(carrier), kind=SpanKind.SERVER, attributes={"url.path": record.path}
        )

    def carry(self, span: Span, headers: tuple[tuple[bytes, bytes], ...]) -> tuple[tuple[bytes, bytes], ...]:
        """`headers` for upstream with our span as the parent, so that the engine's own spans hang below it."""
        context = span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        return (*(h for h in headers if h[0] != b"traceparent"), (b"traceparent", parent.encode()))

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

    def close(self) -> None:
        self._provider.shutdown()


def traces_from_environment(service_version: str) -> Traces | None:
    """None unless one of ENDPOINT_VARIABLES is set; the OTLP exporter reads its other settings itself."""
    if not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    resource = Resource.create({"service.name": "poolgate", "service.version": service_version})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Traces(provider)
