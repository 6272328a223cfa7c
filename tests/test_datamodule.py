"""The datamodule: one fresh collection per iteration, whole passes, evaluations that change nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from gigpo_lightning.batch import Minibatch
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.collector import EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.evaluation import EvaluationRule
from tests.toy_run import fit, make_data, make_module, make_trainer, rollouts, weights


class Batches(pl.Callback):
    """The token rows of every minibatch, by iteration."""

    def __init__(self) -> None:
        self.seen: list[list[list[tuple[int, ...]]]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen.append([])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Minibatch, batch_idx: int) -> None:
        rows: list[tuple[int, ...]] = []
        for micro in batch.micro_batches:
            rows += [tuple(row.tolist()) for row in micro.token_ids.split(micro.lengths)]
        self.seen[-1].append(rows)


class Played(pl.Callback):
    """For each call of `play`: how many jobs, at which temperature, and the weights that acted."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, float, torch.Tensor]] = []
        self.after: list[torch.Tensor] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        player = trainer.datamodule.player
        play = player.play

        def note_and_play(policy: BasePolicy, drawn: Iterable[EpisodeJob], temperature: float) -> Any:
            jobs = list(drawn)
            self.calls.append((len(jobs), temperature, weights(pl_module)))
            return play(policy, jobs, temperature)

        player.play = note_and_play

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.after.append(weights(pl_module))


# -- iterations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("passes", "minibatches"), [(1, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("turns", [None, 1])
def test_each_pass_has_its_minibatches_and_every_row_once(
    tmp_path: Path, passes: int, minibatches: int, turns: int | None
) -> None:
    batches = Batches()
    data = {"passes": passes, "minibatches": minibatches, "segments": SegmentRule(turns=turns, max_tokens=200)}
    fit(tmp_path, epochs=2, callbacks=[batches], data=data)
    assert len(batches.seen) == 2
    for iteration, rows in zip(batches.seen, rollouts(tmp_path), strict=True):
        trainable = Counter(tuple(row["token_ids"]) for row in rows if any(row["response_mask"]))
        assert len(iteration) == passes * minibatches
        for start in range(0, len(iteration), minibatches):
            one_pass = iteration[start : start + minibatches]
            assert Counter(row for minibatch in one_pass for row in minibatch) == trainable
            sizes = [len(minibatch) for minibatch in one_pass]
            assert max(sizes) - min(sizes) <= 1
        if passes > 1:  # in another order each time
            assert iteration[:minibatches] != iteration[minibatches : 2 * minibatches]


def test_lightning_is_told_the_number_of_updates(tmp_path: Path) -> None:
    trainer, _, _ = fit(tmp_path, data={"passes": 3, "minibatches": 2})
    assert trainer.num_training_batches == 6  # without it, Lightning fetches one batch ahead


def test_more_minibatches_than_rows_are_empty_ones(tmp_path: Path) -> None:
    batches = Batches()
    trainer, _, _ = fit(tmp_path, callbacks=[batches], data={"groups": 1, "members": 2, "minibatches": 5})
    assert sorted(map(len, batches.seen[0])) == [0, 0, 0, 1, 1]
    assert trainer.callback_metrics["loss/skipped_updates"] == 0


def test_every_iteration_is_collected_once_with_the_present_policy(tmp_path: Path) -> None:
    played = Played()
    fit(tmp_path, epochs=4, callbacks=[played])
    assert [call[0] for call in played.calls] == [16] * 4  # 4 groups of 4
    for (_, _, acted), trained in zip(played.calls[1:], played.after, strict=False):
        assert acted.equal(trained)
    assert len({tuple(acted.tolist()) for _, _, acted in played.calls}) == 4


def test_dropout_is_off_while_sampling_and_on_while_training(tmp_path: Path) -> None:
    class Watched(ScratchPolicy):
        modes: set[tuple[str, bool]] = set()  # noqa: RUF012

        def feed(self, *args: Any) -> Any:
            self.modes.add(("sampling", self.training or self.model.training))
            return super().feed(*args)

        def chosen_logprobs(self, *args: Any) -> Any:
            self.modes.add(("training", self.training and self.model.training))
            return super().chosen_logprobs(*args)

    policy = Watched(16, layers=1, heads=2, kv_heads=1)
    fit(tmp_path, epochs=2, model={"policy": policy}, limit_val_batches=1)
    assert policy.modes == {("sampling", False), ("training", True)}


# -- evaluations -------------------------------------------------------------------------------------------------------


