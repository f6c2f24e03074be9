"""A report shows every phase and class of each contender, and what failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.figures import Sample, Samples
from bench.overload.arrivals import ALONE, FIVEFOLD, PHASES
from bench.overload.figures import run_of, samples_of
from bench.overload.report import chart, markdown
from bench.report import Run


def caller(offered: int, served: int, first_ms: float) -> dict[str, Any]:
    counts = {"offered": offered, "served": served, "refused": offered - served, "gave_up": 0, "failed": 0}
    return {**counts, "completed": served, "queue_ms": [7.0] * served, "first_ms": [first_ms] * served}


def found(**callers: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", "-"): each for name, each in callers.items()}
    return {"seconds": 10.0, "behind_ms": 0.1, "faults": "", "callers": named}


AT_FIVE = found(
    interactive=caller(400, 400, 250), batch_heavy=caller(3200, 210, 900), batch_light=caller(800, 210, 900)
)
SAMPLES = [
    *samples_of(found(interactive=caller(400, 400, 200)), ALONE, "gateway", 1),
    *samples_of(AT_FIVE, FIVEFOLD, "gateway", 1),
    Sample(run_of(FIVEFOLD), "vllm-router", 1, None, "the engines still\nhold 9 streams"),
]
RUN = Run(
    "Overload", "python -m bench.overload", 1, 12.3, ["gateway", "vllm-router"], {"kernel": "6"}, Samples(SAMPLES)
)


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_every_phase_and_class_that_was_measured_has_a_row() -> None:
    found_rows = [row for row in rows(markdown(RUN)) if len(row) == 12]
    assert ["0.5 × capacity", "interactive", "400", "400", "0", "0", "0", "7", "7", "200", "200", "48.8"] in found_rows
    assert ["5 × capacity", "batch", "4,000", "420", "3,580", "0", "0", "7", "7", "900", "900", "99.9"] in found_rows
    assert not any(row[:2] == ["0.5 × capacity", "batch"] for row in found_rows)


def test_users_of_a_class_are_shown_by_what_they_asked_for_and_got() -> None:
    assert ["5 × capacity", "gateway", "80 → 50", "20 → 50"] in rows(markdown(RUN))


def test_targets_are_judged_for_the_gateway_and_shown_for_the_others() -> None:
    found_rows = rows(markdown(RUN))
    assert ["interactive TTFT p95 at 5 × / alone ≤ 1.5", "1.25", "holds", "–"] in found_rows
    assert ["goodput at 2 × ≥ 95 %", "–", "not measured", "–"] in found_rows
    assert ["goodput at 5 × ≥ 95 %", "99.9", "holds", "–"] in found_rows
    assert "## Targets" not in markdown(replace(RUN, has_targets=False))


def test_a_failed_sub_run_is_told_in_one_line() -> None:
    assert "- round 1, vllm-router: the engines still hold 9 streams (five.all.run)" in markdown(RUN)


def test_the_chart_has_a_panel_for_each_judged_figure_and_phase() -> None:
    panels: Any = chart(RUN)["panels"]
    assert len(panels) == 2 * len(PHASES)
    assert panels[3]["bars"] == [{"name": "gateway", "median": 250.0, "low": 250.0, "high": 250.0}]
    assert [panel["limit"] for panel in panels] == [None] * 3 + [300.0] + [None] * 2 + [95.0, 95.0]
