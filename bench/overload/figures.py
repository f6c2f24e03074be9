"""What is measured under overload, as data: figures by phase and caller, the targets they are held to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bench.figures import OURS, Sample, Samples
from bench.overload.arrivals import ALONE, CALLERS, DOUBLE, FIVEFOLD, Phase
from bench.overload.capacity import PER_S
from bench.spread import Spread, percentile, ratios, spread

COUNTS = ("offered", "served", "refused", "gave_up", "failed")
CLASSES = tuple(dict.fromkeys(caller.class_name for caller in CALLERS))
ALL = "all"


def figure(phase: Phase, who: str, what: str) -> str:
    """`who`: a class, a caller, or ALL."""
    return f"{phase.id}.{who}.{what}"


def run_of(phase: Phase) -> str:
    """The figure that fails when a sub-run does."""
    return figure(phase, ALL, "run")


def samples_of(found: Mapping[str, Any], phase: Phase, contender: str, number: int) -> list[Sample]:
    """From what load.py prints. Counts and percentiles of every class and caller; goodput in % of the capacity."""
    who: dict[str, list[Mapping[str, Any]]] = {}
    for caller in CALLERS:
        if caller.name in found["callers"]:
            for name in {caller.class_name, caller.name}:
                who.setdefault(name, []).append(found["callers"][caller.name])
    values: dict[tuple[str, str], float] = {}
    for name, parts in who.items():
        values |= {(name, count): float(sum(part[count] for part in parts)) for count in COUNTS}
        for what in ("queue_ms", "first_ms"):
            if times := [each for part in parts for each in part[what]]:
                values |= {(name, f"{what}_p{p}"): percentile(times, p) for p in (50, 95)}
    completed = sum(part["completed"] for part in found["callers"].values())
    values[ALL, "goodput"] = completed / found["seconds"] / PER_S * 100
    samples = [Sample(figure(phase, name, what), contender, number, value) for (name, what), value in values.items()]
    if found["faults"]:
        samples.append(Sample(run_of(phase), contender, number, None, found["faults"]))
    return samples


@dataclass(frozen=True, slots=True)
class Target:
    """What the gateway's median must keep: of a figure or, with `alone`, of its ratio to the same without batch."""

    title: str
    unit: str
    phase: Phase
    who: str
    what: str
    bound: float
    is_floor: bool = False  # at least `bound`; else at most
    alone: Phase | None = None

    def is_about(self, phase: Phase, who: str, what: str) -> bool:
        return (self.phase, self.who, self.what) == (phase, who, what)


TARGETS = (
    Target("interactive TTFT p95 at 5 × / alone", "", FIVEFOLD, "interactive", "first_ms_p95", 1.5, alone=ALONE),
    Target("goodput at 2 ×", "%", DOUBLE, ALL, "goodput", 95.0, is_floor=True),
    Target("goodput at 5 ×", "%", FIVEFOLD, ALL, "goodput", 95.0, is_floor=True),
)
Verdict = Literal["holds", "missed", "failed", "not measured"]


def measured(target: Target, samples: Samples, contender: str) -> Spread | None:
    values = samples.values(figure(target.phase, target.who, target.what), contender)
    if target.alone is not None:
        base = samples.values(figure(target.alone, target.who, target.what), contender)
        values = ratios(values, base)
    return spread(list(values.values()))


def judge(target: Target, samples: Samples) -> tuple[Verdict, Spread | None]:
    """A phase that failed in any round does not hold, whatever the other rounds say."""
    found = measured(target, samples, OURS)
    if any(samples.has_failed(run_of(phase), OURS) for phase in (target.phase, target.alone) if phase):
        return "failed", found
    if found is None:
        return "not measured", None
    is_kept = found.median >= target.bound if target.is_floor else found.median <= target.bound
    return ("holds" if is_kept else "missed"), found


def shares(samples: Samples, phase: Phase, contender: str, what: str, callers: Iterable[str]) -> dict[str, float]:
    """Caller → percent of all that these have of it, by the medians; empty where they have none."""
    found = {name: samples.spread(figure(phase, name, what), contender) for name in callers}
    medians = {name: each.median for name, each in found.items() if each}
    total = sum(medians.values())
    return {name: value / total * 100 for name, value in medians.items()} if total else {}
