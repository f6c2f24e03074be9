"""Commands of profilers that run beside a measurement, for looking where time goes. Called by rounds.py.

Figures of a profiled run are higher than they are without.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.install import PEERS_VENV

Kind = Literal["perf", "py-spy"]


@dataclass(frozen=True, slots=True)
class Profiler:
    kind: Kind
    folder: Path  # where its files go

    def command(self, pid: int, name: str, seconds: float) -> list[str]:
        """Ends by itself after `seconds`, in whole ones. perf: `perf report -i FILE`; py-spy: a flame graph."""
        lasts = str(max(1, round(seconds)))
        if self.kind == "perf":
            file = str(self.folder / f"{name}.perf")
            return ["perf", "record", "--quiet", "-F", "997", "-g", "-o", file, "-p", str(pid), "--", "sleep", lasts]
        file = str(self.folder / f"{name}.svg")
        pyspy = str(PEERS_VENV / "bin/py-spy")
        return [pyspy, "record", "--rate", "250", "--duration", lasts, "--output", file, "--pid", str(pid)]