def test_validation_changes_nothing_of_the_training(tmp_path: Path) -> None:
    without = fit(tmp_path / "a", epochs=4)[1]
    trainer, with_it, _ = fit(tmp_path / "b", epochs=4, limit_val_batches=5, num_sanity_val_steps=1)
    assert "val/all/success" in trainer.callback_metrics
    assert weights(with_it).equal(weights(without))
    assert rollouts(tmp_path / "a") == rollouts(tmp_path / "b")


def results(root: Path, **options: Any) -> list[dict[str, Any]]:
    module = make_module()
    make_trainer(root).test(module, datamodule=make_data(**options), verbose=False)
    return module.results


def test_evaluations_do_not_depend_on_batch_or_training_seed(tmp_path: Path) -> None:
    rule = EvaluationRule(tasks=10, seeds=2)
    usual = results(tmp_path, evaluation=rule)
    assert usual == results(tmp_path, evaluation=rule, rows=3)
    assert usual == results(tmp_path, evaluation=rule, rows=1, seed=7, groups=9, temperature=2.0)
    assert usual != results(tmp_path, evaluation=EvaluationRule(tasks=10, seeds=2, seed=1001))


def test_what_test_plays(tmp_path: Path) -> None:
    rule = EvaluationRule(splits=("unseen",), tasks=5, seeds=3, temperature=0.7)
    sampled, greedy = results(tmp_path, evaluation=rule)
    assert (sampled["stage"], sampled["split"], sampled["mode"]) == ("all", "unseen", "sampled")
    assert (sampled["tasks"], sampled["episodes"], sampled["temperature"]) == (5, 15, 0.7)
    assert (greedy["mode"], greedy["episodes"], greedy["temperature"]) == ("greedy", 5, 0)
    assert len(results(tmp_path, evaluation=EvaluationRule(tasks=2, greedy=False))) == 2  # seen and unseen


STAGES = (Stage("two", {"boxes": 2}, max_turns=2), Stage("three", {"boxes": 3}, max_turns=3))


class Stages(pl.Callback):
    """Says which stages there are, as `Curriculum` does."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.datamodule.controls.stages = STAGES


def test_the_stages_that_test_plays_can_be_chosen(tmp_path: Path) -> None:
    def played(stages: tuple[str, ...] | None) -> list[str]:
        rule = EvaluationRule(stages=stages, splits=("seen",), tasks=2, greedy=False)
        module = make_module()
        make_trainer(tmp_path, callbacks=[Stages()]).test(module, datamodule=make_data(evaluation=rule), verbose=False)
        return [row["stage"] for row in module.results]

    assert played(None) == ["two", "three"]
    assert played(("three",)) == ["three"]
    with pytest.raises(ValueError, match=r"evaluation\.stages: there is no stage 'thre'; did you mean 'three'"):
        played(("thre",))


def test_a_bad_name_ends_the_fit_before_its_first_iteration(tmp_path: Path) -> None:
    for options, message in (
        ({"stages": ("thre",)}, "did you mean 'three'"),
        ({"predict_stage": "on"}, r"evaluation.predict_stage: there is no stage 'on' \(stages: two, three\)"),
        ({"splits": ("unsen",)}, r"there is no split 'unsen' \(splits: train, seen, unseen\)"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(tmp_path, callbacks=[Stages()], data={"evaluation": EvaluationRule(**options)})
    assert not list(tmp_path.iterdir())


def test_predict_plays_the_stage_that_the_checkpoint_had_reached(tmp_path: Path) -> None:
    class Second(Stages):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.datamodule.controls.stage = STAGES[1]

    fit(tmp_path, callbacks=[Second(), IterationCheckpoint()])

    def tasks(ckpt_path: str | None, **options: Any) -> list[str]:
        """First lines of the transcripts that `predict` gives."""
        data = make_data(evaluation=EvaluationRule(predict_tasks=2, **options))
        trainer = make_trainer(tmp_path, callbacks=[Stages(), IterationCheckpoint()])
        (texts,) = trainer.predict(make_module(), datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return [text.splitlines()[2] for text in texts]

    assert tasks("last") == ["you see 3 box ."] * 2
    assert tasks("last", predict_stage="two") == ["you see 2 box ."] * 2
    assert tasks(None) == ["you see 2 box ."] * 2  # without a checkpoint the first


def test_validation_plays_the_first_stage_and_the_present_one(tmp_path: Path) -> None:
    class Second(Stages):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.datamodule.controls.stage = STAGES[1]

    trainer, module, _ = fit(tmp_path, callbacks=[Second()], limit_val_batches=5)
    assert {"val/two/success", "val/three/success"} <= set(trainer.callback_metrics)
    assert [(row["stage"], row["episodes"]) for row in module.results] == [("two", 4), ("three", 4)]
