"""The command `plan`: figures, verdicts, options that help, and the probe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gigpo_lightning import __main__
from gigpo_lightning.cli_plan_needs import Needs, Planner, Setup
from gigpo_lightning.cli_plan_probe import whole_run
from gigpo_lightning.cli_plan_savings import savings
from gigpo_lightning.cli_plan_table import Room
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from gigpo_lightning.policy.hollow import MicroShape, UpdateBytes
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.rollout.random_play import Work, play_at_random
from tests.cli_world import enter
from tests.tiny_lm import save_tiny
from tests.toy_world import BoxTasks

SMALL = ["--config", "alfworld.yaml", "--data.groups=2", "--data.members=2", "--data.minibatches=1"]
WORK = Work(
    episodes=4,
    turns=5.0,
    tokens=200.0,
    listed=20.0,
    allowed=60.0,
    free=10.0,
    widest=None,
    prompt_tokens=40,
    row_tokens=150,
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter(tmp_path, monkeypatch)


def setup_of(policy: Any, **options: Any) -> Setup:
    given: dict[str, Any] = {"rows": 8, "max_tokens": 192, "micro_tokens": 512, "work": WORK}
    return Setup(
        policy=policy,
        tasks=BoxTasks(),
        optimizer=torch.optim.AdamW,
        optimizer_name="AdamW",
        kl=True,
        constrain=True,
        on_gpu=False,
        **{**given, **options},
    )


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_the_largest_micro_batch() -> None:
    setup = setup_of(ScratchPolicy())
    # 512 tokens: 3 rows of 170, as rows may have 192: 2.55 episodes of 20 choices among 60 ids, and 10 among all.
    assert setup.micro_shape == MicroShape(rows=3, length=170, listed=51, allowed=153, free=26)
    # A row of 192 tokens makes a micro-batch of its own where only 100 were wanted.
    assert replace(setup, micro_tokens=100).micro_shape == MicroShape(1, 192, 19, 58, 10)
    # Nothing is known: a tenth of the tokens, 8 ids each, or all.
    assert replace(setup, work=None).micro_shape == MicroShape(3, 170, 51, 408, 0)
    assert replace(setup, work=None, constrain=False).micro_shape == MicroShape(3, 170, 0, 0, 51)


def test_a_run_needs_what_is_held_and_its_highest_peak() -> None:
    needs = Needs(
        parameters=10,
        trained=5,
        weights=100,
        gradients=20,
        optimizer=40,
        reference=100,
        update=UpdateBytes(50, 30, 70),
        update_otherwise=None,
        step=20,
        cache=300,
        cache_stays=True,
        rollout=60,
    )
    assert needs.held == 260
    assert needs.peaks == {"the update": 630, "the optimiser step": 580, "the rollout": 620}
    assert needs.total == 630
    # A GPU's cache is released before the update.
    assert replace(needs, cache_stays=False).peaks["the update"] == 330
    room = Room(630, False, "")
    assert [room.verdict(size) for size in (560, 600, 631)] == ["fits", "is tight", "does not fit"]


def test_options_save_what_they_are_said_to_save(own_folder: Path) -> None:
    folder = save_tiny(own_folder / "model", vocab_size=400)
    policy = CausalLMPolicy(folder, dtype="float32", lora=LoRA(r=4))
    setup, planner = setup_of(policy), Planner()
    needs, saved = planner.needs(setup), dict(savings(planner, setup))
    prefix = "--model.policy.init_args."
    assert {"--data.rows=4", "--data.max_tokens_per_batch=256", f"{prefix}gradient_checkpointing=true"} <= set(saved)
    assert list(saved.values()) == sorted(saved.values(), reverse=True)
    # Half of the rows is half of the keys and values: 2 layers × 8 rows × 2 heads × 256 tokens × 16 × 2 × 4 bytes.
    assert needs.cache == 2 * 8 * 2 * 256 * 16 * 2 * 4
    assert saved["--data.rows=4"] >= needs.cache // 2
    tried = CausalLMPolicy(folder, dtype="float32", lora=LoRA(r=4), gradient_checkpointing=True)
    after = Planner().needs(setup_of(tried))
    assert saved[f"{prefix}gradient_checkpointing=true"] == needs.total - after.total
    assert needs.update_otherwise == after.update
    assert after.update_otherwise == needs.update


def test_full_training_has_a_reference_and_lora_has_none(own_folder: Path) -> None:
    folder = save_tiny(own_folder / "model")
    full = Planner().needs(setup_of(CausalLMPolicy(folder, dtype="float32")))
    assert full.reference == full.weights
    assert full.weights == full.gradients + 2 * 8 * 4  # the rotary code: two buffers of 8 numbers, not trained
    assert full.optimizer == pytest.approx(2 * full.weights, rel=0.01)  # Adam's two moments and its counters
    assert Planner().needs(replace(setup_of(CausalLMPolicy(folder)), kl=False)).reference == 0
    saved = dict(savings(Planner(), setup_of(CausalLMPolicy(folder, dtype="float32"))))
    assert "--model.policy.init_args.lora={r: 16}" in saved
    assert "--model.optimizer=bitsandbytes.optim.AdamW8bit" in saved


# -- tokens ------------------------------------------------------------------------------------------------------------


def played(constrain: bool = True, **options: Any) -> Work:
    tasks = BoxTasks()
    policy = ScratchPolicy()
    policy.prepare(tasks)
    given = {"max_turns": 3, "max_action_tokens": 8, **options}
    rule = SegmentRule(max_tokens=200)
    games = [tasks.get("train", i) for i in range(4)]
    return play_at_random(policy.prompt, InProcessPool(tasks.make_env), games, rule, constrain=constrain, **given)


def test_random_episodes_are_rows_of_training() -> None:
    work = played()
    assert work.episodes == 4
    assert 1 <= work.turns <= 3
    assert work.listed >= 1 and work.free == 0
    assert work.allowed >= 2 * work.listed  # a token without an alternative is no choice
    assert work.widest is not None and work.widest >= work.allowed / work.listed
    assert work.prompt_tokens < work.row_tokens <= 200
    assert work == played()  # the same seed plays the same


def test_free_answers_are_as_long_as_they_may_be() -> None:
    work = played(constrain=False)
    assert work.widest is None
    assert (work.listed, work.free) == (0, 8 * work.turns)


def test_a_world_that_cannot_be_played_is_told() -> None:
    class Broken(BoxTasks):
        def make_env(self) -> Any:
            env = super().make_env()
            env.reset = lambda task: 1 / 0  # type: ignore[method-assign, assignment]
            return env

    policy, tasks = ScratchPolicy(), Broken()
    policy.prepare(tasks)
    with pytest.raises(ValueError, match=r"no episode could be played: .*ZeroDivisionError"):
        play_at_random(
            policy.prompt,
            InProcessPool(tasks.make_env),
            [tasks.get("train", 0)],
            SegmentRule(),
            max_turns=3,
            constrain=True,
            max_action_tokens=8,
        )


# -- the whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_epochs": 30}, (30, 60.0)),
        ({"max_epochs": 30, "max_time": {"seconds": 20}}, (10, 20.0)),
        ({"max_time": "00:00:01:00"}, (30, 60.0)),
        ({"max_steps": 40}, (10, 20.0)),  # 4 updates an iteration
        ({"max_epochs": -1, "max_steps": -1}, (None, None)),
        ({}, (1000, 2000.0)),
    ],
)
def test_the_whole_run(limits: dict[str, Any], expected: tuple[float | None, float | None]) -> None:
    assert whole_run(limits, updates=4, iteration_s=2.0) == expected


# -- the command -------------------------------------------------------------------------------------------------------


def plan(*args: str) -> int:
    return __main__.main(["plan", *SMALL, *args])


def pretrained(folder: Path) -> list[str]:
    """A folder that holds a model's configuration and nothing else."""
    save_tiny(folder)
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    policy = ["--model.policy", "CausalLMPolicy", "--model.policy.init_args.model", str(folder)]
    return [*policy, "--data.segments.max_tokens=400", "--model.policy.init_args.dtype=float32"]


