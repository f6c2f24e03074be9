"""The report of an overload run as Markdown, and its chart as data. Pure; called by __main__.py."""

from __future__ import annotations

from collections.abc import Sequence

from bench.figures import OURS, Samples
from bench.overload.arrivals import CALLERS, INTERACTIVE_SHARE, PHASES, Phase
from bench.overload.capacity import ENGINES, PER_S, SERVICE_S, SLOTS
from bench.overload.figures import ALL, CLASSES, COUNTS, TARGETS, Target, figure, judge, measured, run_of, shares
from bench.report import Run, failures_list, shown, table

TIMES = ("queue_ms_p50", "queue_ms_p95", "first_ms_p50", "first_ms_p95")
TIME_TITLES = ("queue p50, ms", "queue p95, ms", "TTFT p50, ms", "TTFT p95, ms")
LOAD = (
    f"{ENGINES} engines serve {SLOTS} streams each, for {SERVICE_S * 1e3:.0f} ms in the mean: {PER_S:.1f} requests a "
    f"second are their capacity. The interactive class asks for {INTERACTIVE_SHARE:g} of it in every phase, batch for "
    "the rest."
)


def markdown(run: Run) -> str:
    parts = [f"# {run.title}", f"`{run.command}`: {run.rounds} rounds, the contenders in turn, {run.took_s:.0f} s."]
    if run.image:
        parts.append(f"![medians of all rounds; the lines show lowest and highest]({run.image})")
    if run.remarks:
        parts.append("\n".join(f"- {remark}" for remark in run.remarks))
    parts.append(LOAD)
    if run.has_targets and OURS in run.contenders:
        parts += ["## Targets", targets_table(run)]
    parts += ["## What became of the requests", "Median of all rounds (lowest – highest); counts are medians."]
    for name in run.contenders:
        parts += [f"### {name}", outcome_table(run.samples, name)]
    parts += ["## Batch, by user", "Share of what both have, by the medians, %.", users_table(run)]
    if failures := run.samples.failures():
        parts += ["## Failed", failures_list(failures)]
    parts += ["## All rounds", *(rounds_table(run, phase, *each) for each in JUDGED for phase in PHASES)]
    parts += ["## Machine", table(["what", "is"], run.machine.items())]
    return "\n\n".join(parts) + "\n"


JUDGED = (("interactive", "first_ms_p95", "interactive TTFT p95, ms", 0), (ALL, "goodput", "goodput, %", 1))


def targets_table(run: Run) -> str:
    peers = [name for name in run.contenders if name != OURS]
    rows = []
    for target in TARGETS:
        verdict, found = judge(target, run.samples)
        wanted = f"{target.title} {'≥' if target.is_floor else '≤'} {target.bound:g} {target.unit}".rstrip()
        digits = 1 if target.unit else 2
        others = [shown(measured(target, run.samples, peer), digits) for peer in peers]
        rows.append([wanted, shown(found, digits), verdict, *others])
    return table(["target", "measured", "", *peers], rows)


def outcome_table(samples: Samples, contender: str) -> str:
    rows = []
    for phase in PHASES:
        goodput = shown(samples.spread(figure(phase, ALL, "goodput"), contender), 1)
        for name in CLASSES:
            if samples.spread(figure(phase, name, "offered"), contender) is None:
                continue
            counts = [samples.spread(figure(phase, name, count), contender) for count in COUNTS]
            times = [shown(samples.spread(figure(phase, name, each), contender), 0) for each in TIMES]
            shown_counts = [f"{count.median:,.0f}" if count else "–" for count in counts]
            title = f"{phase.title}, **failed** in some" if has_failed(samples, phase, contender) else phase.title
            rows.append([title, name, *shown_counts, *times, goodput])
    heads = ["load", "class", *(count.replace("_", " ") for count in COUNTS), *TIME_TITLES, "goodput of all, %"]
    return table(heads, rows)


def has_failed(samples: Samples, phase: Phase, contender: str) -> bool:
    return samples.has_failed(run_of(phase), contender)


def users_table(run: Run) -> str:
    users = [caller.name for caller in CALLERS if caller.class_name == "batch"]
    rows = []
    for phase in PHASES:
        for name in run.contenders:
            asked, served = (shares(run.samples, phase, name, what, users) for what in ("offered", "served"))
            if asked:
                cells = [f"{asked[user]:.0f} → {served.get(user, 0):.0f}" if served else "–" for user in users]
                rows.append([phase.title, name, *cells])
    return table(["load", "", *(f"{user}: offered → served" for user in users)], rows)


def rounds_table(run: Run, phase: Phase, who: str, what: str, title: str, digits: int) -> str:
    rows = []
    for name in run.contenders:
        values = run.samples.values(figure(phase, who, what), name)
        cells = [f"{values[n]:,.{digits}f}" if n in values else "–" for n in range(1, run.rounds + 1)]
        rows.append([name, *cells])
    return table([f"{title}, {phase.title}", *(str(n) for n in range(1, run.rounds + 1))], rows)


def chart(run: Run) -> dict[str, object]:
    """What plot.py draws: a row of panels for each judged figure, a panel for each phase."""
    panels: list[dict[str, object]] = []
    for who, what, title, digits in JUDGED:
        for phase in PHASES:
            limits = [limit(run.samples, target) for target in TARGETS if target.is_about(phase, who, what)]
            panels.append(
                {
                    "title": f"{title}, {phase.title}",
                    "digits": digits,
                    "limit": limits[0] if limits else None,
                    "bars": bars(run.samples, figure(phase, who, what), run.contenders),
                }
            )
    return {"title": run.title, "panels": panels}


def limit(samples: Samples, target: Target) -> float | None:
    """The bound as a value of the figure itself; None where there is nothing to take it from."""
    if target.alone is None:
        return target.bound
    base = samples.spread(figure(target.alone, target.who, target.what), OURS)
    return base.median * target.bound if base else None


def bars(samples: Samples, figure_id: str, contenders: Sequence[str]) -> list[dict[str, object]]:
    return [
        {"name": name, "median": found.median, "low": found.low, "high": found.high}
        for name in contenders
        if (found := samples.spread(figure_id, name)) is not None
    ]
