"""What the options of `python -m bench` add up to."""

from __future__ import annotations

import pytest

from bench.__main__ import arguments, chart
from bench.command import RESULTS
from bench.figures import STEPS, Sample, Samples
from bench.machine import idle_steps
from bench.report import Run


def test_a_whole_run_has_five_rounds_and_is_written() -> None:
    given = arguments([])
    assert (given.steps, given.rounds, given.out) == (list(STEPS), 5, RESULTS)
    assert given.contenders == ["gateway", "nginx", "vllm-router"]


@pytest.mark.parametrize("argv", [["--quick"], ["request"], ["stream", "--only", "gateway"]])
def test_a_part_has_one_round_and_is_only_printed(argv: list[str]) -> None:
    given = arguments(argv)
    assert (given.rounds, given.out, given.is_whole) == (1, None, False)


def test_steps_run_in_their_own_order() -> None:
    assert arguments(["memory", "request"]).steps == ["request", "memory"]


def test_litellm_is_there_when_asked_for() -> None:
    assert arguments(["--with", "litellm"]).contenders[-1] == "litellm"
    assert arguments(["--only", "litellm,gateway", "--with", "litellm"]).contenders == ["litellm", "gateway"]


@pytest.mark.parametrize("argv", [["speed"], ["--only", "haproxy"]])
def test_an_unknown_name_is_refused_with_those_that_there_are(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(argv)
    assert "there are" in capsys.readouterr().err


def test_idle_streams_are_as_many_as_the_open_files_allow() -> None:
    assert idle_steps((2_000, 10_000), 65_536) == [2_000, 10_000]
    assert idle_steps((2_000, 10_000), 20_000) == [2_000, 9_900]
    assert idle_steps((2_000, 10_000), 1_024) == [412, 412]


def test_the_chart_has_a_panel_per_figure_that_was_measured() -> None:
    samples = Samples([Sample("added_p50", "gateway", n, float(n)) for n in (1, 2, 3)])
    run = Run("t", "c", 3, 1.0, ["gateway", "nginx"], {}, samples)
    bar = {"name": "gateway", "median": 2.0, "low": 1.0, "high": 3.0}
    panel = {"title": "added latency, one connection, p50, ms", "digits": 3, "limit": 0.3, "bars": [bar]}
    assert chart(run) == {"title": "t", "panels": [panel]}
