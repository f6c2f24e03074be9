"""What all commands of the benchmarks refuse, and how they end."""

from __future__ import annotations

import os

import pytest

from bench.children import RunFailed
from bench.command import exit_code, require_cores


def test_measured_and_load_may_not_share_a_core() -> None:
    ours = str(min(os.sched_getaffinity(0)))
    with pytest.raises(RunFailed, match="cores of their own"):
        require_cores(ours, ours)
    with pytest.raises(RunFailed, match="99999"):
        require_cores(ours, "99999")


def test_a_run_that_failed_or_was_stopped_leaves_a_line_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise RunFailed("nginx not found")

    def stop() -> int:
        raise KeyboardInterrupt

    assert (exit_code(fail), exit_code(stop), exit_code(lambda: 7)) == (1, 130, 7)
    assert capsys.readouterr().err == "bench: nginx not found\nbench: stopped\n"
