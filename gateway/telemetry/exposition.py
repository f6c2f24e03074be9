"""The metrics as Prometheus reads them: text format 0.0.4, written by hand. Called by edge/ops.py for `/metrics`.

By hand, since it is these few lines: the library's collectors would be built anew for every scrape, out of sums that
are here already, on the event loop that all streams wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from gateway.telemetry.families import BUILD, FAMILIES, PROCESSES, REPLICAS, Family
from gateway.telemetry.instruments import OTHER
from gateway.telemetry.shared_values import SharedValues

PREFIX = "poolgate_"
CONTENT_TYPE = "text/plain; version=0.0.4"  # Litestar adds the charset
_GAUGES = frozenset(family.name for family in FAMILIES if family.kind == "gauge")
Labels = tuple[str, ...]


def exposition(shared: SharedValues, replicas: Mapping[tuple[str, str], int], version: str, revision: str) -> str:
    """The whole text. `replicas` counts them by pool and state; a series of the rest that never counted is left out."""
    found: dict[str, dict[Labels, list[float]]] = {family.name: {} for family in FAMILIES}
    for (name, labels), values in shared.sums(_GAUGES).items():
        if name in found and (any(values) or OTHER not in labels):
            found[name][labels] = values
    found[PROCESSES.name] = {(): [float(shared.taken())]}
    found[REPLICAS.name] = {key: [float(count)] for key, count in replicas.items()}
    found[BUILD.name] = {(version, revision): [1.0]}
    lines: list[str] = []
    for family in FAMILIES:
        lines += _family_lines(family, found[family.name])
    return "\n".join(lines) + "\n"


def _family_lines(family: Family, series: Mapping[Labels, list[float]]) -> Iterable[str]:
    name = PREFIX + family.name
    yield f"# HELP {name} {family.meaning}"
    yield f"# TYPE {name} {family.kind}"
    for labels, values in series.items():
        pairs = [f'{label}="{_escaped(value)}"' for label, value in zip(family.labels, labels, strict=True)]
        if not family.bounds:
            yield f"{name}{_braces(pairs)} {_number(values[0])}"
            continue
        total_s, *counts = values
        running = list(accumulate(counts))
        bucket = name + "_bucket{" + "".join(f"{pair}," for pair in pairs)
        for bound, count in zip((*map(_number, family.bounds), "+Inf"), running, strict=True):
            yield f'{bucket}le="{bound}"}} {_number(count)}'
        yield f"{name}_sum{_braces(pairs)} {_number(total_s)}"
        yield f"{name}_count{_braces(pairs)} {_number(running[-1])}"


def _braces(pairs: list[str]) -> str:
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
