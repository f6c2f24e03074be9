"""Request spans from a real gateway process to a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import running_fake_engine
from fakes.line import KEY, running_gateway
from fakes.waits import eventually
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(ThreadingHTTPServer):
    """Keeps every span that is exported to it, and the raw bytes."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        self.resources: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def take(self, body: bytes) -> None:
        self.raw += body
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources |= {a.value.string_value for a in group.resource.attributes if a.key == "service.name"}
            self.spans += [span for scope in group.scope_spans for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        self.server.take(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in span.attributes}


async def test_a_request_is_one_span_of_the_callers_trace_and_the_engine_hangs_below_it(
    collector: Collector, tmp_path: Path, redis_url: str
) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(
            tmp_path, redis_url, env=env, pools={"tiny": {"urls": [engine.url], "served_name": "tiny"}}
        ) as gateway,
    ):
        messages = [{"role": "user", "content": "a canary in the prompt"}]
        reply = await gateway.chat(messages=messages, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        assert reply.status_code == 200, reply.text

        async def exported() -> bool:
            return bool(collector.spans)

        await eventually(exported, "the span is exported")
        (request,) = await engine.requests("/v1/chat/completions")
    (span,) = collector.spans
    facts = attributes(span)
    assert collector.resources == {"poolgate"}
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("chat chat", TRACE, PARENT)
    assert facts["gen_ai.usage.output_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert (facts["poolgate.pool"], facts["http.response.status_code"]) == ("tiny", 200)
    headers = dict(request["headers"])
    assert headers["traceparent"] == f"00-{TRACE}-{span.span_id.hex()}-01"
    for secret in (b"canary", KEY.encode(), reply.json()["choices"][0]["message"]["content"].encode()):
        assert secret not in collector.raw
