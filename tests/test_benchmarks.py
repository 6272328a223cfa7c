"""The benchmark scripts: what they compute from known runs and steps, and that the commands they start exist.

The numbers that they measure are not tested; `docs/` and `README.md` hold them with their commit.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from benchmarks import (
    anchor_levels,
    episode_memory,
    learning_curves,
    learning_views,
    long_episodes,
    trl_step,
    vocabulary_logprobs,
)
from gigpo_lightning import __main__, machine
from gigpo_lightning.curriculum import load_stages

STARTED = 1_000_000.0  # seconds since the epoch
STAGES = load_stages("alfworld.yaml")
FIRST, SECOND, THIRD = [stage.name for stage in STAGES][:3]


def write_run(folder: Path, variant: str, seed: int, scale: float = 1.0, exit_code: int | None = 0) -> None:
    """A run of four iterations, one every 30 s · `scale`, promoted after the 2nd; validations before and after."""
    config = {"trainer": {"callbacks": [{"class_path": "x.Curriculum", "init_args": {"curriculum": "alfworld.yaml"}}]}}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / learning_views.LOG_FILE).write_text("Curriculum: …\n")
    state: dict[str, Any] = {"variant": variant, "seed": seed, "started": STARTED}
    if exit_code is not None:
        state["exit_code"] = exit_code
    learning_curves.write_json(folder / learning_views.RUN_FILE, state)
    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar(f"val/{FIRST}/success", 0.125, 0, walltime=STARTED + 6)
        for iteration, stage in enumerate((0, 0, 1, 1), start=1):
            writer.add_scalar("curriculum/stage", stage, iteration, walltime=STARTED + 30 * scale * iteration)
        writer.add_scalar(f"val/{FIRST}/success", 0.875, 4, walltime=STARTED + 120 * scale)
        writer.add_scalar(f"val/{SECOND}/success", 0.5, 4, walltime=STARTED + 120 * scale)


# -- learning_curves ---------------------------------------------------------------------------------------------------


def test_a_run_is_read_in_minutes_since_its_process_was_started(tmp_path: Path) -> None:
    write_run(tmp_path / "gigpo-0", "gigpo", 0)
    run = learning_views.read_run(tmp_path / "gigpo-0")
    assert run["success"] == [(0.1, 0.125), (2.0, 0.875)]  # 6 s and 120 s
    assert run["stage"] == [(0.5, 0), (1.0, 0), (1.5, 1), (2.0, 1)]
    # The stage was left when its last iteration ended, not when the next one did.
    assert run["promotions"] == [{"from": FIRST, "iterations": 2, "minute": 1.0}]
    assert (run["iterations"], run["passed"], run["results"]) == (4, False, [])
    assert run["stages"][:3] == [FIRST, SECOND, THIRD]


def test_results_and_a_passed_last_stage_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "warm-1"
    write_run(folder, "warm", 1)
    (folder / learning_views.LOG_FILE).write_text(f"Curriculum: {THIRD}, the last stage, is passed: success 0.9\n")
    (folder / "results.json").write_text(json.dumps({"results": [{"stage": FIRST, "success": 0.5}]}))
    run = learning_views.read_run(folder)
    assert run["passed"] and run["results"] == [{"stage": FIRST, "success": 0.5}]


def test_the_final_table_gives_mean_and_range_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(success: float, **changed: str) -> dict[str, Any]:
        return {"stage": FIRST, "split": "unseen", "mode": "sampled", "success": success, **changed}

    other = [row(0.0, split="seen"), row(0.0, mode="greedy"), row(0.0, stage="other")]
    runs = [{"variant": "gigpo", "results": [row(value), *other]} for value in (0.5, 0.75)]
    runs.append({"variant": "step", "results": []})
    monkeypatch.setattr(learning_views, "explorer_success", lambda stage: 0.875)
    table = learning_views.final_table(runs, STAGES[:1])
    assert table.splitlines()[-1] == f"| {FIRST} | 0.62 (0.50–0.75) | – | 0.88 |"  # 0.625 and 0.875, half to even


def test_the_explorer_is_judged_by_the_turn_limit() -> None:
    solved = [learning_views.explorer_success(replace(STAGES[1], max_turns=turns), count=6) for turns in (1, 200)]
    assert solved == [0.0, 1.0]  # no task takes one step; the explorer solves every generated task at length


def test_the_mean_curve_joins_points_by_lines_or_steps_and_keeps_last_values() -> None:
    curves = [[(0.0, 0.0), (2.0, 1.0)], [(0.0, 1.0), (4.0, 0.0)]]
    grid = np.array([0.0, 1.0, 2.0, 4.0])
    # Lines: first curve 0, ½, 1, 1 (it ended at 2), second 1, ¾, ½, 0.
    assert learning_views.mean_curve(curves, grid).tolist() == [0.5, 0.625, 0.75, 0.5]
    # Steps: first curve 0, 0, 1, 1, second 1, 1, 1, 0.
    assert learning_views.mean_curve(curves, grid, steps=True).tolist() == [0.5, 0.5, 1.0, 0.5]


def test_json_table_and_picture_are_made_of_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("matplotlib.image")
    for variant, seed, scale in (("gigpo", 0, 1.0), ("gigpo", 1, 2.0), ("grpo", 0, 1.0)):
        write_run(tmp_path / f"{variant}-{seed}", variant, seed, scale)
    assert learning_curves.main([str(tmp_path), "--draw_only"]) == 0
    written = json.loads((tmp_path / "learning_curves.json").read_text())
    assert [(run["variant"], run["seed"]) for run in written["runs"]] == [("gigpo", 0), ("gigpo", 1), ("grpo", 0)]
    table = capsys.readouterr().out
    assert "| gigpo 1 | 0.12 | 0.88 | 4.0 | 2.0 | 4 |" in table
    picture = image.imread(tmp_path / "learning_curves.png")[..., :3]
    for variant, drawn in (("gigpo", True), ("grpo", True), ("step", False)):
        colour = [int(learning_views.VARIANTS[variant].colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert bool((abs(picture - colour) < 0.01).all(axis=-1).any()) == drawn, variant


def test_finished_runs_are_skipped_and_broken_ones_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "gigpo-0", "gigpo", 0)
    write_run(tmp_path / "gigpo-1", "gigpo", 1, exit_code=None)  # killed
    started: list[tuple[list[str], str]] = []

    def run(command: list[str], env: dict[str, str] | None = None, **_: Any) -> SimpleNamespace:
        if command[0] != "git":
            started.append((command, (env or {})["OMP_NUM_THREADS"]))
        return SimpleNamespace(returncode=int("seed_everything=2" in " ".join(command)), stdout="abc\n")

    monkeypatch.setattr(subprocess, "run", run)
    options = learning_curves.parse([str(tmp_path), "--threads", "3", "--", "--data.groups=2", "--x"])
    assert options.extra == ["--data.groups=2", "--x"]
    for seed in (0, 1, 2):
        learning_curves.run_once("gigpo", seed, options)
    assert [("--data.seed=1" in command, threads) for command, threads in started] == [(True, "3"), (False, "3")]
    assert all(command[-2:] == ["--data.groups=2", "--x"] for command, _ in started)
    assert not (tmp_path / "gigpo-1" / "config.yaml").exists()  # the killed run's files are gone
    assert [learning_views.read_state(tmp_path / f"gigpo-{seed}")["exit_code"] for seed in (0, 1, 2)] == [0, 0, 1]
    assert "gigpo-2: FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("variant", learning_views.VARIANTS)
def test_the_command_of_every_variant_is_accepted(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = learning_curves.fit_command(variant, 7, tmp_path / "run", 90.5, [])
    with pytest.raises(SystemExit) as end:
        __main__.main([*command[3:], "--print_config"])
    assert end.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["max_time"] == "00:01:30:30"
    assert {config["seed_everything"], config["data"]["seed"]} == {7}
    assert config["model"]["policy"]["init_args"]["init_seed"] == 7
    names = [callback["class_path"].rsplit(".", 1)[-1] for callback in config["trainer"]["callbacks"]]
    assert ("WarmStart" in names) == (variant == "warm")
    estimator = variant if variant in ("grpo", "step") else "gigpo"
    assert config["data"]["credit"]["estimator"] == estimator


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_iterations_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = ["--trainer.max_epochs=2", "--data.groups=2", "--data.members=2", "--data.evaluation.during_fit_tasks=2"]
    small += ["--data.evaluation.tasks=1", "--data.evaluation.seeds=1"]
    arguments = [str(tmp_path), "--variants", "grpo", "--seeds", "0", "--threads", "1", "--", *small]
    assert learning_curves.main(arguments) == 0
    (run,) = json.loads((tmp_path / "learning_curves.json").read_text())["runs"]
    assert run["iterations"] == 2 and run["success"][0][0] > 0
    assert run["results"][0]["stage"] == FIRST


# -- anchor_levels -----------------------------------------------------------------------------------------------------


def test_coverage_purity_and_explained_variance_of_known_steps() -> None:
    def step(text: str, task: str, view: str, step_return: float) -> anchor_levels.Step:
        return anchor_levels.Step({"text": text, "task": task}, view, step_return)

    steps = [step("a", "s", "kitchen", 1.0), step("a", "t", "hall", 0.0), step("b", "u", "hall", 1.0)]
    steps += [step("b", "u", "hall", 1.0), step("c", "v", "hall", 0.0)]
    text, task = anchor_levels.Sums(), anchor_levels.Sums()
    text.add(steps, "text")
    task.add(steps, "task")
    # text: groups a, b of two, c alone: 4 of 5 covered; a mixes two places, b nothing.
    assert (text.steps, text.covered, text.mixes_view, text.mixes_task) == (5, 4, 2, 2)
    assert (task.covered, task.mixes_view, task.mixes_task) == (2, 0, 0)
    # Mean 3/5, variation 3·(2/5)² + 2·(3/5)² = 6/5. Between: a has mean ½: 2·(1/10)²; b has mean 1: 2·(2/5)².
    assert text.variation == pytest.approx(1.2)
    assert text.between == pytest.approx(0.02 + 0.32)
    assert task.between == pytest.approx(0.32)
    assert text.row("p", "text") == "| p | `text` | 80 % | 50 % | 50 % | 28 % | 2.0 |"  # 0.34 / 1.2


def test_the_table_has_a_row_for_every_player_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tasks", "2", "--members", "2", "--horizon", "8", "--receptacles", "4", "--noise", "0.2", "1"]
    assert anchor_levels.main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ")[:2] for line in lines if line.startswith("| ")][1:]
    players = ("| explorer, 20 % random", "| random")
    assert rows == [[player, f"`{level}`"] for player in players for level in anchor_levels.LEVELS]
    assert "2 tasks of 4 receptacles, groups of 2, horizon 8" in lines[-1]


# -- log-probs, a GRPO step --------------------------------------------------------------------------------------------


def test_vocabulary_logprobs_writes_what_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_logprobs, "memory_of", lambda argv, head, name: 2.0)  # a process for every case
    out = tmp_path / "found.json"
    vocabulary_logprobs.main(["--tokens=70", "--words=50", "--hidden=8", "--repeats=1", "--out", str(out)])
    found = json.loads(out.read_text())
    assert {(row["head"], row["way"]) for row in found["rows"]} == {
        (head, way) for head in vocabulary_logprobs.HEADS for way in ("plain", "tiles", "tiles_0")
    }
    assert all(max(row["gradient_errors"]) < 1e-5 for row in found["rows"])  # float32 against float64
    assert found["words"] == 50 and found["machine"]["torch"]


def test_the_grpo_step_writes_what_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TRL: only that the figures reach the file."""
    monkeypatch.setattr(trl_step, "run", lambda options, folder: {"rows": 16})
    monkeypatch.setattr(trl_step, "show", lambda figures: None)
    monkeypatch.setattr(machine, "version", lambda name: f"{name} 1.0")
    trl_step.main(["--words=100", "--out", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"] == 16 and found["setting"]["words"] == 100
    assert found["machine"]["trl"] == "trl 1.0" and found["machine"]["cores"]


# -- memory and episodes, long episodes --------------------------------------------------------------------------------


def test_episode_memory_measures_an_iteration_and_says_what_is_above_the_start(tmp_path: Path) -> None:
    found = episode_memory.measure(16, 2, tmp_path)
    assert found["episodes"] == 16 and 16 <= found["turns"] <= 32
    assert list(found["peak_mib"]) == ["start", "collection", "update", "end"]
    assert all(peak["RssAnon"] > 10 and peak["RssFile"] > 10 for peak in found["peak_mib"].values())
    peaks = {"start": 100, "collection": 130, "update": 145, "end": 141}
    row = found | {"tokens": 2000, "file_mib": 3.2}
    row["peak_mib"] = {phase: {"RssAnon": peak, "RssFile": peak + 5} for phase, peak in peaks.items()}
    line = "| 16 | 2,000 | 3 MiB | 30 MiB | 45 MiB | 41 MiB | 45 MiB |"
    assert episode_memory.table([row]).splitlines()[2] == line


def test_long_episodes_plays_a_whole_conversation_with_one_memory_only() -> None:
    options = long_episodes.parse(
        ["out", "--turns", "1", "none", "--memory", "last-3", "anchors-6", "--seeds", "0", "4"]
    )
    pairs = [("1", "last-3"), ("1", "anchors-6"), ("none", "last-3")]
    assert long_episodes.cells_of(options) == [(*pair, seed) for seed in (0, 4) for pair in pairs]
    assert set(options.memory) <= set(long_episodes.MEMORY)


def test_long_episodes_goes_on_and_averages_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        figures = dict.fromkeys(long_episodes.COLUMNS, 0.25 + 0.5 * seed)
        cell = {"turns": "5", "memory": "last-3", "seed": seed, "env_steps": 70, "warm_episodes": 8, **figures}
        (tmp_path / f"5-last-3-{seed}.json").write_text(json.dumps(cell))
    command = [str(tmp_path), "--turns=5", "--memory=last-3", "--seeds", "0", "1", "--warm_episodes=8"]
    long_episodes.main([*command, "--env_steps=70", f"--output={tmp_path / 'all.json'}"])  # starts no process
    said = capsys.readouterr().out
    assert "5-last-3-1: finished before" in said
    assert said.splitlines()[-1].startswith("| 5 | last-3 | 0.50 | 0.50 |")
    assert len(json.loads((tmp_path / "all.json").read_text())["cells"]) == 2
    with pytest.raises(ValueError, match="made with another env_steps"):
        long_episodes.main([*command, "--env_steps=71"])


def test_a_cell_of_long_episodes_trains_and_is_evaluated(tmp_path: Path) -> None:
    found = long_episodes.measure(5, "changes-6", 0, env_steps=1, warm_episodes=2)
    assert found["iterations"] == 1 and len(found["curve"]) == 1
    assert found["segments"]["keyframes"] == "changes" and found["segments"]["keep_last"] == 3
    assert all(found[name] >= 0 for name in long_episodes.COLUMNS)
