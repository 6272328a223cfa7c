"""The learning curves of a comparison as a picture: one panel a stage, a line and a band for every variant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gigpo_lightning.compare.report import curve
from gigpo_lightning.compare.statistics import on_grid

# Okabe and Ito's colours, told apart by colour-blind readers; the dashes for print in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)))
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_GRID = 200


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Success on unseen tasks against environment steps: the mean over seeds, and the range of the seeds as a band."""
    from matplotlib.figure import Figure

    stages, runs = list(report["stages"]), report["runs"]
    columns = min(3, max(1, len(stages)))
    lines = -(-len(stages) // columns)
    figure = Figure(figsize=(1.2 + 4.6 * columns, 0.9 + 3.3 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False)
    longest = max((point["env_steps"] for run in runs for point in run["points"]), default=1)
    grid = np.linspace(0, longest, _GRID)
    for panel, stage in zip(panels.flat, stages, strict=False):
        for number, (variant, label) in enumerate(report["labels"].items()):
            curves = [curve(run, stage) for run in runs if run["variant"] == variant]
            _draw_variant(panel, [points for points in curves if points], grid, number, label)
        panel.set(xlim=(0, longest), ylim=(-0.02, 1.02), title=stage)
        panel.set(xlabel="environment steps of the training", ylabel="success on unseen tasks")
        panel.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(panels.flat)[len(stages) :]:
        panel.set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=_balanced(len(labels), 4), frameon=False)
    figure.savefig(path, dpi=150)


def _balanced(count: int, most: int) -> int:
    """Columns, at most `most`, for lines of as equal length as can be."""
    lines = -(-count // most)
    return -(-count // lines)


def _draw_variant(panel: Any, curves: list[Any], grid: np.ndarray, number: int, label: str) -> None:
    if not curves:
        return
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
    rows = np.stack([on_grid(points, grid) for points in curves])
    # NaN, and not drawn, from where the shortest run ends: with fewer seeds the line would jump.
    mean, low, high = rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0)
    text = f"{label} ({len(curves)} seed{'s' * (len(curves) > 1)})"
    # A mark stands where the first seed was evaluated; the others were within an iteration of it.
    evaluated = sorted({int(np.abs(grid - steps).argmin()) for steps, _ in curves[0]})
    marks = {"marker": _MARKS[number % len(_MARKS)], "markevery": evaluated, "markersize": 4.5}
    panel.plot(grid, mean, color=colour, linestyle=dash, linewidth=2.0, label=text, **marks)
    if len(curves) > 1:
        panel.fill_between(grid, low, high, color=colour, alpha=0.13, linewidth=0)
