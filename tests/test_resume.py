"""kill -9 at any moment, then `fit --ckpt_path last`: bit for bit the iterations of the uninterrupted run.

Real processes on the box world, with every callback that has a state.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import kill_world

CONFIG = """
seed_everything: 0
trainer:
  accelerator: cpu
  max_epochs: 6
  check_val_every_n_epoch: 2
  num_sanity_val_steps: 1
  enable_model_summary: false
  callbacks:
    - class_path: Curriculum
      init_args: {curriculum: steps.yaml, stop_when_passed: false}
    - class_path: LambdaDecay
      init_args: {schedule: linear, start: 1.0, end: 0.0, span: 8}
    - class_path: Exploration
      init_args:
        temperature: {schedule: linear, start: 1.5, end: 1.0, span: 5}
        entropy_coef: 0.01
        temperature_boost: 0.5
        entropy_boost: 1.0
        boost_iterations: 2
    - class_path: AnchorLibrary
    - class_path: WarmStart
      init_args: {episodes: 8, epochs: 1, batch_episodes: 4}
    - class_path: TensorBoardViews
    - class_path: IterationProgress
    - class_path: lightning.pytorch.callbacks.Timer
      init_args: {duration: {minutes: 30}, interval: epoch}
    - class_path: IterationCheckpoint
      init_args: {keep_last: 9}
    - class_path: tests.kill_world.KillAt
data:
  tasks: {class_path: tests.toy_world.BoxTasks}
  groups: 4
  members: 4
  minibatches: 2
  keep_rollouts: 9
  credit:
    detector:
      class_path: HybridDetector
      init_args:
        automatic: {class_path: WindowDetector, init_args: {window: 3, min_count: 3, target_density: [0.1, 0.15]}}
        exclude: [{observation: '^nothing'}]
  evaluation: {tasks: 3, seeds: 1, during_fit_tasks: 3}
model:
  policy:
    class_path: ScratchPolicy
    init_args: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, initializer_range: 0.2}
  optimizer:
    class_path: torch.optim.AdamW
    init_args: {lr: 1.0e-2}
  lr_scheduler:
    class_path: torch.optim.lr_scheduler.ExponentialLR
    init_args: {gamma: 0.9}
  kl_coef: 0.05
"""
# Promotions soon, so that they come before and after the kill; rehearsal, so that earlier stages are drawn, too.
CURRICULUM = """
stages:
  - {name: two, difficulty: {boxes: 2}, max_turns: 4, promote: 0.01, window: 1, min_iterations: 2}
  - {name: three, difficulty: {boxes: 3}, max_turns: 4, promote: 0.01, window: 2, min_iterations: 2, rehearsal: 0.5}
  - {name: four, difficulty: {boxes: 4}, max_turns: 5, rehearsal: 0.5}
