"""/health and /ready: for balancers and for `poolgate up`. No key needed; they tell nothing about models or callers."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Response, get
from litestar.di import NamedDependency

from gateway.runtime import Runtime


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
