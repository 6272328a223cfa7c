"""What detectors cost: similarity beside the public implementation's difflib, and all of them in a fit.

`python -m benchmarks.detectors` times both methods of `similarity` on 4,000 observations of 300 characters, on one
thread, in seconds of processor time (a busy machine does not count); the reference is timed on `--reference_groups` of
the 16 groups, which is a second each. `--fit` also plays a few iterations of `alfworld.yaml` per detector, each fit in
a process of its own, and prints the part of an iteration that credit takes, detector included, and two figures of
anchors.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gigpo_lightning.functional.anchors import group_similar

GROUPS, TURNS_PER_GROUP, CHARACTERS = 16, 250, 300
FIGURES = ("time/credit_s", "time/rollout_s", "time/update_s", "anchors/density", "anchors/coverage")
DETECTORS = ("exact", "window", "similarity", "embedding")
THINGS = (
    *("apple", "book", "candle", "cup", "fork", "knife", "mug", "pan", "pen"),
    *("plate", "pot", "soap", "spoon", "vase"),
)
PLACES = ("cabinet", "countertop", "desk", "drawer", "dresser", "fridge", "shelf", "sidetable", "sink", "stove")


def make_observations(seed: int = 0) -> tuple[list[str], list[int]]:
    """Texts of 300 characters in 16 task groups, and their groups: what is seen at places, most of them seen again."""
    rng = random.Random(seed)
    texts, groups = [], []
    for group in range(GROUPS):
        seen = [_observation(rng) for _ in range(TURNS_PER_GROUP // 3)]
        texts += [rng.choice(seen) for _ in range(TURNS_PER_GROUP)]
        groups += [group] * TURNS_PER_GROUP
    return texts, groups


def _observation(rng: random.Random) -> str:
    text = f"You arrive at {rng.choice(PLACES)} {rng.randint(1, 9)}. On it, you see"
    while len(text) < CHARACTERS:
        text += f" a {rng.choice(THINGS)} {rng.randint(1, 9)},"
    return text[: CHARACTERS - 1] + "."


def processor_s(texts: list[str], groups: list[int], threshold: float, method: str) -> float:
    begin = time.process_time()
    group_similar(texts, groups, threshold, method=method)
    return time.process_time() - begin


def similarity_table(threshold: float, reference_groups: int, repeats: int) -> str:
    texts, groups = make_observations()
    part = reference_groups * TURNS_PER_GROUP
    reference_s = processor_s(texts[:part], groups[:part], threshold, "reference")
    same_s = min(processor_s(texts[:part], groups[:part], threshold, "leader") for _ in range(repeats))
    whole_s = min(processor_s(texts, groups, threshold, "leader") for _ in range(repeats))
    return (
        f"{len(texts)} observations of {CHARACTERS} characters in {GROUPS} groups, threshold {threshold}\n"
        f"  reference (difflib)  {reference_s:9.3f} s for {reference_groups} groups\n"
        f"  leader (rapidfuzz)   {same_s:9.3f} s for the same: {reference_s / same_s:.0f} times faster\n"
        f"  leader (rapidfuzz)   {whole_s:9.3f} s for all"
    )


def fit_row(detector: str, stage: str, iterations: int) -> str:
    """Of a short fit in one stage, without its first iteration: credit's share of the time, and figures of anchors."""
    curriculum = {"class_path": "Curriculum", "init_args": {"curriculum": "alfworld.yaml", "start": stage}}
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder) / "stage.yaml"
        overlay.write_text(yaml.safe_dump({"trainer": {"callbacks": [curriculum, {"class_path": "TensorBoardViews"}]}}))
        options = [
            f"--data.credit.detector={detector}",
            f"--trainer.max_epochs={iterations}",
            f"--trainer.default_root_dir={folder}/run",
            "--trainer.limit_val_batches=0",
            "--trainer.limit_test_batches=0",
        ]
        command = [sys.executable, "-m", "gigpo_lightning", "fit", "--config", "alfworld.yaml", f"--config={overlay}"]
        subprocess.run([*command, *options], check=True, capture_output=True)
        events = EventAccumulator(f"{folder}/run")
        events.Reload()
        read = {name: [event.value for event in events.Scalars(name)[1:]] for name in FIGURES}
    credit, whole = sum(read["time/credit_s"]), sum(read["time/rollout_s"]) + sum(read["time/update_s"])
    density, coverage = (sum(read[name]) / len(read[name]) for name in FIGURES[3:])
    return f"| {detector} | {credit / whole:.2%} | {density:.0%} | {coverage:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of detectors.")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument(
        "--reference_groups", type=int, default=1, help="groups that the reference is timed on, 1 to 16"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of leader, of which the best counts")
    parser.add_argument("--fit", action="store_true", help="also measure short fits")
    parser.add_argument("--stage", default="full-house", help="stage of the fits, of curricula/alfworld.yaml")
    parser.add_argument("--iterations", type=int, default=4, help="iterations of a fit; the first is not counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(similarity_table(options.threshold, options.reference_groups, options.repeats))
    if options.fit:
        print("| detector | credit ÷ iteration | density | coverage |\n|---|---|---|---|")
        for detector in DETECTORS:
            print(fit_row(detector, options.stage, options.iterations), flush=True)


if __name__ == "__main__":
    main()
