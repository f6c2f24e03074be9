"""Requests without streaming, by wrk: 32 kept-alive connections that each ask again at once. Called by measure.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.children import Children, RunFailed
from bench.cpu import cpu_s, tree
from bench.request import PATH, Target, body, headers

CONNECTIONS = 32
_REQUESTS = re.compile(r"(\d+) requests in")
_RATE = re.compile(r"Requests/sec:\s+([\d.]+)")
_REFUSED = re.compile(r"Non-2xx or 3xx responses: (\d+)")
_SOCKET = re.compile(r"Socket errors: (.*)")


@dataclass(frozen=True, slots=True)
class PlainLoad:
    requests: int
    requests_per_s: float
    cpu_us: float  # of the contender, per request
    beside_us: float  # of what the contender needs beside itself (Redis), per request


def run(
    children: Children,
    target: Target,
    pid: int,
    *,
    seconds: float,
    warm_up_s: float,
    beside: Sequence[int] = (),
    on_start: Sequence[str] = (),
) -> PlainLoad:
    """Raises RunFailed when a single answer was not a 2xx or a connection broke."""
    script = children.folder / "wrk.lua"
    script.write_text(lua(target))
    _wrk(children, script, target, warm_up_s)
    measured, others = tree([pid]), tree(beside)
    before, before_others = cpu_s(measured), cpu_s(others)
    text = _wrk(children, script, target, seconds, on_start)
    spent, spent_others = cpu_s(measured) - before, cpu_s(others) - before_others
    requests, rate = read(text)
    return PlainLoad(requests, rate, spent / requests * 1e6, spent_others / requests * 1e6)


def _wrk(children: Children, script: Path, target: Target, seconds: float, on_start: Sequence[str] = ()) -> str:
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{max(1, round(seconds))}s", "--timeout", "10s"]
    command += ["-s", str(script), f"http://{target.host}:{target.port}{PATH}"]
    return children.ask(command, timeout_s=seconds + 30, on_start=on_start)


def lua(target: Target) -> str:
    """The script that tells wrk what to send."""
    lines = ['wrk.method = "POST"', f"wrk.body = [==[{body(target.model, is_stream=False).decode()}]==]"]
    lines += [f'wrk.headers["{name}"] = "{value}"' for name, value in headers(target).items()]
    return "\n".join(lines) + "\n"


def read(text: str) -> tuple[int, float]:
    """Requests and requests/s from what wrk 4 prints. Raises RunFailed when it reports an error, or no request."""
    requests, rate = _REQUESTS.search(text), _RATE.search(text)
    if requests is None or rate is None or requests[1] == "0":
        raise RunFailed(f"wrk finished no request: {text.strip()[-300:]}")
    if refused := _REFUSED.search(text):
        raise RunFailed(f"{refused[1]} of {requests[1]} answers were not 2xx")
    if errors := _SOCKET.search(text):
        raise RunFailed(f"wrk had socket errors: {errors[1]}")
    return int(requests[1]), float(rate[1])
