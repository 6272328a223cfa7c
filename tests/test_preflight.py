"""What a run could not play, or must not overwrite, ends it before its first iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from transformers import AutoTokenizer

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.envs.base import Observation, Task
from gigpo_lightning.policy.chat import ChatPrompt
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.evaluation import EvaluationRule
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.rollout.preflight import check_first_prompt
from tests.tiny_lm import CHAT, save_tokenizer
from tests.toy_run import fit, make_data, make_module, make_trainer, rollouts, weights
from tests.toy_world import BoxEnv, BoxTasks

TWO_STAGES = (Stage("two", {"boxes": 2}), Stage("nine", {"boxes": 9}))


class Stages(pl.Callback):
    """Says which stages there are, as `Curriculum` does, and starts in the first one."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.datamodule.controls.stages = TWO_STAGES

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.datamodule.controls.stage = TWO_STAGES[0]

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pytest.fail("an iteration was played")


class LongEnv(BoxEnv):
    """Nine boxes are described at length, in 60 tokens and more."""

    def reset(self, task: Task) -> Observation:
        first = super().reset(task)
        long = "box " * 60 if len(self.boxes) == 9 else ""
        return Observation(f"{first.text} {long}", first.instruction)


class OddTasks(BoxTasks):
    """Nine boxes: no task fits in the split `seen`, as where recorded games of one split are all too small."""

    def get(self, split: str, index: int) -> Task:
        if split == "seen" and self.boxes == 9:
            raise ValueError("no game has 9 boxes")
        return super().get(split, index)

    def narrow(self, difficulty: Mapping[str, Any]) -> BoxTasks:
        return type(self)(int(difficulty.get("boxes", self.boxes)))


class LongTasks(OddTasks):
    def get(self, split: str, index: int) -> Task:
        return BoxTasks.get(self, split, index)

    def make_env(self) -> LongEnv:
        return LongEnv()


class Empty(BoxTasks):
    def len(self, split: str) -> int:
        return 0 if split == "train" else self.size


class NoUnseen(BoxTasks):
    """A world of one's own whose splits have other names."""

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "dev")

    def len(self, split: str) -> int:
        return {"train": 9, "dev": 9}[split]


# -- stages, splits, prompts -------------------------------------------------------------------------------------------


def test_a_stage_without_tasks_in_a_split_of_the_final_test_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stage 'nine', split 'seen': no game has 9 boxes"):
        fit(tmp_path, callbacks=[Stages()], data={"tasks": OddTasks(3)})
    assert not list(tmp_path.iterdir())


def test_what_is_not_evaluated_is_not_asked_for(tmp_path: Path) -> None:
    class Only(Stages):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pass

    rule = EvaluationRule(splits=("unseen",), tasks=1, seeds=1)
    fit(tmp_path, callbacks=[Only()], data={"tasks": OddTasks(3), "evaluation": rule})


def test_a_later_stage_whose_first_prompt_is_too_long_is_named(tmp_path: Path) -> None:
    message = (
        r"stage 'nine', split 'train': data\.segments\.max_tokens=60 leaves no room after the first prompt "
        r"of task train-0 \(\d+ tokens\): raise it to at least \d+"
    )
    with pytest.raises(ValueError, match=message) as refused:
        fit(tmp_path, callbacks=[Stages()], data={"tasks": LongTasks(3), "segments": SegmentRule(max_tokens=60)})
    enough = int(str(refused.value).rsplit(" ", 1)[-1])
    data = make_data(tasks=LongTasks(9), segments=SegmentRule(max_tokens=enough))
    make_trainer(tmp_path).test(make_module(), datamodule=data, verbose=False)


def test_an_answer_without_room_for_a_thought_is_refused(tmp_path: Path) -> None:
    """`<think> </think> <action> open box 1 </action> <end>` are 8 tokens."""
    prompt = ChatPrompt(AutoTokenizer.from_pretrained(save_tokenizer(tmp_path)), replace(CHAT, format="think"), "tiny")
    pool, task, rule = InProcessPool(BoxEnv), BoxTasks(3).get("train", 0), SegmentRule(max_tokens=100)
    with pytest.raises(ValueError, match=r"max_action_tokens=8 leaves no room for a thought: .*train-0 take 8 tokens"):
        check_first_prompt(pool, prompt, rule, 8, task)
    check_first_prompt(pool, prompt, rule, 9, task)
    shown = ChatPrompt(prompt.tokenizer, replace(CHAT, first="{instruction} {observation}\n{admissible}"), "tiny")
    check_first_prompt(pool, shown, rule, 9, task)  # the list is there


