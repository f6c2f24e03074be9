"""Figures come from what the load tool prints, and targets are judged by the gateway's medians."""

from __future__ import annotations

from typing import Any

import pytest

from bench.figures import Sample, Samples
from bench.overload.arrivals import ALONE, DOUBLE, FIVEFOLD, Phase
from bench.overload.capacity import PER_S
from bench.overload.figures import ALL, TARGETS, figure, judge, run_of, samples_of, shares

SLOWER, GOODPUT_AT_2, _ = TARGETS


def caller(served: int, first_ms: list[float], completed: int = 0) -> dict[str, Any]:
    counts = {"offered": served + 3, "served": served, "refused": 1, "gave_up": 2, "failed": 0}
    return {**counts, "completed": completed, "queue_ms": [1.0] * served, "first_ms": first_ms}


def found(faults: str = "", **callers: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", "-"): each for name, each in callers.items()}
    return {"seconds": 10.0, "behind_ms": 0.1, "faults": faults, "callers": named}


def samples(phase: Phase, who: str, what: str, values: list[float | None], contender: str = "gateway") -> list[Sample]:
    return [Sample(figure(phase, who, what), contender, n, value) for n, value in enumerate(values, 1)]


def first_p95(phase: Phase, *values: float) -> list[Sample]:
    return samples(phase, "interactive", "first_ms_p95", list(values))


def test_a_class_is_all_of_its_callers_together_and_each_is_there_by_itself() -> None:
    answer = found(batch_heavy=caller(3, [1, 2, 3]), batch_light=caller(1, [100]))
    values = {sample.figure: sample.value for sample in samples_of(answer, FIVEFOLD, "gateway", 1)}
    assert values["five.batch.served"] == 4 and values["five.batch.gave_up"] == 4
    assert (values["five.batch.first_ms_p50"], values["five.batch.first_ms_p95"]) == (2, 100)
    assert (values["five.batch-heavy.offered"], values["five.batch-light.offered"]) == (6, 4)


def test_goodput_is_what_all_completed_as_a_share_of_the_capacity() -> None:
    completed = round(PER_S * 10 / 4)
    answer = found(interactive=caller(1, [1], completed), batch_heavy=caller(1, [1], completed))
    values = {sample.figure: sample.value for sample in samples_of(answer, DOUBLE, "gateway", 1)}
    assert values["double.all.goodput"] == pytest.approx(50, abs=0.2)


def test_a_class_that_was_served_nothing_has_no_times() -> None:
    ids = {s.figure for s in samples_of(found(interactive=caller(0, [])), ALONE, "gateway", 1)}
    assert "alone.interactive.served" in ids and "alone.interactive.first_ms_p95" not in ids


def test_a_failed_request_keeps_its_counts_and_fails_the_sub_run() -> None:
    result = Samples(samples_of(found("2 × status 500", interactive=caller(5, [1])), ALONE, "gateway", 1))
    assert result.values("alone.interactive.served", "gateway") == {1: 5}
    assert [failure.note for failure in result.failures()] == ["2 × status 500"]
    assert result.has_failed(run_of(ALONE), "gateway")


def test_the_ratio_to_alone_is_taken_within_a_round() -> None:
    verdict, measured = judge(SLOWER, Samples([*first_p95(ALONE, 10, 100), *first_p95(FIVEFOLD, 12, 160)]))
    assert measured is not None and (measured.low, measured.high) == (1.2, 1.6)
    assert verdict == "holds"  # 1.4 in the middle
    assert judge(SLOWER, Samples([*first_p95(ALONE, 100), *first_p95(FIVEFOLD, 151)]))[0] == "missed"


def test_goodput_is_a_floor() -> None:
    assert judge(GOODPUT_AT_2, Samples(samples(DOUBLE, ALL, "goodput", [94.0, 95.0, 97.0])))[0] == "holds"
    assert judge(GOODPUT_AT_2, Samples(samples(DOUBLE, ALL, "goodput", [94.0, 94.9, 97.0])))[0] == "missed"


@pytest.mark.parametrize("phase", [ALONE, FIVEFOLD])
def test_a_failed_round_is_not_outvoted_in_either_phase_of_a_ratio(phase: Phase) -> None:
    good = [*first_p95(ALONE, 10, 10), *first_p95(FIVEFOLD, 10, 10)]
    assert judge(SLOWER, Samples([*good, Sample(run_of(phase), "gateway", 3, None, "broke")]))[0] == "failed"
    assert judge(SLOWER, Samples([*good, Sample(run_of(phase), "vllm-router", 3, None, "broke")]))[0] == "holds"


def test_nothing_measured_holds_nothing() -> None:
    assert {judge(target, Samples([]))[0] for target in TARGETS} == {"not measured"}


def test_shares_are_percent_of_all_that_the_callers_have() -> None:
    served = [*samples(DOUBLE, "x", "served", [30, 10, 20]), *samples(DOUBLE, "y", "served", [60])]
    assert shares(Samples(served), DOUBLE, "gateway", "served", ["x", "y"]) == {"x": 25.0, "y": 75.0}
    assert shares(Samples([]), DOUBLE, "gateway", "served", ["x", "y"]) == {}