def test_a_model_is_planned_from_its_configuration_alone(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*pretrained(own_folder / "model"), "--trainer.accelerator=auto"]
    assert plan(*options, "--memory=24GiB", "--json=figures.json") == 0
    shown = capsys.readouterr().out
    assert "Memory of a run on a GPU" in shown and "The run fits." in shown
    assert "no probe: it is planned for another machine" in shown
    assert "its tokenizer could not be loaded" in " ".join(shown.split())
    assert all(len(line) <= 100 for line in shown.splitlines() if line.startswith(("│", "┃")))
    figures = json.loads(Path("figures.json").read_text())
    memory = figures["memory"]
    parts = ("weights", "gradients", "optimizer", "reference")
    assert sum(memory[part] for part in parts) == memory["held"]
    peaks = (memory["update"]["peak"], memory["cache"] + memory["rollout"], memory["step"])
    assert memory["total"] == memory["held"] + max(peaks)
    assert figures["room"]["bytes"] == round(23.25 * 2**30)  # 0.75 GiB are CUDA's own
    assert not Path("runs").exists()


def test_what_does_not_fit_is_said_with_what_helps(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*pretrained(own_folder / "model"), "--data.rows=128"]
    assert plan(*options, "--memory=2MiB", "--json=figures.json") == 1
    shown = capsys.readouterr().out
    assert "The run does not fit: " in shown
    assert "What would help, each by itself" in shown
    figures = json.loads(Path("figures.json").read_text())
    assert "--data.rows=64" in figures["savings"]
    assert figures["room"]["bytes"] == 2 * 2**20  # a CPU's memory is all there


def test_the_probe_measures_and_leaves_nothing_behind(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--trainer.max_time=null", "--trainer.max_epochs=7", "--iterations=1"]
    assert plan(*limits, "--json=figures.json") == 0
    shown = capsys.readouterr().out
    assert "An iteration of 4 episodes" in shown and "first-steps" in shown and "full-house" in shown
    assert "whole run: 7 iterations in " in shown
    assert "Stages of the curriculum" not in shown  # the probe's are of no interest
    figures = json.loads(Path("figures.json").read_text())
    seconds = figures["probe"]["seconds_per_iteration"]
    assert seconds["time/update_s"] > 0 and seconds["time/policy_s"] > 0
    parts = sum(value for name, value in seconds.items() if name not in ("total", "tokens_per_episode"))
    assert parts == pytest.approx(seconds["total"])
    assert figures["run"] == {"iterations": 7, "seconds": pytest.approx(7 * seconds["total"])}
    assert {path.name for path in own_folder.iterdir()} <= {"figures.json"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--memory=lots"], "'lots' is not a size"),
        (["--iterations=0"], "--iterations=0: must be at least 1"),
        (["--iteration=1"], "unknown option --iteration"),
        (["--data.rows=0"], "data.rows=0"),
        (["--data.credit.estimator=ppo", "--probe=false"], "data.credit.estimator=ppo needs a critic"),
        (
            ["--config=algorithm/ppo.yaml", "--data.skip_zero_advantage=true", "--probe=false"],
            "data.skip_zero_advantage=true with model.critic",
        ),
        (["--model.policy", "CausalLMPolicy", "--model.policy.init_args.model=./none"], "there is no such folder"),
    ],
)
def test_bad_input(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        plan(*args)
    assert end.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
