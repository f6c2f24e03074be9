"""What the commands of this package share: how they end, the cores they take, the files they leave.

Used by __main__.py and overload/__main__.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from bench.children import ROOT, RunFailed
from bench.install import PEERS_VENV

RESULTS = ROOT / "bench/results"
BUSY_LOAD = 1.0  # processes that wanted a core, mean of the last minute
PLOT_S = 120.0


def exit_code(work: Callable[[], int]) -> int:
    """What `work` returns, or 1 for a run that failed and 130 for one that was stopped; both leave a line."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return work()
    except KeyboardInterrupt:
        say("bench: stopped")
        return 130
    except RunFailed as exc:
        say(f"bench: {exc}")
        return 1


def require_cores(*lists: str) -> None:
    """Raises RunFailed when a core is not ours to use, or would have to do two things."""
    wanted = [int(core) for cores in lists for core in cores.split(",")]
    if missing := set(wanted) - os.sched_getaffinity(0):
        raise RunFailed(f"core {', '.join(map(str, sorted(missing)))} is not there; see --cores and --load-cores")
    if len(set(wanted)) != len(wanted):
        raise RunFailed("the measured one and the load need cores of their own: two cores at least")


def busy_remarks(load: float) -> list[str]:
    """`load`: the mean of the minute before the run."""
    if load <= BUSY_LOAD:
        return []
    return [f"The machine was busy before the run (load {load:.1f}): all figures are rough."]


def write(folder: Path, name: str, text: str, chart: Mapping[str, object]) -> None:
    """NAME.md and, drawn by plot.py, NAME.png. Raises RunFailed where the chart cannot be drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    report, image = folder / f"{name}.md", folder / f"{name}.png"
    report.write_text(text)
    command = [str(PEERS_VENV / "bin/python"), str(ROOT / "bench/plot.py"), str(image)]
    done = subprocess.run(command, input=json.dumps(chart), capture_output=True, text=True, timeout=PLOT_S, check=False)
    if done.returncode != 0:
        raise RunFailed(f"{report} is written, but no chart: {done.stderr.strip()[-500:]}")
    say(f"written: {report} and {image.name}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
