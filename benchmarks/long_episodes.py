"""What a header remembers against what it costs: segment_turns × keyframes on tasks of up to 30 turns.

    python -m benchmarks.long_episodes OUT [--turns 1 5 10 none] [--memory last-3 changes-6 anchors-6] [--seeds 0]
        [--env_steps 30000] [--warm_episodes 400] [--output docs/long_episodes.json] [--draw_only]

Every cell is a run in a process of its own, on one thread: the same initial weights, the same demonstrations to imitate
(cut by the cell's own rule), then reinforcement for the same number of environment steps, then 100 unseen tasks. A cell
that is finished is not repeated: call again to go on after an interruption. A conversation that fits into one segment
has no second header: `none` is played with last-3 only. Memory is `RssAnon`, see `episode_memory`; processor time does
not count what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from benchmarks.episode_memory import Watch
from gigpo_lightning.callbacks.step_budget import StepBudget
from gigpo_lightning.callbacks.warm_start import WarmStart
from gigpo_lightning.datamodule import RolloutDataModule
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.files import write_json
from gigpo_lightning.machine import machine
from gigpo_lightning.module import GiGPOModule
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.evaluation import EvaluationRule

# All six types of task in small rooms; an explorer needs up to 20 turns.
DIFFICULTY, MAX_TURNS = {"receptacles": [3, 5]}, 30
GROUPS, MEMBERS, MAX_TOKENS = 8, 8, 1536
MEMORY: dict[str, dict[str, Any]] = {
    "last-3": {"keep_last": 3},
    "changes-6": {"keep_last": 3, "keyframes": "changes", "keep_keyframes": 6},
    "anchors-6": {"keep_last": 3, "keyframes": "anchors", "keep_keyframes": 6},
}
WHOLE = "none"  # turns: null
COLUMNS = {
    "success": "success",
    "unseen": "unseen",
    "tokens_per_episode": "tokens per episode",
    "context_limit": "context limit",
    "peak_mib": "peak memory",
    "seconds_per_iteration": "processor s per iteration",
    "iterations": "iterations",
}


class Iterations(pl.Callback):
    """Keeps the figures of a run's iterations, and their seconds of processor time."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self._begin = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin = self._begin or time.process_time()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        figures = trainer.datamodule.report.metrics  # type: ignore[attr-defined]
        now = time.process_time()
        self.seen.append({**figures, "seconds": now - self._begin})
        self._begin = now


def data_of(segments: SegmentRule, seed: int) -> RolloutDataModule:
    """The rollouts of a cell; only the segments tell cells apart."""
    return RolloutDataModule(
        GeneratedTasks(seed=seed, difficulty=DIFFICULTY),
        groups=GROUPS,
        members=MEMBERS,
        passes=1,
        minibatches=4,
        max_turns=MAX_TURNS,
        max_tokens_per_batch=4096,
        lam=0.3,
        entropy_coef=0.01,
        credit=CreditRule(gamma=0.9),
        segments=segments,
        evaluation=EvaluationRule(splits=("unseen",), tasks=100, seeds=1, temperature=0.4, greedy=False),
        rows=64,
        seed=seed,
    )


