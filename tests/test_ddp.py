"""Two processes train as one would, with whole weights (DDP) and with spread ones (FSDP2), and resume to the bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gigpo_lightning.policy.critic import CriticRule
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.store import RolloutStore
from gigpo_lightning.sharding import shard
from gigpo_lightning.update import padding
from tests.ddp_world import SHARDED, command, gradient, gradients, said, sharded_runs, together
from tests.test_resume import assert_equal
from tests.toy_run import fit, make_module, make_policy
from tests.toy_world import BoxTasks

ROOT = Path(__file__).parents[1]
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token": {"aggregation": "token"},
    "turn": {"aggregation": "turn"},
    "constant": {"aggregation": "constant", "constant_tokens": 50.0},
    "critic": {"critic": CriticRule(clip=None)},
    "detached": {"critic": CriticRule(clip=0.3, detach=True), "ratio": "sequence"},
}


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with played rows and what two processes made of them in every case."""
    folder = tmp_path_factory.mktemp("both")
    # The rows of the second iteration: the critic says something by then, so that every turn has an advantage.
    data = {"groups": 4, "members": 4, "credit": CreditRule(estimator="ppo")}
    fit(folder, 2, data=data, model={"critic": CriticRule(lr=0.05)})
    shutil.copy(sorted((folder / "rollouts").glob("*.arrow"))[1], folder / "played.arrow")
    assert together(folder, gradients, cases(folder), "ddp", "fsdp") == [0, 0], said(folder)
    return folder


