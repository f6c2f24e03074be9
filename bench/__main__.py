"""`python -m bench`, behind `make bench`: reads the options, runs, prints the report and writes it. docs/benchmarks.md.

python -m bench                                   all figures, five rounds, written to bench/results
python -m bench --quick                           the same in about a minute, only printed
python -m bench request stream --only gateway     a single measurement while developing
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench import install, machine
from bench.children import ROOT, Children, Cores
from bench.command import RESULTS, busy_remarks, exit_code, require_cores, say, write
from bench.figures import FIGURES, IDLE_STEPS, STEPS, TARGETS, Samples
from bench.measure import QUICK, Sizes
from bench.profiles import Profiler
from bench.report import Run, markdown, named
from bench.rounds import START, Bench

PROFILES = ROOT / ".poolgate/profiles"
ALWAYS = ("gateway", "nginx", "vllm-router")


def main() -> int:
    given = arguments()
    return exit_code(lambda: run(given))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Poolgate's data path beside other proxies.")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}: only these, one round")
    parser.add_argument("--only", help="contenders, separated by commas")
    parser.add_argument(
        "--with", dest="extra", choices=["litellm"], action="append", default=[], help="beside the rest"
    )
    parser.add_argument("--rounds", type=int, help="default: 5; with STEP or --quick 1")
    parser.add_argument("--quick", action="store_true", help="a smoke run: short and small, nothing is written")
    parser.add_argument("--out", type=Path, help="folder for report and chart; default: bench/results for a whole run")
    parser.add_argument("--cores", default="0", help="where the measured one runs; default 0")
    parser.add_argument("--load-cores", default="1", help="where load, upstream and Redis run: 1 or 1,2; default 1")
    parser.add_argument("--profile", choices=["perf", "py-spy"], help=f"into {PROFILES.relative_to(ROOT)}")
    given = parser.parse_args(argv)
    if unknown := set(given.steps) - set(STEPS):
        parser.error(f"no step is called {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    given.contenders = list(dict.fromkeys([*(given.only.split(",") if given.only else ALWAYS), *given.extra]))
    if unknown := set(given.contenders) - set(START):
        parser.error(f"no contender is called {', '.join(sorted(unknown))}; there are {', '.join(START)}")
    is_part = bool(given.steps) or given.quick
    given.rounds = given.rounds or (1 if is_part else 5)
    given.out = given.out or (None if is_part or given.only else RESULTS)
    given.is_whole = not is_part
    given.steps = [step for step in STEPS if step in given.steps or not given.steps]
    return given


def run(given: argparse.Namespace) -> int:
    """The exit code: 1 when a sub-run failed. A missed target is a result, not a failure."""
    require_cores(given.cores, given.load_cores)
    prepare(given)
    load, _, _ = os.getloadavg()
    facts = machine.facts(given.contenders)
    profile = None
    if given.profile:
        PROFILES.mkdir(parents=True, exist_ok=True)
        profile = Profiler(given.profile, PROFILES)
    sizes = QUICK if given.quick else Sizes()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Children(Path(folder), Cores(given.cores, given.load_cores)) as children,
    ):
        bench = Bench(children, given.contenders, sizes, say, profile)
        bench.run(given.steps, given.rounds)
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    name = f"{today}-{machine.short_commit()}"
    result = Run(
        title=f"Benchmark of {today}, commit {machine.short_commit()}",
        command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        rounds=given.rounds,
        took_s=time.monotonic() - began,
        contenders=given.contenders,
        machine=facts,
        samples=Samples(bench.samples),
        image=f"{name}.png" if given.out else "",
        remarks=remarks(given, sizes, load),
        has_targets=given.is_whole,
    )
    print(markdown(result))
    if given.out:
        write(given.out, name, markdown(result), chart(result))
    return 1 if result.samples.failures() else 0


def remarks(given: argparse.Namespace, sizes: Sizes, load: float) -> list[str]:
    found = ["A smoke run: too short to say more than that everything runs."] if given.quick else []
    found += busy_remarks(load)
    steps = machine.idle_steps(sizes.idle_steps, machine.open_files_limit())
    if "memory" in given.steps and tuple(steps) != IDLE_STEPS:
        held, named_so = (" and ".join(f"{step:,}" for step in some) for some in (steps, IDLE_STEPS))
        found.append(f"Idle streams: {held} were open where it says {named_so}.")
    if "memory" in given.steps and steps[-1] < sizes.idle_steps[-1]:
        limit = machine.open_files_limit()
        found.append(f"A process may have {limit:,} files open here, and a proxy needs two for each stream.")
    if given.profile:
        found.append(f"Profiled by {given.profile}: the figures are higher than they are without.")
    return found


def prepare(given: argparse.Namespace) -> None:
    programs = [name for name in ("nginx",) if name in given.contenders] + ["wrk"] * ("request" in given.steps)
    install.programs(programs)
    if "vllm-router" in given.contenders or given.out or given.profile == "py-spy":
        install.environment(install.PEERS_VENV, install.PEERS)
    if "litellm" in given.contenders:
        install.environment(install.LITELLM_VENV, install.LITELLM)


def chart(result: Run) -> dict[str, object]:
    """What plot.py draws: the medians with their range, and a target where it is a plain number."""
    limits = {target.figure: target.bound for target in TARGETS if target.peer is None}
    panels = []
    for figure in FIGURES:
        bars = [
            {"name": name, "median": found.median, "low": found.low, "high": found.high}
            for name in result.contenders
            if (found := result.samples.spread(figure.id, name)) is not None
        ]
        if bars and figure.in_chart:
            limit = limits.get(figure.id)
            panels.append({"title": named(figure), "digits": figure.digits, "limit": limit, "bars": bars})
    return {"title": result.title, "panels": panels}


if __name__ == "__main__":
    sys.exit(main())
