"""/health, /ready and /metrics: for balancers, Prometheus and `poolgate up`. They tell nothing about callers."""

from __future__ import annotations

import hmac
from collections import Counter
from importlib.metadata import version
from typing import Any

from litestar import Controller, Request, Response, get
from litestar.di import NamedDependency

from gateway.domain.errors import InvalidKey
from gateway.edge.authenticate import presented_key
from gateway.runtime import Runtime
from gateway.telemetry.exposition import CONTENT_TYPE, exposition

VERSION = version("poolgate")


class OpsController(Controller):
    @get("/health")
    async def health(self) -> dict[str, str]:
        """200 while the process runs its event loop."""
        return {"status": "ok"}

    @get("/ready")
    async def ready(self, runtime: NamedDependency[Runtime]) -> Response[dict[str, Any]]:
        """200 once at least one replica of any pool can serve; 503 before, and from the moment a stop was asked for."""
        is_ready = any(replica.is_ready() for replica in runtime.fleet.snapshot().all())
        status = "draining" if runtime.is_draining else "ready" if is_ready else "no replica is ready"
        body = {"status": status, "revision": runtime.revision}
        return Response(body, status_code=200 if status == "ready" else 503)

    @get("/metrics")
    async def metrics(self, request: Request[Any, Any, Any], runtime: NamedDependency[Runtime]) -> Response[str]:
        """All processes of the group together, whichever is asked. Raises InvalidKey where `metrics.key_env` is set."""
        key = runtime.metrics_key
        if key is not None and not hmac.compare_digest(presented_key(request.scope["headers"]), key.encode()):
            raise InvalidKey
        runtime.publish()
        replicas = Counter((replica.pool, replica.state.value) for replica in runtime.fleet.snapshot().all())
        text = exposition(runtime.instruments.shared, replicas, VERSION, runtime.revision)
        return Response(text, media_type=CONTENT_TYPE)
