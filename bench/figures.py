"""What is measured, as data: figures, the targets they are held to, samples. Pure; used by all others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bench.spread import Spread, ratios, spread

OURS = "gateway"
Step = Literal["request", "stream", "latency", "memory"]
STEPS: tuple[Step, ...] = ("request", "stream", "latency", "memory")
STREAMS = (64, 256)
IDLE_STEPS = (2_000, 10_000)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number per contender and round. `has_ratio`: gateway divided by peer says something; `in_chart`: bars do."""

    id: str
    step: Step
    title: str
    unit: str
    digits: int = 1
    has_ratio: bool = True
    in_chart: bool = True


FIGURES = (
    Figure("request_cpu", "request", "CPU per request", "µs"),
    Figure("request_rate", "request", "requests on one core", "1/s", 0),
    Figure("request_redis", "request", "CPU of Redis beside it, per request", "µs", 1, False, False),
    *(Figure(f"chunk_cpu_{n}", "stream", f"CPU per chunk, {n} streams", "µs") for n in STREAMS),
    Figure("added_p50", "latency", "added latency, one connection, p50", "ms", 3, False),
    Figure("added_p99", "latency", "added latency, one connection, p99", "ms", 3, False),
    *(Figure(f"idle_kb_{n}", "memory", f"memory per idle stream, {n:,} open", "kB") for n in IDLE_STEPS),
    Figure("idle_streams", "memory", "idle streams that all ended well", "", 0, False, False),
)


@dataclass(frozen=True, slots=True)
class Target:
    """What the gateway's median must keep: of the figure itself or, with `peer`, of its ratio to that peer."""

    figure: str
    bound: float
    peer: str | None = None
    is_floor: bool = False  # at least `bound`; else at most


TARGETS = (
    Target("request_cpu", 1.0, "vllm-router"),
    *(Target(f"chunk_cpu_{n}", 1.0, "vllm-router") for n in STREAMS),
    Target("added_p50", 0.3),
    *(Target(f"idle_kb_{n}", 30.0) for n in IDLE_STEPS),
    Target("idle_streams", float(IDLE_STEPS[-1]), is_floor=True),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure of one contender in one round, from 1. Without a value it failed, and `note` says how."""

    figure: str
    contender: str
    round: int
    value: float | None
    note: str = ""


class Samples:
    """All samples of a run, looked up by figure and contender."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.all = list(samples)
        self._values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        for sample in self.all:
            if sample.value is not None:
                self._values[sample.figure, sample.contender][sample.round] = sample.value

    def values(self, figure: str, contender: str) -> dict[int, float]:
        """Round → value; rounds that failed are left out."""
        return self._values.get((figure, contender), {})

    def spread(self, figure: str, contender: str) -> Spread | None:
        return spread(list(self.values(figure, contender).values()))

    def ratio(self, figure: str, peer: str) -> Spread | None:
        return spread(list(ratios(self.values(figure, OURS), self.values(figure, peer)).values()))

    def failures(self) -> list[Sample]:
        return [sample for sample in self.all if sample.value is None]

    def has_failed(self, figure: str, contender: str) -> bool:
        return any(s.value is None and (s.figure, s.contender) == (figure, contender) for s in self.all)


Verdict = Literal["holds", "missed", "failed", "not tried", "not measured"]


def judge(target: Target, samples: Samples) -> tuple[Verdict, Spread | None]:
    """A figure that failed in any round does not hold, whatever the other rounds say.

    A count below its floor without a failure means that the run, or the machine, did not let us try as many.
    """
    involved = [OURS] if target.peer is None else [OURS, target.peer]
    measured = samples.spread(target.figure, OURS) if target.peer is None else samples.ratio(target.figure, target.peer)
    if any(samples.has_failed(target.figure, contender) for contender in involved):
        return "failed", measured
    if measured is None:
        return "not measured", None
    if target.is_floor:
        return ("holds" if measured.low >= target.bound else "not tried"), measured
    return ("holds" if measured.median <= target.bound else "missed"), measured
