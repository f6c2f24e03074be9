"""Draws the chart of a run: one panel per figure, bars for medians, lines from lowest to highest.

    PYTHON bench/plot.py OUT.png < chart.json

Run by __main__.py with the Python of `.venv-bench`, which has matplotlib; so it imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"gateway": "#1b7f5c", "nginx": "#8a8f98", "vllm-router": "#c4622d", "litellm": "#6a5acd"}
COLUMNS = 4


def draw(chart: dict[str, Any], path: str) -> None:
    """`chart`: {"title", "panels": [{"title", "digits", "limit": number or null, "bars": [bar]}]}.

    A bar is {"name", "median", "low", "high"}.
    """
    panels = chart["panels"]
    rows = -(-len(panels) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(4 * COLUMNS, 3.2 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, panel in zip(axes.flat, panels, strict=False):
        for bar in panel["bars"]:
            errors = [[bar["median"] - bar["low"]], [bar["high"] - bar["median"]]]
            axis.bar(bar["name"], bar["median"], yerr=errors, capsize=4, color=COLOURS.get(bar["name"], "#444444"))
            axis.annotate(
                f"{bar['median']:,.{panel['digits']}f}",
                (bar["name"], bar["high"]),
                ha="center",
                va="bottom",
                fontsize=8,
            )
        if panel["limit"] is not None:
            axis.axhline(panel["limit"], linestyle="--", linewidth=1, color="#b00020")
        axis.set_title(panel["title"], fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.margins(y=0.15)
    figure.suptitle(chart["title"], fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
