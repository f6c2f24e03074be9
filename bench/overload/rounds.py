"""A whole run under overload: starts engines and contenders, loads them in turn. Called by __main__.py."""

from __future__ import annotations

import http.client
import itertools
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import peers
from bench.children import Children, RunFailed
from bench.contender import Contender, free_port
from bench.figures import OURS, Sample
from bench.overload import gateway
from bench.overload.arrivals import CALLERS, PHASES, Phase, rates
from bench.overload.capacity import ENGINES
from bench.overload.figures import ALL, figure, run_of, samples_of

SLACK_S = 45.0  # for the load tool, beside its load
EMPTY_S = 20.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long, per phase; `patience_s` is how long a caller waits for the first token."""

    warm_up_s: float = 3.0
    seconds: float = 10.0
    patience_s: float = 10.0


QUICK = Sizes(warm_up_s=1.5, seconds=3.0, patience_s=3.0)


def _start_vllm_router(
    children: Children, folder: Path, upstream_ports: Sequence[int]
) -> tuple[Contender, dict[str, str]]:
    contender = peers.start_vllm_router(children, folder, *upstream_ports)
    return contender, dict.fromkeys((caller.name for caller in CALLERS), peers.KEY)


START = {OURS: gateway.start, "vllm-router": _start_vllm_router}


@dataclass(frozen=True, slots=True)
class Running:
    contender: Contender
    keys: dict[str, str]  # of the callers
    engine_ports: Sequence[int]


class Overload:
    """Use once, within `Children`. `say` is told each sub-run's outcome as it comes."""

    def __init__(self, children: Children, names: Sequence[str], sizes: Sizes, say: Callable[[str], None]) -> None:
        self._children = children
        self._names = names
        self._sizes = sizes
        self._say = say
        self._running: dict[str, Running] = {}
        self.samples: list[Sample] = []

    def run(self, rounds: int) -> None:
        """Fills `samples`; a sub-run that fails leaves one without value, and the run goes on."""
        self._start_all()
        for number, phase, name in itertools.product(range(1, rounds + 1), PHASES, self._names):
            try:
                found = self._one(name, phase, number)
            except RunFailed as exc:
                found = [Sample(run_of(phase), name, number, None, str(exc))]
            self.samples += found
            self._say(f"round {number}  {name:<12} {phase.title:<15} {told(found, phase)}")

    def _start_all(self) -> None:
        """Each contender has engines of its own; all engines are one process."""
        ports = {name: [free_port() for _ in range(ENGINES)] for name in self._names}
        command = [sys.executable, "-m", "bench.overload.engines", *map(str, itertools.chain(*ports.values()))]
        self._children.start("engines", command, cores=self._children.cores.load)
        for name in self._names:
            folder = self._children.folder / name
            folder.mkdir()
            try:
                contender, keys = START[name](self._children, folder, ports[name])
                contender.wait_until_ready()
            except RunFailed as exc:
                self._say(f"{name} does not start: {exc}")
                continue
            self._running[name] = Running(contender, keys, ports[name])

    def _one(self, name: str, phase: Phase, number: int) -> list[Sample]:
        if name not in self._running:
            raise RunFailed(f"{name} did not start")
        running, sizes = self._running[name], self._sizes
        running.contender.main.require_running()
        self._wait_until_empty(running.engine_ports)
        callers = [("--caller", who, running.keys[who], f"{per_s:.4f}") for who, per_s in rates(phase).items()]
        target = running.contender.target
        found = self._children.ask_tool(
            "overload.load",
            *(str(target.port), target.model, *itertools.chain(*callers)),
            *("--warm-up", str(sizes.warm_up_s), "--seconds", str(sizes.seconds)),
            *("--patience", str(sizes.patience_s), "--seed", str(number)),
            timeout_s=sizes.warm_up_s + sizes.seconds + sizes.patience_s + SLACK_S,
        )
        return samples_of(found, phase, name, number)

    def _wait_until_empty(self, ports: Sequence[int]) -> None:
        """What the phase before left behind is not this one's. Raises RunFailed when it stays."""
        until = time.monotonic() + EMPTY_S
        while held := sum(streams_in(port) for port in ports):
            if time.monotonic() > until:
                raise RunFailed(f"the engines still hold {held} streams of callers that are gone")
            time.sleep(POLL_S)


def streams_in(port: int) -> int:
    """Running and waiting in the engine on this port. Raises RunFailed when it does not say."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException) as exc:
        raise RunFailed(f"the engine on port {port} does not answer: {exc}") from exc
    finally:
        connection.close()
    return sum(map(int, re.findall(r"^vllm:num_requests_(?:running|waiting)\S* (\d+)$", text, re.MULTILINE)))


def told(samples: Sequence[Sample], phase: Phase) -> str:
    """One line of a sub-run."""
    values = {sample.figure: sample.value for sample in samples}
    goodput, first = values.get(figure(phase, ALL, "goodput")), values.get(figure(phase, "interactive", "first_ms_p95"))
    parts = [f"goodput {goodput:.1f} %"] if goodput is not None else []
    parts += [f"interactive TTFT p95 {first:,.0f} ms"] if first is not None else []
    return "  ".join([*parts, *(f"FAILED: {sample.note}" for sample in samples if sample.value is None)])
