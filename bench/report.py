"""The report of a run as Markdown: targets, figures, ratios, all rounds, the machine. Pure; called by __main__.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.figures import FIGURES, OURS, TARGETS, Figure, Sample, Samples, Target, judge
from bench.spread import Spread


@dataclass(frozen=True, slots=True)
class Run:
    """What a report is made from."""

    title: str
    command: str
    rounds: int
    took_s: float
    contenders: Sequence[str]
    machine: Mapping[str, str]
    samples: Samples
    image: str = ""  # file name of the chart beside the report
    remarks: Sequence[str] = ()  # what a reader must know before the figures
    has_targets: bool = True  # a part, or a smoke run, is not held to them


def markdown(run: Run) -> str:
    figures = [f for f in FIGURES if any(run.samples.values(f.id, c) for c in run.contenders)]
    peers = [name for name in run.contenders if name != OURS]
    parts = [f"# {run.title}", f"`{run.command}`: {run.rounds} rounds, the contenders in turn, {run.took_s:.0f} s."]
    if run.image:
        parts.append(f"![medians of all rounds; the lines show lowest and highest]({run.image})")
    if run.remarks:
        parts.append("\n".join(f"- {remark}" for remark in run.remarks))
    if OURS in run.contenders and run.has_targets:
        parts += ["## Targets", targets(run.samples)]
    parts += ["## Figures", "Median of all rounds (lowest – highest).", figures_table(run, figures)]
    with_ratio = [f for f in figures if f.has_ratio]
    if peers and OURS in run.contenders and with_ratio:
        parts += [
            "## Ratios",
            f"{OURS} / peer within each round: median (lowest – highest).",
            ratios_table(run, peers, with_ratio),
        ]
    if failures := run.samples.failures():
        parts += ["## Failed", failures_list(failures)]
    parts += ["## All rounds", *(rounds_table(run, figure) for figure in figures)]
    if notes := [
        f"- {s.figure}, {s.contender}, round {s.round}: {s.note}" for s in run.samples.all if s.value and s.note
    ]:
        parts += ["### Beside the figures", "\n".join(notes)]
    parts += ["## Machine", table(["what", "is"], run.machine.items())]
    return "\n\n".join(parts) + "\n"


def targets(samples: Samples) -> str:
    titles = {figure.id: figure for figure in FIGURES}
    rows = []
    for target in TARGETS:
        figure = titles[target.figure]
        verdict, measured = judge(target, samples)
        digits = 2 if target.peer else figure.digits
        rows.append([wanted(target, figure), shown(measured, digits), verdict])
    return table(["target", "measured", ""], rows)


def wanted(target: Target, figure: Figure) -> str:
    sign = "≥" if target.is_floor else "≤"
    bound = f"{target.bound:,g} × {target.peer}" if target.peer else f"{target.bound:,g} {figure.unit}".rstrip()
    return f"{figure.title} {sign} {bound}"


def figures_table(run: Run, figures: Sequence[Figure]) -> str:
    rows = []
    for figure in figures:
        cells = [cell(run.samples, figure, contender) for contender in run.contenders]
        rows.append([named(figure), *cells])
    return table(["", *run.contenders], rows)


def cell(samples: Samples, figure: Figure, contender: str) -> str:
    text = shown(samples.spread(figure.id, contender), figure.digits)
    return f"{text}, **failed** in some" if samples.has_failed(figure.id, contender) and text != "–" else text


def ratios_table(run: Run, peers: Sequence[str], figures: Sequence[Figure]) -> str:
    rows = [[figure.title, *(shown(run.samples.ratio(figure.id, peer), 2) for peer in peers)] for figure in figures]
    return table(["", *peers], rows)


def rounds_table(run: Run, figure: Figure) -> str:
    rows = []
    for contender in run.contenders:
        values = run.samples.values(figure.id, contender)
        cells = [f"{values[n]:,.{figure.digits}f}" if n in values else "–" for n in range(1, run.rounds + 1)]
        if values:
            rows.append([contender, *cells])
    return table([named(figure), *(str(n) for n in range(1, run.rounds + 1))], rows)


def failures_list(failures: Iterable[Sample]) -> str:
    """One line per sub-run, which may be several figures."""
    figures: dict[str, list[str]] = {}
    for s in failures:
        figures.setdefault(f"round {s.round}, {s.contender}: {' '.join(s.note.split())}", []).append(s.figure)
    return "\n".join(f"- {what} ({', '.join(names)})" for what, names in figures.items())


def named(figure: Figure) -> str:
    return f"{figure.title}, {figure.unit}" if figure.unit else figure.title


def shown(found: Spread | None, digits: int) -> str:
    if found is None:
        return "–"
    if found.rounds == 1:
        return f"{found.median:,.{digits}f}"
    return f"{found.median:,.{digits}f} ({found.low:,.{digits}f} – {found.high:,.{digits}f})"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(heads))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