"""
ROOT = Path(__file__).parents[1]
RUN = Path("runs/boxes/version_0")


def play(folder: Path, moment: str = "", *args: str) -> int:
    """One run in a process of its own; returns its exit code."""
    folder.mkdir(exist_ok=True)
    (folder / "boxes.yaml").write_text(CONFIG)
    (folder / "steps.yaml").write_text(CURRICULUM)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kill_world"])  # loads torch once for all runs
    options = ["fit", "--config=boxes.yaml", *args]
    process = context.Process(target=kill_world.run, args=(str(folder), moment, options))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert play(folder) == 0, (folder / "said").read_text()
    return folder


def test_the_run_visits_what_has_a_state(whole: Path) -> None:
    """Else the comparisons below would compare little."""
    said = (whole / "said").read_text()
    assert "WarmStart: 1 epochs" in said
    assert "two → three" in said
    assert "three → four" in said
    results = json.loads((whole / RUN / "results.json").read_text())["results"]
    assert {row["stage"] for row in results} == {"two", "three", "four"}


@pytest.mark.parametrize(
    "moment",
    ["rollout 1", "rollout 3", "store 4", "update 3", "update 5", "checkpoint 1", "checkpoint 4", "link 2"],
)
def test_killed_and_resumed_equals_uninterrupted(whole: Path, tmp_path: Path, moment: str) -> None:
    assert play(tmp_path, moment) == -signal.SIGKILL, (tmp_path / "said").read_text()
    assert play(tmp_path, "", "--ckpt_path=last") == 0, (tmp_path / "said").read_text()
    assert_same_run(whole / RUN, tmp_path / RUN)


def test_killed_twice(whole: Path, tmp_path: Path) -> None:
    assert play(tmp_path, "update 2") == -signal.SIGKILL
    assert play(tmp_path, "checkpoint 4", "--ckpt_path=last") == -signal.SIGKILL
    assert play(tmp_path, "", "--ckpt_path=last") == 0, (tmp_path / "said").read_text()
    assert_same_run(whole / RUN, tmp_path / RUN)


def test_alfworld_killed_and_resumed_from_the_command_line(tmp_path: Path) -> None:
    """Three processes with three orders of Python's sets: nothing may depend on them."""

    def command(folder: str, hash_seed: int, moment: str, *args: str) -> int:
        (tmp_path / folder).mkdir(exist_ok=True)
        environment = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(hash_seed), kill_world.MOMENT: moment}
        small = ["--trainer.max_epochs=2", "--trainer.num_sanity_val_steps=0", "--data.groups=3", "--data.members=4"]
        evaluation = [f"--data.evaluation.{option}" for option in ("tasks=1", "seeds=1", "greedy=false")]
        callback = "--trainer.callbacks+=tests.kill_world.KillAt"
        line = [sys.executable, "-m", "gigpo_lightning", "fit", "--config=alfworld.yaml", callback]
        return subprocess.run(
            [*line, *small, *evaluation, *args],
            cwd=tmp_path / folder,
            env=os.environ | environment,
            stdout=(tmp_path / folder / "said").open("a"),
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode

    assert command("whole", 1, "never 0") == 0, (tmp_path / "whole/said").read_text()
    assert command("cut", 2, "update 2") == -signal.SIGKILL, (tmp_path / "cut/said").read_text()
    assert command("cut", 3, "never 0", "--ckpt_path=last") == 0, (tmp_path / "cut/said").read_text()
    assert_same_run(*(tmp_path / folder / "runs/alfworld/version_0" for folder in ("whole", "cut")), iterations=2)


def assert_same_run(one: Path, two: Path, iterations: int = 6) -> None:
    """The same checkpoints to the bit, rollouts to the byte, and results."""
    names = [f"iteration={number:06d}.ckpt" for number in range(1, iterations + 1)]
    for name in names:
        content = [torch.load(run / "checkpoints" / name, weights_only=True) for run in (one, two)]
        for checkpoint in content:
            checkpoint["callbacks"].pop("Timer", None)  # time goes its own way
            # Lightning's count of the batches of the latest validation: it starts anew, and nothing reads it.
            del checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
        assert_equal(*content, name)
    rollouts = [sorted((run / "rollouts").iterdir()) for run in (one, two)]
    assert [path.name for path in rollouts[0]] == [path.name for path in rollouts[1]]
    assert len(rollouts[0]) == iterations
    for left, right in zip(*rollouts, strict=True):
        assert left.read_bytes() == right.read_bytes(), left.name
    assert (one / "anchors.arrow").read_bytes() == (two / "anchors.arrow").read_bytes()
    results = [json.loads((run / "results.json").read_text())["results"] for run in (one, two)]
    assert results[0] == results[1]


def assert_equal(one: Any, two: Any, where: str) -> None:
    """Equal in every nested value, tensors to the bit."""
    assert type(one) is type(two), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype, where
        assert one.equal(two), where
    elif isinstance(one, dict):
        assert list(one) == list(two), where
        for key in one:
            assert_equal(one[key], two[key], f"{where} / {key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two), where
        for number, pair in enumerate(zip(one, two, strict=True)):
            assert_equal(*pair, f"{where} / {number}")
    else:
        assert one == two, where
