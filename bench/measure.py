"""One sub-run of one contender for each step: starts the load, gives samples. Called by rounds.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import load_plain
from bench.children import Children
from bench.contender import Contender
from bench.figures import IDLE_STEPS, STREAMS
from bench.request import Target

START_S = 30.0  # for a load tool, beside its load
IDLE_S = 180.0
IDLE_FIGURES = tuple(f"idle_kb_{step}" for step in IDLE_STEPS)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long and how much, per sub-run."""

    warm_up_s: float = 1.0
    request_s: float = 5.0
    stream_s: float = 5.0
    requests: int = 2000  # one after the other, for the latency
    streams: tuple[int, ...] = STREAMS
    idle_steps: tuple[int, ...] = IDLE_STEPS


QUICK = Sizes(request_s=2.0, stream_s=2.0, requests=500, idle_steps=(200, 1000))


@dataclass(frozen=True, slots=True)
class Value:
    """A sample before it knows its contender and round."""

    figure: str
    value: float
    note: str = ""


def request(children: Children, contender: Contender, sizes: Sizes, on_start: Sequence[str] = ()) -> list[Value]:
    beside = [child.pid for child in contender.beside]
    found = load_plain.run(
        children,
        contender.target,
        contender.main.pid,
        seconds=sizes.request_s,
        warm_up_s=sizes.warm_up_s,
        beside=beside,
        on_start=on_start,
    )
    values = [Value("request_cpu", found.cpu_us), Value("request_rate", found.requests_per_s)]
    return [*values, Value("request_redis", found.beside_us)] if beside else values


def stream(
    children: Children, contender: Contender, sizes: Sizes, streams: int, on_start: Sequence[str] = ()
) -> list[Value]:
    found = children.ask_tool(
        "load_stream",
        *address(contender.target),
        *("--pid", str(contender.main.pid), "--streams", str(streams), "--seconds", str(sizes.stream_s)),
        timeout_s=sizes.stream_s + START_S,
        on_start=on_start,
    )
    note = (
        f"{found['events_per_s']:,.0f} chunks/s, first event p50 {found['first_p50_ms']:.1f} ms, "
        f"p99 {found['first_p99_ms']:.1f} ms"
    )
    return [Value(f"chunk_cpu_{streams}", found["cpu_us"], note)]


def latency_ms(children: Children, target: Target, sizes: Sizes) -> tuple[float, float]:
    """p50 and p99 of a request."""
    found = children.ask_tool(
        "load_latency", *address(target), "--requests", str(sizes.requests), timeout_s=START_S + sizes.requests / 20
    )
    return found["p50_ms"], found["p99_ms"]


def latency(children: Children, contender: Contender, sizes: Sizes, direct: tuple[float, float]) -> list[Value]:
    """`direct`: the same round's figures without anything between."""
    p50, p99 = latency_ms(children, contender.target, sizes)
    note = f"{p50:.3f} and {p99:.3f} ms, direct {direct[0]:.3f} and {direct[1]:.3f} ms"
    return [Value("added_p50", p50 - direct[0], note), Value("added_p99", p99 - direct[1])]


def memory(children: Children, contender: Contender, upstream_port: int, steps: Sequence[int]) -> list[Value]:
    """`contender` has just been started: memory that earlier load left behind would hide what streams take."""
    found = children.ask_tool(
        "load_idle",
        *address(contender.target),
        *("--pid", str(contender.main.pid), "--upstream-port", str(upstream_port)),
        *("--steps", ",".join(map(str, steps))),
        timeout_s=IDLE_S,
    )
    values = [
        Value(name, each / 1000, f"{step:,} streams")
        for name, step, each in zip(IDLE_FIGURES, steps, found["bytes_each"], strict=True)
    ]
    return [*values, Value("idle_streams", found["finished"])]


def address(target: Target) -> tuple[str, str, str]:
    return str(target.port), target.model, target.key