def test_without_a_curriculum_there_is_one_stage(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stage 'all', split 'train': data\.segments\.max_tokens=20 leaves no room"):
        fit(tmp_path, data={"segments": SegmentRule(max_tokens=20)})
    with pytest.raises(ValueError, match=r"stage 'all', split 'train': there is no task in it"):
        fit(tmp_path, data={"tasks": Empty(3)})


def test_a_failing_environment_is_left_to_the_collection(tmp_path: Path) -> None:
    class Fails(BoxEnv):
        resets = [0]  # noqa: RUF012

        def reset(self, task: Task) -> Observation:
            self.resets[0] += 1
            if self.resets[0] == 1:
                raise OSError("not yet")
            return super().reset(task)

    class FailsOnce(BoxTasks):
        def make_env(self) -> Fails:
            return Fails()

    assert fit(tmp_path, data={"tasks": FailsOnce(3)})[2].iteration == 1


def test_a_world_without_unseen_tasks_can_train_but_not_validate(tmp_path: Path) -> None:
    data = {"tasks": NoUnseen(3), "evaluation": EvaluationRule(splits=("dev",), tasks=2, seeds=1)}
    message = r"split 'unseen': .* no such split \(splits: train, dev\).*limit_val_batches=0 trains without validation"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, data=data, limit_val_batches=1, num_sanity_val_steps=0, check_val_every_n_epoch=5)
    _, module, datamodule = fit(tmp_path, data=data)
    trainer = make_trainer(tmp_path)
    trainer.test(module, datamodule=datamodule, verbose=False)
    assert {row["split"] for row in module.results} == {"dev"}
    with pytest.raises(ValueError, match="no such split"):
        trainer.predict(module, datamodule=datamodule)


# -- rollout_dir -------------------------------------------------------------------------------------------------------


def test_a_run_never_removes_the_rollouts_of_another(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    data = {"rollout_dir": str(shared), "keep_rollouts": 1}
    fit(tmp_path / "one", data=data)
    file = shared / "iteration_000000_rank0.arrow"
    before = file.read_bytes()
    with pytest.raises(
        ValueError, match=r"data\.rollout_dir=.*shared: holds the rollouts of .*one; choose another folder"
    ):
        fit(tmp_path / "other", epochs=3, data={**data, "seed": 5})
    assert file.read_bytes() == before
    (shared / "run.txt").unlink()  # made by hand, or before runs left their names
    with pytest.raises(ValueError, match="the rollouts of an unknown run"):
        fit(tmp_path / "one", data=data)


@pytest.mark.parametrize("done", [0, 2])
def test_a_resumed_run_goes_on_in_its_rollout_dir(tmp_path: Path, done: int) -> None:
    """With 0 iterations done, a kill in the first one has left a file and no checkpoint."""

    def run(name: str, epochs: int, ckpt_path: str | None = None) -> Any:
        data = {"rollout_dir": str(tmp_path / name / "rollouts"), "keep_rollouts": 9}
        return fit(tmp_path / name, epochs, [IterationCheckpoint()], data=data, ckpt_path=ckpt_path)[1]

    whole = run("whole", 3)
    run("cut", done or 1)
    resumed = run("cut", 3, "last" if done else None)
    assert weights(resumed).equal(weights(whole))
    assert rollouts(tmp_path / "cut") == rollouts(tmp_path / "whole")
    assert len(rollouts(tmp_path / "cut")) == 3


def test_a_run_that_is_resumed_in_another_folder_takes_over(tmp_path: Path) -> None:
    data = {"rollout_dir": str(tmp_path / "rollouts")}
    fit(tmp_path / "one", 1, [IterationCheckpoint()], data=data)
    fit(tmp_path / "two", 2, data=data, ckpt_path=str(tmp_path / "one/checkpoints/last.ckpt"))
    assert (tmp_path / "rollouts/run.txt").read_text() == str(tmp_path / "two")


def test_a_rollout_dir_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/inside"):
        with pytest.raises(ValueError, match=rf"data\.rollout_dir=.*{folder}: cannot be written: .*; choose another"):
            fit(tmp_path / "run", callbacks=[Stages()], data={"rollout_dir": str(tmp_path / folder)})
    assert not (tmp_path / "run").exists()
