"""`python -m bench.overload`, behind `make bench-overload`: reads the options, runs, prints the report and writes it.

python -m bench.overload                       three rounds, written to bench/results
python -m bench.overload --quick               one short round of about a minute, only printed
python -m bench.overload --only gateway        while developing
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
from bench.children import Children, Cores, RunFailed
from bench.command import RESULTS, busy_remarks, exit_code, require_cores, say, write
from bench.figures import Samples
from bench.overload.arrivals import FIVEFOLD, rates
from bench.overload.report import chart, markdown
from bench.overload.rounds import QUICK, START, Overload, Sizes
from bench.report import Run


def main() -> int:
    given = arguments()
    return exit_code(lambda: run(given))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description="What callers get under overload.")
    parser.add_argument("--only", help="contenders, separated by commas")
    parser.add_argument("--rounds", type=int, help="default: 3; with --quick 1")
    parser.add_argument("--quick", action="store_true", help="a smoke run: short, nothing is written")
    parser.add_argument("--out", type=Path, help="folder for report and chart; default: bench/results for a whole run")
    parser.add_argument("--cores", default="0", help="where the measured one runs; default 0")
    parser.add_argument("--load-cores", default="1", help="where load, engines and Redis run: 1 or 1,2; default 1")
    given = parser.parse_args(argv)
    given.contenders = list(dict.fromkeys(given.only.split(","))) if given.only else list(START)
    if unknown := set(given.contenders) - set(START):
        parser.error(f"no contender is called {', '.join(sorted(unknown))}; there are {', '.join(START)}")
    given.rounds = given.rounds or (1 if given.quick else 3)
    given.out = given.out or (None if given.quick or given.only else RESULTS)
    return given


def run(given: argparse.Namespace) -> int:
    """The exit code: 1 when a sub-run failed. A missed target is a result, not a failure."""
    sizes = QUICK if given.quick else Sizes()
    require_cores(given.cores, given.load_cores)
    require_open_files(sizes, machine.open_files_limit())
    if "vllm-router" in given.contenders or given.out:
        install.environment(install.PEERS_VENV, install.PEERS)
    load, _, _ = os.getloadavg()
    facts = machine.facts(given.contenders)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Children(Path(folder), Cores(given.cores, given.load_cores)) as children,
    ):
        overload = Overload(children, given.contenders, sizes, say)
        overload.run(given.rounds)
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    name = f"overload-{today}-{machine.short_commit()}"
    result = Run(
        title=f"Overload, {today}, commit {machine.short_commit()}",
        command=shlex.join(["python", "-m", "bench.overload", *sys.argv[1:]]),
        rounds=given.rounds,
        took_s=time.monotonic() - began,
        contenders=given.contenders,
        machine=facts,
        samples=Samples(overload.samples),
        image=f"{name}.png" if given.out else "",
        remarks=[*remarks(given.quick, sizes), *busy_remarks(load)],
        has_targets=not given.quick,
    )
    print(markdown(result))
    if given.out:
        write(given.out, name, markdown(result), chart(result))
    return 1 if result.samples.failures() else 0


def remarks(is_quick: bool, sizes: Sizes) -> list[str]:
    found = ["A smoke run: too short to say more than that everything runs."] if is_quick else []
    return [
        *found,
        f"Who has no token after {sizes.patience_s:g} s gives up, and counts with that as his TTFT. Nobody asks again.",
        f"Measured for {sizes.seconds:g} s after a warm-up of {sizes.warm_up_s:g} s.",
    ]


def require_open_files(sizes: Sizes, limit: int) -> None:
    """A proxy needs two for each stream, and one without a queue holds all that came in the time of patience."""
    needed = round(2 * sum(rates(FIVEFOLD).values()) * sizes.patience_s) + 500
    if limit < needed:
        raise RunFailed(f"a process may have {limit:,} files open here, and {needed:,} are needed; raise ulimit -Hn")


if __name__ == "__main__":
    sys.exit(main())
