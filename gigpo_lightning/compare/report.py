"""What the finished runs say together: `compare.json` with everything, and Markdown tables for the eye.

Pure but for the writing: runs come in as the values of their `run.json`.
"""

from __future__ import annotations

import math
import statistics as stdlib
from collections.abc import Mapping, Sequence
from typing import Any

from gigpo_lightning.compare.statistics import Point, crossing, difference, mean_rate, summarise

Runs = Sequence[Mapping[str, Any]]


def stages_of(runs: Runs) -> list[str]:
    """The evaluated stages, in their order."""
    return list(dict.fromkeys(row["stage"] for run in runs for row in run["final"]))


def curve(run: Mapping[str, Any], stage: str) -> list[Point]:
    """Success in a stage against environment steps."""
    return [(point["env_steps"], point["success"][stage]) for point in run["points"] if stage in point["success"]]


def final(run: Mapping[str, Any], stage: str, mode: str = "sampled") -> float | None:
    """Success in a stage at the end of a run; None where it was not played so."""
    found = [row["success"] for row in run["final"] if (row["stage"], row["mode"]) == (stage, mode)]
    return found[0] if found else None


def stage_summary(runs: Runs, variants: Sequence[str], stage: str, threshold: float) -> list[dict[str, Any]]:
    """The figures of each variant in one stage, the first one being what the others are compared to."""
    by_seed: dict[str, dict[int, float]] = {}
    for variant in variants:
        own = [(run["seed"], final(run, stage)) for run in runs if run["variant"] == variant]
        by_seed[variant] = {seed: value for seed, value in own if value is not None}
    rows = []
    for variant in [name for name in variants if by_seed[name]]:
        curves = [curve(run, stage) for run in runs if run["variant"] == variant]
        curves = [points for points in curves if points]
        crossings = [crossing(points, threshold) for points in curves]
        first = by_seed[variants[0]]
        apart = difference(by_seed[variant], first) if variant != variants[0] else None
        rows.append(
            {
                "variant": variant,
                **summarise(list(by_seed[variant].values()))._asdict(),
                "curve_mean": stdlib.fmean(map(mean_rate, curves)) if curves else None,
                "threshold": threshold,
                "crossed": sum(map(math.isfinite, crossings)),
                "crossing_env_steps": _finite(stdlib.median(crossings)) if crossings else None,
                "difference": apart._asdict() if apart else None,
            }
        )
    return rows


def cost_summary(runs: Runs, variants: Sequence[str]) -> list[dict[str, Any]]:
    """What the runs of each variant cost, means over seeds (the memory is the most of all)."""
    rows = []
    for variant in variants:
        own = [run for run in runs if run["variant"] == variant]
        if own:
            rows.append(
                {
                    "variant": variant,
                    "runs": len(own),
                    "env_steps": stdlib.fmean(run["env_steps"] for run in own),
                    "iterations": stdlib.fmean(run["iteration"] for run in own),
                    "train_s": stdlib.fmean(run["seconds"] for run in own),
                    "wall_s": stdlib.fmean(run["wall_s"] for run in own),
                    "cpu_s": stdlib.fmean(run["cpu_s"] for run in own),
                    "peak_bytes": max(run["peak_bytes"] for run in own),
                    "stages": [run["stage"] for run in own],
                }
            )
    return rows


def summary(runs: Runs, labels: Mapping[str, str], threshold: float) -> dict[str, Any]:
    """The part of `compare.json` that follows from the runs; `labels` are those of the variants, in order."""
    variants = list(labels)
    return {
        "labels": dict(labels),
        "stages": {stage: stage_summary(runs, variants, stage, threshold) for stage in stages_of(runs)},
        "cost": cost_summary(runs, variants),
        "runs": [dict(run) for run in runs],
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The tables of a report."""
    parts = [_head(report)]
    for stage, rows in report["stages"].items():
        parts.append(f"### Success on unseen tasks: {stage}\n\n{_stage_table(rows)}")
    parts.append(f"### Cost of a run\n\n{_cost_table(report['cost'])}")
    return "\n\n".join(parts) + "\n"


def _head(report: Mapping[str, Any]) -> str:
    machine, seeds = report["machine"], sorted({run["seed"] for run in report["runs"]})
    changed = " with local changes" if machine["changed_files"] else ""
    lines = [
        f"- command: `{report['command']}`",
        f"- commit {machine['commit']}{changed}, {machine['cpu']} ({machine['cores']} cores), "
        f"Python {machine['python']}, torch {machine['torch']}",
        f"- budget of a run: {report['budget']}; seeds {', '.join(map(str, seeds))}; "
        f"{report['jobs']} at a time, {report['threads']} thread{'s' * (report['threads'] > 1)} each",
    ]
    if report["missing"]:
        lines.append(f"- **not finished**: {', '.join(report['missing'])}")
    return "\n".join(lines)


def _stage_table(rows: Sequence[Mapping[str, Any]]) -> str:
    threshold = rows[0]["threshold"] if rows else 0
    first = rows[0]["variant"] if rows else ""
    head = [
        *("variant", "seeds", "mean", "95 % interval", "interquartile mean", "95 % interval", "variance", "curve mean"),
        f"steps to {threshold:g}",
        f"− {first}",
        "P(better)",
    ]
    lines = []
    for row in rows:
        apart = row["difference"]
        lines.append(
            [
                *(row["variant"], str(row["n"]), f"{row['mean']:.3f}", _interval(row["mean_ci"])),
                *(f"{row['iqm']:.3f}", _interval(row["iqm_ci"])),
                "–" if row["variance"] is None else f"{row['variance']:.4f}",
                "–" if row["curve_mean"] is None else f"{row['curve_mean']:.3f}",
                f"{_steps(row['crossing_env_steps'])} ({row['crossed']}/{row['n']})",
                # with a minus as wide as the plus
                "" if apart is None else f"{apart['mean']:+.3f} ({_interval(apart['ci'], '+')})".replace("-", "−"),
                "" if apart is None else f"{apart['better']:.2f}",
            ]
        )
    return _table(head, lines)


def _cost_table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = [
        *("variant", "runs", "environment steps", "iterations", "training (min)", "wall time (min)"),
        *("processor time (min)", "peak memory (MiB)", "last stage (seeds)"),
    ]
    lines = []
    for row in rows:
        counts = {stage: row["stages"].count(stage) for stage in dict.fromkeys(row["stages"])}
        lines.append(
            [
                *(row["variant"], str(row["runs"]), _steps(row["env_steps"]), f"{row['iterations']:.0f}"),
                *(f"{row[key] / 60:.1f}" for key in ("train_s", "wall_s", "cpu_s")),
                f"{row['peak_bytes'] / 2**20:.0f}",
                ", ".join(f"{stage or 'all'} ({count})" for stage, count in counts.items()),
            ]
        )
    return _table(head, lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _interval(ends: Sequence[float] | None, sign: str = "") -> str:
    return "–" if ends is None else f"{ends[0]:{sign}.3f} … {ends[1]:{sign}.3f}"


def _steps(count: float | None) -> str:
    if count is None:
        return "–"
    return f"{count / 1000:.0f}k" if count >= 9500 else f"{count / 1000:.1f}k" if count >= 1000 else f"{count:.0f}"


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
