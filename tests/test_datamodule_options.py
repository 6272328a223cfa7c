"""Every option of the datamodule: what it changes, and what it refuses."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.envs.base import Observation, StepResult
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.minibatches import minibatches_of
from gigpo_lightning.rollout.workers import WorkerPool
from tests.toy_run import fit, make_data, make_module, make_trainer, rollouts, weights
from tests.toy_world import BoxEnv, BoxTasks


def test_rollout_files_are_kept_as_asked_for(tmp_path: Path) -> None:
    fit(tmp_path, epochs=4, data={"keep_rollouts": 2})
    names = ["iteration_000002_rank0.arrow", "iteration_000003_rank0.arrow"]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == names
    fit(tmp_path / "other", data={"rollout_dir": str(tmp_path / "here")})
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["iteration_000000_rank0.arrow", "run.txt"]
    assert not (tmp_path / "other" / "rollouts").exists()


def test_groups_members_turns_and_transcripts(tmp_path: Path) -> None:
    data = {"groups": 3, "members": 5, "max_turns": 2, "transcripts": 4}
    _, _, module = fit(tmp_path, data=data)
    (rows,) = rollouts(tmp_path)
    assert sorted(Counter(row["group"] for row in rows).values()) == [5, 5, 5]
    assert max(len(row["action"]) for row in rows) == 2
    assert len(module.report.transcripts) == 4
    assert fit(tmp_path / "b", data={"transcripts": 0})[2].report.transcripts == []


@pytest.mark.parametrize(
    "option",
    [
        {"seed": 1},
        {"temperature": 0.3},
        {"constrain": False},
        {"lam": 0.1},
        {"segments": SegmentRule(keep_last=0, turns=1)},
    ],
    ids=lambda option: next(iter(option)),
)
def test_an_option_changes_the_rollouts(tmp_path: Path, option: dict[str, Any]) -> None:
    fit(tmp_path / "usual")
    fit(tmp_path / "other", data=option)
    assert rollouts(tmp_path / "usual") != rollouts(tmp_path / "other")


def test_rows_change_the_speed_only(tmp_path: Path) -> None:
    one, other = (fit(tmp_path / str(rows), epochs=2, data={"rows": rows})[1] for rows in (2, 100))
    # A batch of another size rounds differently in the last bits of float32.
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-3, atol=1e-4)


class SillyEnv(BoxEnv):
    """Lists an action that it does not understand, so that some turns are invalid."""

    def admissible_actions(self) -> list[str]:
        return sorted([*super().admissible_actions(), "see nothing"])

    def step(self, action: str) -> StepResult:
        if action == "see nothing":
            return StepResult(Observation("nothing happens ."), 0.0, False, False, {"valid": False})
        return super().step(action)


class SillyTasks(BoxTasks):
    def make_env(self) -> SillyEnv:
        return SillyEnv()


@pytest.mark.parametrize(
    "rule",
    [
        {"estimator": "grpo"},
        {"gamma": 0.5},
        {"norm": "none"},
        {"statistics": "step"},
        {"combine": "additive"},
        {"combine": "additive", "omega": 0.3},
        {"invalid_penalty": 0.5},
        {"penalty_in_returns": True},
    ],
    ids=str,
)
def test_an_option_of_the_credit_changes_the_advantages(tmp_path: Path, rule: dict[str, Any]) -> None:
    def advantages(root: Path, **options: Any) -> list[list[float]]:
        fit(root, data={"tasks": SillyTasks(3), "credit": CreditRule(**options)})
        return [row["advantage"] for row in rollouts(root)[0]]

    base = {"combine": "additive"} if "omega" in rule else {}
    assert advantages(tmp_path / "usual", **base) != advantages(tmp_path / "other", **rule)


def test_max_action_tokens_bounds_a_free_answer(tmp_path: Path) -> None:
    fit(tmp_path, data={"constrain": False, "max_action_tokens": 3})
    for row in rollouts(tmp_path)[0]:
        chosen = Counter(t for t, mask in zip(row["turn_index"], row["response_mask"], strict=True) if mask)
        assert max(chosen.values()) <= 3
    assert max(chosen.values()) == 3


def test_workers_play_the_same_rollouts(tmp_path: Path) -> None:
    class Pools(pl.Callback):
        kinds: list[str] = []  # noqa: RUF012

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.kinds.append(type(trainer.datamodule.player.pool).__name__)

    fit(tmp_path / "here", callbacks=[Pools()])
    fit(tmp_path / "workers", callbacks=[Pools()], data={"env_workers": 1, "env_deadline_s": 30.0})
    assert Pools.kinds == ["InProcessPool", WorkerPool.__name__]
    assert rollouts(tmp_path / "here") == rollouts(tmp_path / "workers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 1}, "data.members=1: a group needs at least 2"),
        ({"groups": 0}, "data.groups=0: must be at least 1"),
        ({"passes": 0}, "data.passes=0"),
        ({"minibatches": 0}, "data.minibatches=0"),
        ({"max_tokens_per_batch": 0}, "data.max_tokens_per_batch=0"),
        ({"lam": 1.1}, r"data.lam=1.1: λ must lie in \[0, 1\]"),
        ({"lam": float("nan")}, "data.lam=nan"),
        ({"temperature": 0.0}, "data.temperature=0.0: must be positive"),
        ({"entropy_coef": -0.1}, "data.entropy_coef=-0.1"),
        ({"max_turns": 0}, "data.max_turns=0"),
        ({"rows": 0}, "data.rows=0"),
        ({"max_action_tokens": 0}, "data.max_action_tokens=0"),
        ({"max_env_errors": -1}, "data.max_env_errors=-1"),
        ({"env_workers": -1}, "data.env_workers=-1"),
        ({"env_deadline_s": 0.0}, "data.env_deadline_s=0.0"),
        ({"env_deadline_s": float("nan")}, "data.env_deadline_s=nan"),
        ({"env_deadline_s": float("inf")}, "data.env_deadline_s=inf"),
        ({"temperature": float("nan")}, "data.temperature=nan"),
        ({"entropy_coef": float("inf")}, "data.entropy_coef=inf"),
        ({"seed": -1}, "data.seed=-1: must be at least 0"),
        ({"lam": 0.5, "credit": CreditRule(estimator="grpo")}, "data.lam=0.5: only .* reads it, not grpo with convex"),
        ({"lam": 0.5, "credit": CreditRule(estimator="step")}, "data.lam=0.5: only .* reads it, not step with convex"),
        ({"lam": 0.5, "credit": CreditRule(combine="additive")}, "data.lam=0.5: .* not gigpo with additive; leave lam"),
        ({"keep_rollouts": 0}, "data.keep_rollouts=0"),
        ({"transcripts": -1}, "data.transcripts=-1"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_data(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "gipgo"}, "data.credit.estimator: 'gipgo' is unknown; choose one of gigpo, grpo, step"),
        ({"gamma": 1.5}, r"data.credit.gamma: 1.5 is outside \[0, 1\]"),
        ({"norm": "mean"}, "data.credit.norm: 'mean' is unknown"),
        ({"statistics": "all"}, "data.credit.statistics: 'all' is unknown"),
        ({"combine": "sum", "estimator": "grpo"}, "data.credit.combine: 'sum' is unknown"),
        ({"omega": -1.0}, "data.credit.omega: -1.0 is not a number ≥ 0"),
        ({"format_penalty": -0.1}, "data.credit.format_penalty: -0.1 is not a number"),
        ({"invalid_penalty": -0.1}, "data.credit.invalid_penalty: -0.1 is not a number"),
    ],
)
def test_a_bad_option_of_the_credit_is_named_before_anything_is_played(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CreditRule(**options)


def test_a_resumed_run_keeps_its_seed_and_an_evaluation_may_have_another(tmp_path: Path) -> None:
    fit(tmp_path, callbacks=[IterationCheckpoint()], data={"seed": 3})
    with pytest.raises(ValueError, match=r"data\.seed=4, but the checkpoint was made with seed 3"):
        fit(tmp_path, epochs=2, callbacks=[IterationCheckpoint()], data={"seed": 4}, ckpt_path="last")
    trainer = make_trainer(tmp_path, callbacks=[IterationCheckpoint()])
    trainer.test(make_module(), datamodule=make_data(seed=4), ckpt_path="last", verbose=False, weights_only=True)
    assert trainer.datamodule.iteration == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("skip", [False, True])
def test_rows_without_any_advantage_are_left_out_if_asked(skip: bool) -> None:
    # By hand: of three one-turn rows the second has advantage 0.
    store = SimpleNamespace(
        chosen_counts=np.array([2, 2, 2]),
        teaches=np.array([True, False, True]),
        token_counts=np.array([4, 4, 4]),
        valued=np.array([False, False, False]),
        micro_batch=tuple,
    )
    batches = minibatches_of(
        store,  # type: ignore[arg-type]
        passes=1, minibatches=1, max_tokens=99, temperature=1.0, seed=0, rank=0, iteration=0, skip_zero_advantage=skip,
    )  # fmt: skip
    rows = sorted(row for batch in batches for micro in batch.micro_batches for row in micro)  # type: ignore[attr-defined]
    assert rows == ([0, 2] if skip else [0, 1, 2])


def test_the_logged_share_is_the_one_that_credit_used() -> None:
    assert CreditRule().share(0.3) == 0.3
    assert CreditRule(estimator="grpo").share(0.3) == 1.0
    assert CreditRule(estimator="step").share(0.3) == 0.0
    # A_E + ω·A_S is (1 + ω) times λ·A_E + (1 − λ)·A_S with λ = 1 / (1 + ω).
    assert CreditRule(combine="additive", omega=3.0).share(0.3) == 0.25
