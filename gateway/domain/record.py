"""The access record: one line per request, written when it has ended. No prompt, no output, no key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AccessRecord:
    """Filled while the request runs; durations in seconds, None where the request did not get that far."""

    request_id: str
    method: str
    path: str
    revision: str
    began_s: float  # monotonic clock; not written
    key_id: str | None = None
    user: str | None = None
    class_name: str | None = None
    model: str | None = None
    route: str | None = None
    pool: str | None = None
    replica: str | None = None
    stream: bool = False
    status: int = 0
    ending: str | None = None
    error_code: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    attempts: int = 0
    admit_s: float | None = None
    queue_s: float | None = None  # waited for a slot of the pool
    ttft_s: float | None = None
    total_s: float = 0.0
