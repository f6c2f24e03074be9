"""Whether a target holds is judged from samples alone."""

from __future__ import annotations

from bench.figures import FIGURES, TARGETS, Sample, Samples, Target, judge

AT_MOST = Target("added_p50", 0.3)
AGAINST_PEER = Target("request_cpu", 1.0, "vllm-router")
AT_LEAST = Target("idle_streams", 10_000, is_floor=True)


def samples_of(figure: str, **contenders: list[float | None]) -> list[Sample]:
    return [
        Sample(figure, name.replace("_", "-"), number, value)
        for name, values in contenders.items()
        for number, value in enumerate(values, 1)
    ]


def verdict(target: Target, **contenders: list[float | None]) -> str:
    return judge(target, Samples(samples_of(target.figure, **contenders)))[0]


def test_every_target_is_about_a_figure_that_is_measured() -> None:
    assert {target.figure for target in TARGETS} <= {figure.id for figure in FIGURES}


def test_the_median_decides() -> None:
    assert verdict(AT_MOST, gateway=[0.2, 0.3, 0.9]) == "holds"
    assert verdict(AT_MOST, gateway=[0.2, 0.31, 0.9]) == "missed"


def test_against_a_peer_the_median_of_the_ratios_decides_not_the_ratio_of_the_medians() -> None:
    found, measured = judge(
        AGAINST_PEER, Samples(samples_of("request_cpu", gateway=[1, 9, 10], vllm_router=[2, 8, 20]))
    )
    assert found == "holds" and measured is not None
    assert (measured.low, measured.median, measured.high) == (0.5, 0.5, 1.125)


def test_one_failed_round_is_not_outvoted_by_good_ones() -> None:
    assert verdict(AT_MOST, gateway=[0.1, None, 0.1]) == "failed"
    assert verdict(AGAINST_PEER, gateway=[1, 1], vllm_router=[2, None]) == "failed"


def test_a_peer_that_did_not_run_leaves_the_target_open() -> None:
    assert verdict(AGAINST_PEER, gateway=[1.0]) == "not measured"


def test_fewer_streams_than_the_target_without_a_failure_were_not_tried() -> None:
    assert verdict(AT_LEAST, gateway=[10_000, 10_000]) == "holds"
    assert verdict(AT_LEAST, gateway=[10_000, 9_900]) == "not tried"
    assert verdict(AT_LEAST, gateway=[10_000, None]) == "failed"
