"""What the runs of `learning_curves.py` gave: read from their folders, as tables and as a picture.

Knows the files that a run leaves; starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

from gigpo_lightning.curriculum import Stage, load_stages
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks


class Variant(NamedTuple):
    """What it adds to the configuration, and how it is drawn."""

    options: list[str]
    label: str
    colour: str  # of Okabe and Ito's, told apart by colour-blind readers
    style: str  # for print in grey


VARIANTS = {
    "gigpo": Variant([], "GiGPO", "#0072B2", "-"),
    "grpo": Variant(["--data.credit.estimator=grpo"], "λ = 1: episode advantage only (GRPO)", "#D55E00", "--"),
    "step": Variant(["--data.credit.estimator=step"], "λ = 0: step advantage only", "#009E73", ":"),
    "warm": Variant(["--trainer.callbacks+=WarmStart"], "GiGPO after imitation of the expert", "#CC79A7", "-."),
}
RUN_FILE = "learning_curves_run.json"  # in a run's folder: when it was started, with what, and how it ended
LOG_FILE = "fit.log"
Curve = list[tuple[float, float]]


def read_state(folder: Path) -> dict[str, Any]:
    """What is known of a run; empty where it was not started."""
    path = folder / RUN_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_run(folder: Path) -> dict[str, Any]:
    """The curves of a run, in minutes since its process was started.

    `success` are (minute, success rate) on unseen tasks of the first stage; `stage` are (minute, stage) at the end of
    every iteration, counted from 0; `promotions` name the stage that was left, after how many iterations of the run,
    and the minute; `passed` says whether the last stage was passed.
    """
    state = read_state(folder)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    stages = stages_of(folder)
    played = _scalars(events, "curriculum/stage")

    def minute(event: ScalarEvent) -> float:
        return round((event.wall_time - state["started"]) / 60, 3)

    return {
        **state,
        "stages": [stage.name for stage in stages],
        "success": [(minute(e), e.value) for e in _scalars(events, f"val/{stages[0].name}/success")],
        "stage": [(minute(e), int(e.value)) for e in played],
        "promotions": [
            {"from": stages[int(before.value)].name, "iterations": before.step, "minute": minute(before)}
            for before, after in pairwise(played)
            if after.value > before.value
        ],
        "passed": "the last stage, is passed" in (folder / LOG_FILE).read_text(encoding="utf-8"),
        "iterations": played[-1].step if played else 0,
        "results": read_results(folder),
    }


def stages_of(folder: Path) -> tuple[Stage, ...]:
    """The curriculum that a run was given."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    for callback in config["trainer"]["callbacks"]:
        if callback["class_path"].rsplit(".", 1)[-1] == "Curriculum":
            return load_stages(callback["init_args"]["curriculum"])
    raise ValueError(f"{folder / 'config.yaml'} lists no Curriculum: there are no stages to show")


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The final evaluation of a run; empty where there was none yet."""
    path = folder / "results.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []


def _scalars(events: EventAccumulator, tag: str) -> list[ScalarEvent]:
    return events.Scalars(tag) if tag in events.Tags()["scalars"] else []


def mean_curve(curves: Sequence[Curve], grid: np.ndarray, *, steps: bool = False) -> np.ndarray:
    """The mean over runs at the minutes of `grid`; a run that ended early keeps its last value.

    Args:
        curves: Points (minute, value) of each run, in order of time.
        grid: Minutes, [G].
        steps: Values stay until the next point instead of going there in a straight line.
    """
    rows = []
    for curve in curves:
        minutes, values = np.array(curve, dtype=float).T
        after = np.clip(np.searchsorted(minutes, grid, side="right") - 1, 0, None)
        rows.append(values[after] if steps else np.interp(grid, minutes, values))
    return np.mean(rows, axis=0)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: success on unseen first-stage households; right: the stage; a thin line a seed, a thick one the mean."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'gigpo_lightning[plots]'") from error
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    longest = max(minute for run in runs for minute, _ in [*run["success"], *run["stage"]])
    grid = np.linspace(0, longest, 400)
    for variant in dict.fromkeys(run["variant"] for run in runs):
        own = [run for run in runs if run["variant"] == variant and run["success"] and run["stage"]]
        if not own:
            continue
        _, label, colour, style = VARIANTS[variant]
        look = {"color": colour, "linestyle": style}
        label = f"{label} ({len(own)} seed{'s' * (len(own) > 1)})"
        for run in own:
            left.plot(*zip(*run["success"], strict=True), linewidth=0.8, alpha=0.45, **look)
            right.step(*zip(*run["stage"], strict=True), where="post", linewidth=0.8, alpha=0.45, **look)
        begin = max(run["success"][0][0] for run in own)
        shown = grid[grid >= begin]
        left.plot(shown, mean_curve([run["success"] for run in own], shown), linewidth=2.4, label=label, **look)
        right.plot(grid, mean_curve([run["stage"] for run in own], grid, steps=True), linewidth=2.4, **look)
    names = max((run["stages"] for run in runs), key=len)
    left.set(ylim=(0, 1.02), ylabel="success rate", title=f"Unseen households of the first stage ({names[0]})")
    right.set(ylim=(-0.15, len(names) - 0.85), title="Stage of the curriculum")
    right.set_yticks(range(len(names)), [f"{number + 1} {name}" for number, name in enumerate(names)])
    for axes in (left, right):
        axes.set(xlim=(0, longest), xlabel="wall time in minutes")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: when each run reached what."""
    lines = [
        "| run | first success | last success | first ≥ 0.85 (min) | promotions at (min) | iterations |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        values = [value for _, value in run["success"]]
        reached = next((f"{minute:.1f}" for minute, value in run["success"] if value >= 0.85), "–")
        moves = ", ".join(f"{move['minute']:.1f}" for move in run["promotions"]) or "–"
        ends = [f"{values[0]:.2f}", f"{values[-1]:.2f}"] if values else ["–", "–"]
        cells = [f"{run['variant']} {run['seed']}", *ends, reached, moves, str(run["iterations"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def final_table(runs: Sequence[dict[str, Any]], stages: Sequence[Stage]) -> str:
    """A Markdown table: final success on unseen tasks of each stage, mean (least–most) over seeds, sampled."""
    variants = list(dict.fromkeys(run["variant"] for run in runs))
    lines = [f"| stage | {' | '.join(VARIANTS[name].label for name in variants)} | explorer |"]
    lines.append("|---" * (len(variants) + 2) + "|")
    for stage in stages:
        cells = [stage.name]
        for variant in variants:
            rows = [row for run in runs if run["variant"] == variant for row in run["results"]]
            found = [row["success"] for row in rows if _is_final(row, stage.name)]
            cells.append(f"{np.mean(found):.2f} ({min(found):.2f}–{max(found):.2f})" if found else "–")
        lines.append(f"| {' | '.join(cells)} | {explorer_success(stage):.2f} |")
    return "\n".join(lines)


def _is_final(row: dict[str, Any], stage: str) -> bool:
    return (row["stage"], row["split"], row["mode"]) == (stage, "unseen", "sampled")


def explorer_success(stage: Stage, count: int = 100) -> float:
    """Share of the first unseen tasks that the text-only explorer solves within the stage's turn limit."""
    tasks = GeneratedTasks(difficulty=stage.difficulty)
    lengths = [tasks.get("unseen", index).difficulty["steps"] for index in range(count)]
    return sum(0 < length <= stage.max_turns for length in lengths) / count
