"""The little statistics that a report needs: percentiles, and the middle and range of a few rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Middle and range of one figure over the rounds in which it could be measured."""

    median: float
    low: float
    high: float
    rounds: int


def spread(values: Sequence[float]) -> Spread | None:
    """None where there is no value."""
    if not values:
        return None
    return Spread(statistics.median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed (nearest rank). Raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Round → ours / theirs, for the rounds that have both: what disturbs one round disturbs both of its figures."""
    return {number: ours[number] / theirs[number] for number in sorted(ours) if theirs.get(number)}
