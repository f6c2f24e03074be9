"""Whether and when a dead worker is started again: pure policy. Called by `worker.py` after each crash."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Times in seconds. A worker is given up after `max_crashes` in `window_s`, or as many failed starts in a row.

    The second rule is for starts so slow that they never gather in one window.
    """

    first_s: float = 1.0
    cap_s: float = 60.0
    jitter: float = 0.25  # each delay is moved by up to this share of itself, both ways
    max_crashes: int = 5
    window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Crash:
    at_s: float  # monotonic
    was_ready: bool


def next_delay(policy: RestartPolicy, crashes: Sequence[Crash], rng: random.Random) -> float | None:
    """Seconds until the next start after the last of `crashes` (oldest first, not empty); None: give up.

    One crash an hour is forgotten each time; the delay doubles with each crash that still counts.
    """
    now = crashes[-1].at_s
    recent = sum(1 for crash in crashes if now - crash.at_s < policy.window_s)
    failed_in_a_row = 0
    for crash in reversed(crashes):
        if crash.was_ready:
            break
        failed_in_a_row += 1
    counted = max(recent, failed_in_a_row)
    if counted >= policy.max_crashes:
        return None
    delay = min(policy.cap_s, policy.first_s * 2.0 ** (counted - 1))
    return delay * (1 + policy.jitter * rng.uniform(-1, 1))
