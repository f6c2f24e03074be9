"""What the supervisor raises on purpose; each is about one worker or about the supervisor itself."""

from __future__ import annotations

from gateway.domain.errors import Retry, WorkerError


class ProbeFailed(WorkerError):
    """The engine did not answer a probe as a healthy one would; it may later."""

    code = "worker_not_ready"
    retry = Retry.LATER


class EngineDead(ProbeFailed):
    """The server answers that its engine is dead (/health 503): it will not come back."""

    code = "worker_engine_dead"


class PortTaken(WorkerError):
    """Somebody else listens on the port that this worker was given."""

    code = "worker_port_taken"


class StartRefused(WorkerError):
    """The worker cannot be started at all (no such command, no free port); trying again unchanged would not help."""

    code = "worker_start_refused"


class SupervisorBusy(WorkerError):
    """Another supervisor lives on the same state directory."""

    code = "supervisor_already_running"


class GpuBusy(WorkerError):
    """The memory that the worker needs did not become free in time."""

    code = "worker_gpu_busy"
    retry = Retry.LATER
