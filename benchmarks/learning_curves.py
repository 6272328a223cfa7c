"""The learning curves of the README: whole `fit` runs of several seeds and variants, as JSON and as a picture.

    python benchmarks/learning_curves.py OUT [--variants gigpo grpo step warm] [--seeds 0 1 2] [--minutes M]
        [--jobs 1] [--threads N] [--draw_only] [-- further options of fit]

Every run is the command `python -m gigpo_lightning fit --config alfworld.yaml` in a process of its own, in
`OUT/<variant>-<seed>`. A finished run is not repeated: call again to go on after an interruption. Minutes are wall time
since the process was started, loading included, and validations are part of them. Jobs that run side by side share the
machine: the JSON says how many there were. The picture needs the extra `plots`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

from gigpo_lightning.curriculum import Stage, load_stages

# What each variant adds to the configuration.
VARIANTS: dict[str, list[str]] = {
    "gigpo": [],
    "grpo": ["--data.credit.estimator=grpo"],
    "step": ["--data.credit.estimator=step"],
    "warm": ["--trainer.callbacks+=WarmStart"],
}
LABELS = {
    "gigpo": "GiGPO",
    "grpo": "λ = 1: episode advantage only (GRPO)",
    "step": "λ = 0: step advantage only",
    "warm": "GiGPO after imitation of the expert",
}
# Okabe and Ito's colours, told apart by colour-blind readers; line styles for print in grey.
COLOURS = {"gigpo": "#0072B2", "grpo": "#D55E00", "step": "#009E73", "warm": "#CC79A7"}
STYLES = {"gigpo": "-", "grpo": "--", "step": ":", "warm": "-."}
RUN_FILE = "learning_curves_run.json"  # in a run's folder: when it was started, with what, and how it ended
LOG_FILE = "fit.log"
Curve = list[tuple[float, float]]


def fit_command(variant: str, seed: int, folder: Path, minutes: float | None, extra: Sequence[str]) -> list[str]:
    """The command line of one run; without `minutes` the configuration's own limit holds."""
    limit_s = None if minutes is None else round(60 * minutes)
    limit = [] if limit_s is None else [f"00:{limit_s // 3600:02}:{limit_s // 60 % 60:02}:{limit_s % 60:02}"]
    return [
        *(sys.executable, "-m", "gigpo_lightning", "fit", "--config", "alfworld.yaml"),
        *(f"--seed_everything={seed}", f"--data.seed={seed}", f"--model.policy.init_args.init_seed={seed}"),
        *(f"--trainer.max_time={duration}" for duration in limit),
        f"--trainer.default_root_dir={folder}",
        *VARIANTS[variant],
        *extra,
    ]


def run_once(variant: str, seed: int, options: argparse.Namespace) -> None:
    """Train one seed of a variant unless that is done; its output goes to `fit.log` in its folder."""
    folder: Path = options.out / f"{variant}-{seed}"
    state = read_state(folder)
    if state.get("exit_code") == 0:
        print(f"{folder.name}: finished before")
        return
    if state:  # a part of a run has no curve over wall time: begin again
        shutil.rmtree(folder)
    command = fit_command(variant, seed, folder, options.minutes, options.extra)
    folder.mkdir(parents=True)
    state = {"variant": variant, "seed": seed, "command": shlex.join(command[1:]), "started": time.time()}
    state |= machine(options)
    write_json(folder / RUN_FILE, state)
    print(f"{folder.name}: started")
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    with (folder / LOG_FILE).open("w", encoding="utf-8") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    write_json(folder / RUN_FILE, {**state, "exit_code": done.returncode, "seconds": time.time() - state["started"]})
    print(f"{folder.name}: " + ("finished" if done.returncode == 0 else f"FAILED, see {folder / LOG_FILE}"))


def read_state(folder: Path) -> dict[str, Any]:
    """What is known of a run; empty where it was not started."""
    path = folder / RUN_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Where and with what versions this runs."""
    repository = Path(__file__).parent
    return {
        "commit": _git(repository, "rev-parse", "--short=12", "HEAD").strip() or "unknown",
        "changed_files": _git(repository, "status", "--porcelain", "--untracked-files=no").splitlines(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "jobs": options.jobs,
        "threads": options.threads,
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
    }


def _git(folder: Path, *args: str) -> str:
    """What git says; empty outside of a checkout."""
    return subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=False).stdout


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


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
        look = {"color": COLOURS[variant], "linestyle": STYLES[variant]}
        label = f"{LABELS[variant]} ({len(own)} seed{'s' * (len(own) > 1)})"
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


def write_json(path: Path, content: Any) -> None:
    """Write a file that is either whole or not there."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; what comes after `--` is handed to fit."""
    own = list(argv[: argv.index("--")] if "--" in argv else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs, and of learning_curves.json and .png")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["gigpo", "grpo", "step"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, help="limit of each training; default: that of the configuration")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each run")
    parser.add_argument("--draw_only", action="store_true", help="start nothing, show what there is so far")
    options = parser.parse_args(own)
    options.extra = list(argv[len(own) + 1 :])
    return options


def main(argv: Sequence[str]) -> int:
    """Run what is missing, then write the JSON and the picture; returns 1 where a run failed."""
    options = parse(argv)
    wanted = [(variant, seed) for seed in options.seeds for variant in options.variants]
    if not options.draw_only:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda pair: run_once(*pair, options), wanted))
    folders = [options.out / f"{variant}-{seed}" for variant in options.variants for seed in options.seeds]
    runs = [read_run(folder) for folder in folders if (folder / "config.yaml").exists()]
    runs = [run for run in runs if run["stage"]]
    if not runs:
        print(f"{options.out} holds no run with a finished iteration yet; see fit.log in its folders")
        return 1
    write_json(options.out / "learning_curves.json", {"runs": runs})
    draw(runs, options.out / "learning_curves.png")
    print(summary(runs))
    return int(any(read_state(folder).get("exit_code", 0) != 0 for folder in folders))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