def cases(folder: Path) -> dict[str, tuple[list[list[int]], dict[str, Any]]]:
    """By name: the rows of each process, and options of the model."""
    rows = list(range(len(RolloutStore(folder / "played.arrow"))))
    shares = {"uneven": [rows[:3], rows[3:]], "idle": [[], rows]}
    return {f"{how}-{by}": (share, model) for how, share in shares.items() for by, model in AGGREGATIONS.items()}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("how", ["uneven", "idle"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_have_the_gradient_and_the_figures_of_one(
    both: Path, strategy: str, how: str, aggregation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(both)
    (shares, model) = cases(both)[f"{how}-{aggregation}"]
    first, second = (torch.load(f"{strategy}-{how}-{aggregation}-{rank}.pt", weights_only=True) for rank in range(2))
    assert first["micro_batches"] < second["micro_batches"]
    alone = gradient([row for share in shares for row in share], 10**9, "auto", **model)
    assert alone["gradient"].norm() > 0.05
    assert first["gradient"].equal(second["gradient"])
    torch.testing.assert_close(first["gradient"], alone["gradient"], rtol=1e-5, atol=1e-6)
    assert first["figures"] == second["figures"]
    assert first["figures"] == pytest.approx(alone["figures"], rel=1e-4, abs=1e-6)
    assert alone["figures"]["loss/clip_frac"] > 0.05  # far enough from the policy that played for every term to count
    assert alone["figures"]["loss/kl"] > 0.01


def test_padding_reaches_every_weight_and_changes_none() -> None:
    """A process that is done earlier must still take part in what its processes do together."""
    module, policy = make_module(kl_coef=0.1, critic=CriticRule(detach=True)), make_policy()
    policy.prepare(BoxTasks())
    policy.add_critic(detach=True)
    micro, weights = padding(torch.device("cpu"))
    loss, metrics = module.loss.part(policy, policy, micro, 1.0, 0.1, weights=weights, denominator=1.0)
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())
    assert all(value == 0 for value in metrics.values())


# -- whole runs --------------------------------------------------------------------------------------------------------


SMALL = ["--trainer.num_sanity_val_steps=0", "--trainer.check_val_every_n_epoch=1", "--data.members=4"]
EVALUATION = [f"--data.evaluation.{option}" for option in ("tasks=1", "seeds=1", "greedy=false", "during_fit_tasks=1")]
EVALUATION.append("--data.evaluation.stages=[first-steps]")
WITNESS = "--trainer.callbacks+=tests.ddp_world.Witness"


def test_alfworld_trains_on_two_devices_from_the_command_line(tmp_path: Path) -> None:
    """Lightning starts the second process by repeating the command."""
    line = [sys.executable, "-m", "gigpo_lightning", "fit", "--config=alfworld.yaml", *SMALL, *EVALUATION, WITNESS]
    overlay = ["--config=trainer/ddp.yaml", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    options = [*overlay, "--trainer.max_epochs=2", "--data.groups=3"]
    done = subprocess.run(
        [*line, *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    weights = [torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True) for rank in range(2)]
    assert_equal(*weights, "weights")
    run = tmp_path / "runs/alfworld/version_0"
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    names = sorted(path.name for path in (run / "rollouts").iterdir())
    assert names == [f"iteration_00000{i}_rank{rank}.arrow" for i in range(2) for rank in range(2)]
    groups = [RolloutStore(run / "rollouts" / name).table.column("group").unique() for name in names]
    assert [len(numbers) for numbers in groups] == [
        2,
        1,
        2,
        1,
    ]  # three groups: two on the first process, one on the other
    assert "iteration 2/2" in done.stdout
    assert done.stdout.count("Training finished") == 1
    assert len(json.loads((run / "results.json").read_text())["results"]) == 2  # seen, unseen


BOXES = """
seed_everything: 0
trainer:
  accelerator: cpu
  devices: 2
  strategy: ddp
  check_val_every_n_epoch: 2
  num_sanity_val_steps: 0
  enable_model_summary: false
  callbacks:
    - {class_path: Curriculum, init_args: {curriculum: steps.yaml, stop_when_passed: false}}
    - {class_path: LambdaDecay, init_args: {schedule: linear, start: 1.0, end: 0.0, span: 8}}
    - class_path: AnchorLibrary
    - {class_path: WarmStart, init_args: {episodes: 8, epochs: 1, batch_episodes: 4}}
    - class_path: TensorBoardViews
    - class_path: IterationProgress
    - {class_path: IterationCheckpoint, init_args: {keep_last: 9}}
    - class_path: tests.ddp_world.Witness
data:
  tasks: {class_path: tests.toy_world.BoxTasks}
  groups: 3
  credit:
    detector: {class_path: WindowDetector, init_args: {window: 3, min_count: 3, target_density: [0.1, 0.15]}}
  members: 4
  minibatches: 2
  keep_rollouts: 9
  evaluation: {tasks: 3, seeds: 1, during_fit_tasks: 3}
model:
  policy:
    class_path: ScratchPolicy
    init_args: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1, initializer_range: 0.2}
  kl_coef: 0.05
"""
STEPS = """
stages:
  - {name: two, difficulty: {boxes: 2}, max_turns: 4, promote: 0.01, window: 1, min_iterations: 2}
  - {name: three, difficulty: {boxes: 3}, max_turns: 4, rehearsal: 0.5}
"""


def play(folder: Path, *args: str) -> list[int | None]:
    """One command in two processes."""
    folder.mkdir(exist_ok=True)
    (folder / "boxes.yaml").write_text(BOXES)
    (folder / "steps.yaml").write_text(STEPS)
    return together(folder, command, "fit", "--config=boxes.yaml", *args)


def test_a_resumed_run_of_two_processes_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """Both processes are started by another program, as torchrun does: they agree on folder and checkpoint."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert play(whole, "--trainer.max_epochs=4") == [0, 0], said(whole)
    assert play(cut, "--trainer.max_epochs=2") == [0, 0], said(cut)
    assert play(cut, "--trainer.max_epochs=4", "--ckpt_path=last") == [0, 0], said(cut)
    assert "two → three" in said(whole)
    runs = [folder / "runs/boxes/version_0" for folder in (whole, cut)]
    for number in (3, 4):
        name = f"checkpoints/iteration={number:06d}.ckpt"
        content = [torch.load(run / name, weights_only=True) for run in runs]
        for checkpoint in content:
            # Lightning's count of the batches of the latest validation: it starts anew, and nothing reads it.
            del checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
        assert_equal(*content, name)
    for rank in range(2):
        assert_equal(*(torch.load(folder / f"weights-{rank}.pt", weights_only=True) for folder in (whole, cut)), "end")
    assert_equal(*(torch.load(whole / f"weights-{rank}.pt", weights_only=True) for rank in range(2)), "ranks")
    assert runs[0].joinpath("anchors.arrow").read_bytes() == runs[1].joinpath("anchors.arrow").read_bytes()
    results = [json.loads((run / "results.json").read_text())["results"] for run in runs]
    assert results[0] == results[1]
    assert [len(list(folder.glob("runs/boxes/*"))) for folder in (whole, cut)] == [1, 1]


def test_who_is_left_alone_says_so_in_one_line(tmp_path: Path) -> None:
    assert play(tmp_path, "--trainer.max_epochs=3", "--trainer.callbacks+=tests.ddp_world.Leaves") == [1, 7]
    text = (tmp_path / "said-0").read_text()
    assert "process 0: another process of this run has ended; its own message says why" in text
    assert "Traceback" not in text


def test_fewer_groups_than_processes_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    assert play(tmp_path, "--trainer.max_epochs=1", "--data.groups=1") == [2, 2], said(tmp_path)
    assert "error: data.groups=1 for 2 processes: each plays whole groups" in (tmp_path / "said-0").read_text()
    assert not (tmp_path / "runs").exists()


def test_spread_weights_train_as_whole_ones_and_resume_to_the_bit(tmp_path: Path) -> None:
    assert together(tmp_path, sharded_runs) == [0, 0], said(tmp_path)
    name = "checkpoints/iteration=000003.ckpt"
    whole, cut, ddp = (torch.load(tmp_path / run / name, weights_only=True) for run in ("whole", "cut", "ddp"))
    for part in ("state_dict", "optimizer_states"):
        assert_equal(whole[part], cut[part], part)
    # The file is that of any other strategy: the same names and numbers, but for the order of additions.
    torch.testing.assert_close(whole["state_dict"], ddp["state_dict"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole["optimizer_states"], ddp["optimizer_states"], rtol=1e-3, atol=1e-5)
    assert whole["state_dict"]["policy.critic.head.weight"].any()
    model, data = SHARDED
    fit(tmp_path / "alone", 4, model=model, data=data, ckpt_path=str(tmp_path / "whole" / name))


def test_quantized_weights_are_not_spread() -> None:
    policy = make_policy()
    policy.prepare(BoxTasks())
    policy.register_parameter("packed", torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False))
    with pytest.raises(ValueError, match=r"policy\.quantization: quantized weights \(packed\) cannot be spread"):
        shard(policy, mesh=None)  # type: ignore[arg-type]
