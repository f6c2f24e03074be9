"""A whole run: starts upstream and contenders, measures them in turn, round by round. Called by __main__.py."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence

from bench import measure, peers, poolgate
from bench.children import Child, Children, RunFailed, tail
from bench.contender import Contender, Start, free_port
from bench.fake_upstream import SERVED_NAME
from bench.figures import OURS, Sample, Step
from bench.machine import idle_steps, open_files_limit
from bench.measure import Sizes, Value
from bench.profiles import Profiler
from bench.request import Target

START: dict[str, Start] = {
    OURS: poolgate.start,
    "nginx": peers.start_nginx,
    "vllm-router": peers.start_vllm_router,
    "litellm": peers.start_litellm,
}
TOO_SLOW = {"litellm": {"chunk_cpu_256", "idle_streams"}}  # would only show that it does not keep up
IDLE_UPSTREAM = ("--tick-ms", "100", "--slices", "30", "--tokens", "0")  # one chunk in 3 s for each stream


class Bench:
    """Use once, within `Children`. `say` is told each sub-run's outcome as it comes."""

    def __init__(
        self,
        children: Children,
        names: Sequence[str],
        sizes: Sizes,
        say: Callable[[str], None],
        profile: Profiler | None = None,
    ) -> None:
        self._children = children
        self._names = names
        self._sizes = sizes
        self._say = say
        self._profile = profile
        self._folders = itertools.count(1)
        self._running: dict[str, Contender] = {}
        self._direct = Target(0, SERVED_NAME, "none")
        self._direct_ms: tuple[float, float] | None = None
        self._round = 0
        self.samples: list[Sample] = []

    def run(self, steps: Sequence[Step], rounds: int) -> None:
        """Fills `samples`; a sub-run that fails leaves samples without value, and the run goes on."""
        if any(step != "memory" for step in steps):
            self._start_all()
        run_step = {"request": self._request, "stream": self._stream, "latency": self._latency, "memory": self._memory}
        for self._round in range(1, rounds + 1):
            for step in steps:
                run_step[step]()

    def _start_all(self) -> None:
        ports = [free_port() for _ in self._names]
        self._start_upstream("upstream", ports)
        self._direct = Target(ports[0], SERVED_NAME, "none")
        for name, port in zip(self._names, ports, strict=True):
            try:
                self._running[name] = self._start(name, port)
            except RunFailed as exc:
                self._say(f"{name} does not start: {exc}")

    def _start(self, name: str, upstream_port: int) -> Contender:
        """Raises RunFailed; what was started then goes on until `Children` ends it."""
        folder = self._children.folder / str(next(self._folders))
        folder.mkdir()
        contender = START[name](self._children, folder, upstream_port)
        contender.wait_until_ready()
        return contender

    def _start_upstream(self, name: str, ports: Sequence[int], options: Sequence[str] = ()) -> Child:
        command = [sys.executable, "-m", "bench.fake_upstream", *map(str, ports), *options]
        return self._children.start(name, command, cores=self._children.cores.load)

    # --- one step of a round: each contender in turn ------------------------------------------------------------------

    def _request(self) -> None:
        for name in self._names:
            self._attempt(name, ["request_cpu", "request_rate"], self._one_request)

    def _stream(self) -> None:
        for streams in self._sizes.streams:
            for name in self._names:
                self._attempt(name, [f"chunk_cpu_{streams}"], functools.partial(self._one_stream, streams))

    def _latency(self) -> None:
        self._direct_ms = None
        self._attempt("direct", ["added_p50", "added_p99"], self._one_direct)
        for name in self._names:
            self._attempt(name, ["added_p50", "added_p99"], self._one_latency)

    def _memory(self) -> None:
        for name in self._names:
            figures = ["idle_streams", *measure.IDLE_FIGURES]
            self._attempt(name, figures, self._one_memory)

    def _attempt(self, name: str, figures: Sequence[str], work: Callable[[str], list[Value]]) -> None:
        """`figures` are those that count as failed when `work` raises RunFailed."""
        if TOO_SLOW.get(name, set()) & set(figures):
            return
        try:
            values = work(name)
        except RunFailed as exc:
            self._say(f"round {self._round}  {name:<12} {figures[0]}: FAILED: {exc}")
            self.samples += [Sample(figure, name, self._round, None, str(exc)) for figure in figures]
            return
        self.samples += [Sample(v.figure, name, self._round, v.value, v.note) for v in values]
        if values:
            shown = "  ".join(f"{v.figure} {v.value:,.3f}{f' ({v.note})' if v.note else ''}" for v in values)
            self._say(f"round {self._round}  {name:<12} {shown}")

    # --- one sub-run --------------------------------------------------------------------------------------------------

    def _one_request(self, name: str) -> list[Value]:
        contender = self._ready(name)
        beside = self._profiler(contender, "request", self._sizes.request_s)
        return measure.request(self._children, contender, self._sizes, beside)

    def _one_stream(self, streams: int, name: str) -> list[Value]:
        contender = self._ready(name)
        beside = self._profiler(contender, f"stream-{streams}", self._sizes.stream_s)
        return measure.stream(self._children, contender, self._sizes, streams, beside)

    def _one_direct(self, name: str) -> list[Value]:
        self._direct_ms = measure.latency_ms(self._children, self._direct, self._sizes)
        return []

    def _one_latency(self, name: str) -> list[Value]:
        if self._direct_ms is None:
            raise RunFailed("there is no direct figure to compare with")
        return measure.latency(self._children, self._ready(name), self._sizes, self._direct_ms)

    def _one_memory(self, name: str) -> list[Value]:
        """In a process of its own, against an upstream of its own: nothing that ran before is in its memory."""
        port = free_port()
        upstream = self._start_upstream(f"idle-upstream-{port}", [port], IDLE_UPSTREAM)
        contender: Contender | None = None
        try:
            contender = self._start(name, port)
            steps = idle_steps(self._sizes.idle_steps, open_files_limit())
            return measure.memory(self._children, contender, port, steps)
        except RunFailed as exc:
            raise RunFailed(f"{exc}{tail(contender.main.log) if contender else ''}") from exc
        finally:
            if contender is not None:
                contender.stop(self._children)
            self._children.stop(upstream)

    def _ready(self, name: str) -> Contender:
        if name not in self._running:
            raise RunFailed(f"{name} did not start")
        contender = self._running[name]
        contender.main.require_running()
        return contender

    def _profiler(self, contender: Contender, what: str, seconds: float) -> Sequence[str]:
        if self._profile is None:
            return ()
        return self._profile.command(contender.main.pid, f"{contender.name}-{what}", seconds)
