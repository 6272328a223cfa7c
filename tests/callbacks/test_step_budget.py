"""StepBudget, LearningCurve and DirectTraining: bad arguments, what they do in a real fit, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gigpo_lightning.callbacks import (
    Curriculum,
    DirectTraining,
    IterationCheckpoint,
    LearningCurve,
    StepBudget,
    TensorBoardViews,
)
from gigpo_lightning.callbacks.learning_curve import is_due
from gigpo_lightning.rollout.evaluation import EvaluationRule
from tests import toy_run

STAGES = {
    "stages": [
        {"name": "two", "difficulty": {"boxes": 2}, "max_turns": 4, "min_iterations": 99},
        {"name": "three", "difficulty": {"boxes": 3}, "max_turns": 4, "rehearsal": 0.9},
    ]
}
EVALUATION = EvaluationRule(tasks=4, seeds=1, during_fit_tasks=4, during_fit_stages=("two", "three"))


@pytest.fixture
def curriculum(tmp_path: Path) -> str:
    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump(STAGES))
    return str(path)


def train(root: Path, curriculum: str, env_steps: int | None, curve: LearningCurve, **options: Any) -> StepBudget:
    """A fit that the budget ends; 16 episodes of at most 4 turns an iteration."""
    budget = StepBudget(env_steps)
    callbacks = [Curriculum(curriculum), budget, curve, IterationCheckpoint(best_by=None)]
    settings = {"epochs": 50, "limit_val_batches": None, "num_sanity_val_steps": -1, **options}
    toy_run.fit(root, callbacks=callbacks, data={"evaluation": EVALUATION}, **settings)
    return budget


def read(root: Path, seconds: bool = False) -> dict[str, Any]:
    """`curve.json` without what takes its time."""
    content: dict[str, Any] = json.loads((root / "curve.json").read_text())
    for entry in (content, *content["points"]):
        assert entry.pop("seconds") >= 0
    assert content.pop("peak_bytes") > 50 * 2**20  # torch alone takes more
    return content


# -- bad arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepBudget(0), "StepBudget.env_steps=0"),
        (lambda: LearningCurve(every_env_steps=0), "LearningCurve.every_env_steps=0"),
        (lambda: LearningCurve(every_s=0.0), r"LearningCurve.every_s=0\.0"),
        (lambda: LearningCurve(every_s=float("nan")), "LearningCurve.every_s=nan"),
        (lambda: LearningCurve(every_s=1.0, every_env_steps=1), "give one of them"),
    ],
)
def test_bad_numbers_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_stage_that_is_not_there_is_refused(curriculum: str) -> None:
    with pytest.raises(ValueError, match=r"DirectTraining.stage: there is no stage 'tree'; did you mean 'three'"):
        DirectTraining(curriculum, "tree")


def test_the_curve_needs_the_counter_before_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs StepBudget"):
        toy_run.fit(tmp_path, callbacks=[LearningCurve()])
    with pytest.raises(ValueError, match="list StepBudget before LearningCurve"):
        toy_run.fit(tmp_path, callbacks=[LearningCurve(), StepBudget()])


def test_a_mark_is_due_in_the_interval_that_ends_at_or_behind_it() -> None:
    # multiples of 10: 10 lies in (5, 10] and (9, 12], none in (10, 19], two in (5, 20]
    assert [is_due(*ends, 10) for ends in ((5, 10), (9, 12), (10, 19), (5, 20), (0, 9))] == [1, 1, 0, 1, 0]


# -- in a fit ----------------------------------------------------------------------------------------------------------


def test_a_fit_ends_with_the_iteration_that_uses_up_the_budget(tmp_path: Path, curriculum: str) -> None:
    counted = train(tmp_path / "free", curriculum, None, LearningCurve(), epochs=3)
    assert 3 * 16 <= counted.total <= 3 * 16 * 4  # 16 episodes of 1 to 4 turns
    # one step fewer than three iterations take: the third is still played; as many: it is the last as well
    for env_steps in (counted.total - 1, counted.total):
        root = tmp_path / str(env_steps)
        assert train(root, curriculum, env_steps, LearningCurve()).total == counted.total
        assert read(root)["iteration"] == 3
    # one more: a fourth iteration is needed
    train(tmp_path / "more", curriculum, counted.total + 1, LearningCurve())
    assert read(tmp_path / "more")["iteration"] == 4


def test_the_sum_is_logged_for_tensorboard(tmp_path: Path) -> None:
    budget = StepBudget()
    _, _, data = toy_run.fit(tmp_path, epochs=2, callbacks=[budget, TensorBoardViews()], logger=False)
    assert data.report.metrics["rollout/env_steps_total"] == budget.total
    length = data.report.metrics["rollout/length"]
    assert data.report.metrics["rollout/env_steps"] == pytest.approx(length * 16)  # 4 groups of 4 episodes


def test_points_come_at_the_start_at_the_marks_and_at_the_end(tmp_path: Path, curriculum: str) -> None:
    budget = train(tmp_path, curriculum, 400, LearningCurve(every_env_steps=100))
    content = read(tmp_path)
    steps = [point["env_steps"] for point in content["points"]]
    assert steps[0] == 0 and content["points"][0]["iteration"] == 0
    assert steps[-1] == content["env_steps"] == budget.total >= 400
    # at most 64 steps an iteration: every multiple of 100 has an iteration of its own, ending less than 64 behind it
    assert [count // 100 for count in steps] == [0, 1, 2, 3, 4]
    assert all(count % 100 < 64 for count in steps)
    assert all(set(point["success"]) == {"two", "three"} for point in content["points"])
    assert content["stage"] == "two"


def test_marks_in_seconds_need_no_steps(tmp_path: Path, curriculum: str) -> None:
    train(tmp_path, curriculum, None, LearningCurve(every_s=1e-9), epochs=3)
    assert [point["iteration"] for point in read(tmp_path)["points"]] == [0, 1, 2, 3]
    train(tmp_path / "rare", curriculum, None, LearningCurve(every_s=1e9), epochs=3)
    assert [point["iteration"] for point in read(tmp_path / "rare")["points"]] == [0]


def test_resumed_equals_uninterrupted(tmp_path: Path, curriculum: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(whole, curriculum, 400, LearningCurve(every_env_steps=100))
    train(cut, curriculum, 400, LearningCurve(every_env_steps=100), epochs=4)
    assert 1 < len(read(cut)["points"]) < 5
    last = str(cut / "checkpoints" / "last.ckpt")
    train(cut, curriculum, 400, LearningCurve(every_env_steps=100), ckpt_path=last)
    assert read(cut) == read(whole)


def test_a_run_that_had_used_up_its_budget_does_nothing_more(tmp_path: Path, curriculum: str) -> None:
    train(tmp_path, curriculum, 100, LearningCurve(every_env_steps=50))
    before = read(tmp_path)
    train(
        tmp_path, curriculum, 100, LearningCurve(every_env_steps=50), ckpt_path=str(tmp_path / "checkpoints/last.ckpt")
    )
    assert read(tmp_path) == before


def test_the_last_checkpoint_is_the_best_where_nothing_ranks_them(tmp_path: Path, curriculum: str) -> None:
    train(tmp_path, curriculum, 300, LearningCurve())
    folder = tmp_path / "checkpoints"
    assert (folder / "best.ckpt").resolve() == (folder / "last.ckpt").resolve() == max(folder.glob("iter*")).resolve()


def test_direct_training_plays_its_stage_only(tmp_path: Path, curriculum: str) -> None:
    callbacks = [DirectTraining(curriculum), StepBudget(), LearningCurve()]
    _, _, data = toy_run.fit(
        tmp_path, 3, callbacks, {"evaluation": EVALUATION}, limit_val_batches=None, num_sanity_val_steps=-1
    )
    # nothing is rehearsed, although the stage asks for it
    assert set(data.report.success) == {"three"} and data.controls.rehearsal == ()
    content = read(tmp_path)
    assert content["stage"] == "three" and set(content["points"][0]["success"]) == {"two", "three"}
    assert DirectTraining(curriculum, "two").stage.name == "two"
