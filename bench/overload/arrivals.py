"""Who asks, how much, and when: independent callers, whose requests come whatever becomes of those before. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from bench.overload.capacity import PER_S

INTERACTIVE_SHARE = 0.5  # of the capacity, in every phase


@dataclass(frozen=True, slots=True)
class Phase:
    """`batch`: what the batch class asks for, as a multiple of the capacity."""

    id: str
    batch: float

    @property
    def title(self) -> str:
        return f"{INTERACTIVE_SHARE + self.batch:g} × capacity"


ALONE, FULL, DOUBLE, FIVEFOLD = PHASES = (
    Phase("alone", 0),
    Phase("full", 0.5),
    Phase("double", 1.5),
    Phase("five", 4.5),
)


@dataclass(frozen=True, slots=True)
class Caller:
    """A user with one key; `share` is that of all that the class asks for."""

    name: str
    class_name: str
    share: float


CALLERS = (
    Caller("interactive", "interactive", 1.0),
    Caller("batch-heavy", "batch", 0.8),
    Caller("batch-light", "batch", 0.2),
)


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    at_s: float  # from the beginning of the phase
    caller: str


def rates(phase: Phase) -> dict[str, float]:
    """Caller → requests a second; those that ask for nothing are left out."""
    asked = {"interactive": INTERACTIVE_SHARE, "batch": phase.batch}
    return {c.name: asked[c.class_name] * c.share * PER_S for c in CALLERS if asked[c.class_name]}


def arrivals(per_s: Mapping[str, float], seconds: float, seed: int) -> list[Arrival]:
    """A Poisson process for each caller, in order; one caller's does not depend on who else there is."""
    found = []
    for caller, rate in per_s.items():
        chance = random.Random(f"{seed} {caller}")
        at_s = chance.expovariate(rate)
        while at_s < seconds:
            found.append(Arrival(at_s, caller))
            at_s += chance.expovariate(rate)
    return sorted(found)
