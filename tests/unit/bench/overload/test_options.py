"""What the options of `python -m bench.overload` add up to, and what is asked of the machine."""

from __future__ import annotations

import pytest

from bench.children import RunFailed
from bench.command import RESULTS
from bench.overload.__main__ import arguments, require_open_files
from bench.overload.rounds import QUICK, Sizes


def test_a_whole_run_has_three_rounds_and_is_written() -> None:
    given = arguments([])
    assert (given.contenders, given.rounds, given.out) == (["gateway", "vllm-router"], 3, RESULTS)
    assert arguments(["--rounds", "5"]).out == RESULTS


@pytest.mark.parametrize(("argv", "rounds"), [(["--quick"], 1), (["--only", "gateway"], 3)])
def test_a_smoke_run_or_a_part_is_only_printed(argv: list[str], rounds: int) -> None:
    given = arguments(argv)
    assert (given.rounds, given.out) == (rounds, None)


def test_an_unknown_contender_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--only", "nginx"])
    assert "there are gateway, vllm-router" in capsys.readouterr().err


def test_too_few_open_files_are_told_before_anything_starts() -> None:
    with pytest.raises(RunFailed, match=r"1,024 files open here, and 8,\d\d\d are needed"):
        require_open_files(Sizes(), 1_024)
    require_open_files(Sizes(), 20_000)
    require_open_files(QUICK, 4_096)
