"""Never silent, never noisy: what the set-up shows, on a terminal and in a log."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from deploy.demo.progress import CommandFailed, Progress


class Clock:
    """Time that passes only when told; `steps` lets each look at it cost that many seconds."""

    def __init__(self, steps: float = 0.0) -> None:
        self.now = 0.0
        self.steps = steps

    def __call__(self) -> float:
        self.now += self.steps
        return self.now


def shown(is_live: bool, act: Callable[[Progress, Clock], None], *, clock: Clock | None = None) -> str:
    clock = clock or Clock()
    out = io.StringIO()
    progress = Progress(out, io.BytesIO(), steps=2, is_live=is_live, clock=clock)
    with progress.step("vLLM"):
        act(progress, clock)
    return out.getvalue()


def a_slow_note(progress: Progress, clock: Clock) -> None:
    clock.now += 5.2
    progress.note("downloading torch (191.8 MB)")
    progress.note("downloading idna (71 kB)")


def test_a_log_gets_a_line_every_five_seconds_and_one_at_the_end() -> None:
    assert shown(False, a_slow_note).splitlines() == [
        "[1/2] vLLM",
        "[1/2] vLLM · 5 s · downloading torch (191.8 MB)",
        "[1/2] vLLM · 5 s · done",
    ]


def test_a_terminal_gets_one_line_that_is_written_over() -> None:
    text = shown(True, a_slow_note)
    assert text.count("\n") == 1 and text.endswith("· done\n")
    assert "\r\x1b[K[1/2] vLLM · 5 s · downloading torch" in text


def test_what_the_user_should_know_stays_on_the_screen() -> None:
    text = shown(True, lambda progress, clock: progress.say("several GB to download"))
    assert "several GB to download\n" in text


def test_a_failed_step_is_not_called_done() -> None:
    out = io.StringIO()
    progress = Progress(out, io.BytesIO(), steps=1, is_live=False, clock=Clock())
    with pytest.raises(CommandFailed), progress.step("vLLM"):
        progress.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"])
    assert "done" not in out.getvalue()


def test_a_command_tells_what_it_is_at_and_leaves_its_noise_in_the_log() -> None:
    out, log = io.StringIO(), io.BytesIO()
    progress = Progress(out, log, steps=1, is_live=False, clock=Clock(steps=10.0))
    with progress.step("vLLM"):
        tail = progress.run(
            [sys.executable, "-c", "print('Collecting torch'); print('noise')"],
            describe=lambda line: "looking up torch" if line.startswith("Collecting") else None,
        )
    assert tail == ["Collecting torch", "noise"]
    assert b"noise" in log.getvalue()
    assert "looking up torch" in out.getvalue() and "noise" not in out.getvalue()


def test_a_failure_carries_its_code_and_last_lines() -> None:
    progress = Progress(io.StringIO(), io.BytesIO(), steps=1, is_live=False)
    with pytest.raises(CommandFailed) as failed:
        progress.run([sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"])
    assert (failed.value.code, failed.value.tail) == (3, ["why"])


def test_a_command_that_never_ends_is_ended() -> None:
    progress = Progress(io.StringIO(), io.BytesIO(), steps=1, is_live=False, clock=Clock(steps=30.0))
    with pytest.raises(CommandFailed) as failed:
        progress.run([sys.executable, "-c", "import time; time.sleep(600)"], limit_s=100)
    assert failed.value.tail[-1] == "given up after 100 s"
