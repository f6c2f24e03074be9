"""A report shows what was measured, what failed and what is missing, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from bench.figures import Sample, Samples
from bench.report import Run, markdown, table

SAMPLES = [
    Sample("request_cpu", "gateway", 1, 50.0),
    Sample("request_cpu", "gateway", 2, 70.0),
    Sample("request_cpu", "vllm-router", 1, 100.0),
    Sample("request_cpu", "vllm-router", 2, None, "7 of 9 answers\nwere not 2xx"),
    Sample("chunk_cpu_64", "gateway", 1, 20.0, "3,200 chunks/s"),
]
RUN = Run(
    title="Benchmark",
    command="python -m bench",
    rounds=2,
    took_s=12.3,
    contenders=["gateway", "vllm-router"],
    machine={"kernel": "6.1"},
    samples=Samples(SAMPLES),
)


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_figures_are_medians_with_their_range() -> None:
    assert ["CPU per request, µs", "60.0 (50.0 – 70.0)", "100.0, **failed** in some"] in rows(markdown(RUN))


def test_ratios_come_from_rounds_that_both_have() -> None:
    assert ["CPU per request", "0.50"] in rows(markdown(RUN))


def test_a_failed_sub_run_is_told_in_one_line_and_left_out_of_its_round() -> None:
    text = markdown(RUN)
    assert "- round 2, vllm-router: 7 of 9 answers were not 2xx (request_cpu)" in text
    assert ["vllm-router", "100.0", "–"] in rows(text)


def test_a_target_that_failed_or_was_not_measured_does_not_hold() -> None:
    found = {row[0]: row[-1] for row in rows(markdown(RUN))}
    assert found["CPU per request ≤ 1 × vllm-router"] == "failed"
    assert found["added latency, one connection, p50 ≤ 0.3 ms"] == "not measured"
    assert "holds" not in markdown(RUN)


def test_a_run_of_parts_speaks_of_no_target() -> None:
    assert "## Targets" not in markdown(replace(RUN, has_targets=False))


def test_notes_remarks_chart_and_machine_are_shown() -> None:
    text = markdown(replace(RUN, remarks=["rough"], image="a.png"))
    for part in ("- chunk_cpu_64, gateway, round 1: 3,200 chunks/s", "- rough", "(a.png)", "| kernel | 6.1 |"):
        assert part in text


def test_a_table_lines_up_as_plain_text() -> None:
    assert table(["a", "long head"], [["1", "x"]]) == "| a   | long head |\n| --- | --------- |\n| 1   | x         |"