def measure(turns: int | None, memory: str, seed: int, env_steps: int, warm_episodes: int) -> dict[str, Any]:
    """One cell, in this process."""
    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    segments = SegmentRule(turns=turns, max_tokens=MAX_TOKENS, **MEMORY[memory])
    data = data_of(segments, seed)
    policy = ScratchPolicy(64, layers=2, heads=2, kv_heads=2, init_seed=seed)
    module = GiGPOModule(policy, lambda weights: torch.optim.AdamW(weights, lr=1.5e-3, weight_decay=0.0), kl_coef=0.0)
    watch, iterations = Watch(), Iterations()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            default_root_dir=folder,
            max_epochs=-1,
            limit_val_batches=0,
            callbacks=[WarmStart(warm_episodes), watch, StepBudget(env_steps), iterations],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule=data)
        trainer.test(module, datamodule=data, verbose=False)
    last = iterations.seen[-max(1, len(iterations.seen) // 4) :]

    def mean(name: str) -> float:
        return float(np.mean([seen[name] for seen in iterations.seen]))

    peaks = watch.peaks
    return {
        "segments": asdict(segments),
        "success": float(np.mean([seen["rollout/success"] for seen in last])),
        "first_success": iterations.seen[0]["rollout/success"],
        "unseen": module.results[0]["success"],
        "tokens_per_episode": mean("rollout/tokens_per_episode"),
        "context_limit": mean("rollout/end_context_limit"),
        "peak_mib": max(peaks[p]["RssAnon"] for p in ("collection", "update")) - peaks["start"]["RssAnon"],
        "seconds_per_iteration": mean("seconds"),
        "iterations": len(iterations.seen),
        "curve": [seen["rollout/success"] for seen in iterations.seen],
    }


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Cells as Markdown, seeds averaged."""
    lines = [f"| turns | memory | {' | '.join(COLUMNS.values())} |", f"|{'---|' * (2 + len(COLUMNS))}"]
    for key in dict.fromkeys((cell["turns"], cell["memory"]) for cell in cells):
        own = [cell for cell in cells if (cell["turns"], cell["memory"]) == key]
        means = {name: float(np.mean([cell[name] for cell in own])) for name in COLUMNS}
        shown = [
            f"{means['success']:.2f}",
            f"{means['unseen']:.2f}",
            f"{means['tokens_per_episode']:,.0f}",
            f"{means['context_limit']:.2f}",
            f"{means['peak_mib']:.0f} MiB",
            f"{means['seconds_per_iteration']:.1f}",
            f"{means['iterations']:.0f}",
        ]
        lines.append(f"| {' | '.join([*key, *shown])} |")
    return "\n".join(lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the cells")
    parser.add_argument("--turns", nargs="+", default=["1", "5", "10", WHOLE], help="turns per segment; none for all")
    parser.add_argument("--memory", nargs="+", choices=list(MEMORY), default=list(MEMORY))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--env_steps", type=int, default=30_000, help="environment steps of each cell")
    parser.add_argument("--warm_episodes", type=int, default=400, help="demonstrations that are imitated before")
    parser.add_argument("--output", type=Path, help="JSON file to write beside those of the cells")
    parser.add_argument("--draw_only", action="store_true", help="start nothing, show what there is so far")
    parser.add_argument("--here", action="store_true", help="play the one cell that is named, in this process")
    return parser.parse_args(argv)


def cells_of(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """The cells that are asked for: turns, memory, seed."""
    pairs = [(turns, memory) for turns in options.turns for memory in options.memory]
    return [(*pair, seed) for seed in options.seeds for pair in pairs if pair[0] != WHOLE or pair[1] == "last-3"]


def run_cell(turns: str, memory: str, seed: int, options: argparse.Namespace) -> None:
    """Play a cell in a process of its own unless it is finished.

    Raises:
        ValueError: A finished cell was made with other options.
    """
    path = options.out / f"{turns}-{memory}-{seed}.json"
    asked = {"env_steps": options.env_steps, "warm_episodes": options.warm_episodes}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        different = [name for name, value in asked.items() if found[name] != value]
        if different:
            raise ValueError(f"{path} was made with another {different[0]}: take another folder, or remove it")
        print(f"{path.stem}: finished before", flush=True)
        return
    command = [sys.executable, "-m", "benchmarks.long_episodes", str(options.out), "--here", f"--turns={turns}"]
    command += [f"--memory={memory}", f"--seeds={seed}", *(f"--{name}={value}" for name, value in asked.items())]
    begin = time.perf_counter()
    with path.with_suffix(".log").open("w", encoding="utf-8") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    print(f"{path.stem}: {time.perf_counter() - begin:.0f} s", flush=True)


def main(argv: Sequence[str]) -> None:
    """Play what is missing, then print the table."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = cells_of(options)
    if options.here:
        ((turns, memory, seed),) = wanted
        number = None if turns == WHOLE else int(turns)
        found = measure(number, memory, seed, options.env_steps, options.warm_episodes)
        asked = {"env_steps": options.env_steps, "warm_episodes": options.warm_episodes}
        cell = {"turns": turns, "memory": memory, "seed": seed, **asked, **found, "machine": machine("lightning")}
        write_json(options.out / f"{turns}-{memory}-{seed}.json", cell)
        return
    for one in wanted if not options.draw_only else []:
        run_cell(*one, options)
    paths = [options.out / f"{turns}-{memory}-{seed}.json" for turns, memory, seed in wanted]
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    print(f"\n{table(cells)}")
    if options.output:
        write_json(options.output, {"difficulty": DIFFICULTY, "max_turns": MAX_TURNS, "cells": cells})


if __name__ == "__main__":
    main(sys.argv[1:])
