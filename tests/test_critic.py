"""The critic in an update: what each option changes, cuts, normalised advantages, what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from gigpo_lightning.policy.critic import CriticRule
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.iteration import _mean_and_scale
from gigpo_lightning.rollout.store import RolloutStore
from tests.test_module import MANY_UPDATES, ONE_UPDATE, Figures
from tests.toy_run import fit, initial_weights, make_data, make_module, make_trainer, rollouts, sgd, weights
from tests.toy_world import BoxTasks

# -- the update --------------------------------------------------------------------------------------------------------


def ppo(**credit: Any) -> dict[str, Any]:
    return {"credit": CreditRule(estimator=credit.pop("estimator", "ppo"), **credit)}


class StartAt(pl.Callback):
    """Gives all weights of the head this value."""

    def __init__(self, start: float):
        self.start = start

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.nn.init.constant_(pl_module.policy.critic.head.weight, self.start)


def change(
    root: Path,
    data: dict[str, Any] = ONE_UPDATE,
    critic: dict[str, Any] | None = None,
    start: float = 0.0,
    **model: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What one iteration adds to the weights of the model, and the weights of the head after it."""
    options = {"optimizer": sgd, "gradient_clip": None, "critic": CriticRule(**{"lr": 0.05, **(critic or {})}), **model}
    _, module, _ = fit(root, callbacks=[StartAt(start)], data={**ppo(), **data}, model=options)
    head = module.policy.critic
    assert head is not None
    own = torch.nn.utils.parameters_to_vector(head.parameters()).detach()
    return weights(module)[: -len(own)] - initial_weights(), own


@pytest.mark.parametrize("aggregation", ["token", "turn"])
def test_micro_batching_changes_no_gradient(tmp_path: Path, aggregation: str) -> None:
    """The head says something from the start, so that it trains the trunk, too.

    With one box the first action is forced, and its row has nothing chosen.
    """
    rows = {"segments": SegmentRule(turns=1, max_tokens=200), "tasks": BoxTasks(1)}
    data = {**ONE_UPDATE, "entropy_coef": 0.1, **rows}
    cuts = [
        torch.cat(
            change(tmp_path, {**data, "max_tokens_per_batch": n}, start=0.1, aggregation=aggregation, kl_coef=0.1)
        )
        for n in (1, 100, 10**9)
    ]
    assert cuts[0].norm() > 0.1
    for other in cuts[1:]:
        torch.testing.assert_close(other, cuts[0], rtol=1e-4, atol=1e-5)
    store = RolloutStore(next((tmp_path / "rollouts").glob("*.arrow")))
    assert (store.valued & (store.chosen_counts == 0)).any()


def test_the_value_loss_is_the_mean_over_turns_of_half_the_squares(tmp_path: Path) -> None:
    """The head starts at 0: the first step of its bias, by descent with rate 1, is coef · mean of T.

    With one box the first action is forced: in segments of one turn its row has nothing chosen, but a value.
    """
    figures = Figures()
    data = {**ppo(), **ONE_UPDATE, "segments": SegmentRule(turns=1, max_tokens=200), "tasks": BoxTasks(1)}
    model = {"optimizer": sgd, "gradient_clip": None, "critic": CriticRule(lr=1.0, coef=0.25, clip=None)}
    _, module, _ = fit(tmp_path, callbacks=[figures], data=data, model=model)
    rows = [row for row in rollouts(tmp_path)[0] if row["value_target"]]
    targets = np.array([t for row in rows for t in row["value_target"]])
    assert figures.seen[0]["loss/value"] == pytest.approx(0.5 * float((targets**2).mean()), rel=1e-5)
    assert module.policy.critic is not None
    assert float(module.policy.critic.head.bias.detach()) == pytest.approx(0.25 * float(targets.mean()), rel=1e-5)
    total = figures.seen[0]["loss/policy"] + 0.25 * figures.seen[0]["loss/value"]
    assert figures.seen[0]["loss/total"] == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    ("data", "critic", "model"),
    [
        ({}, {"lr": 0.02}, {}),
        ({}, {"coef": 0.05}, {}),
        ({}, {"clip": 1e-3}, {}),
        ({}, {"detach": True}, {}),
        (ppo(gae_lambda=0.2), {}, {}),
        (ppo(gamma=0.5), {}, {}),
        (ppo(norm="none"), {}, {}),
        (ppo(estimator="a2c"), {}, {}),
        ({}, {}, {"ratio": "sequence"}),
        ({}, {}, {"ratio": "none"}),
    ],
    ids=str,
)
def test_an_option_changes_the_update(
    tmp_path: Path, data: dict[str, Any], critic: dict[str, Any], model: dict[str, Any]
) -> None:
    usual = torch.cat(change(tmp_path, MANY_UPDATES))
    assert not torch.allclose(
        usual, torch.cat(change(tmp_path, {**MANY_UPDATES, **data}, critic, **model)), rtol=1e-3, atol=1e-5
    )


def test_steps_of_a2c_change_the_update(tmp_path: Path) -> None:
    """After an iteration that has moved the critic from 0: before, all n above the longest wait are alike."""

    def after(n: int) -> torch.Tensor:
        data = ppo(estimator="a2c", n_steps=n)
        return weights(fit(tmp_path, 2, data=data, model={"critic": CriticRule(lr=0.1), "ratio": "none"})[1])

    assert not after(1).equal(after(5))


def test_a_detached_critic_leaves_the_trunk_alone(tmp_path: Path) -> None:
    """Whatever its weight, and only then."""
    for detach in (True, False):
        trunks = [change(tmp_path, MANY_UPDATES, {"coef": c, "detach": detach})[0] for c in (0.5, 0.1)]
        assert trunks[0].equal(trunks[1]) == detach


def test_the_head_has_a_gradient_norm_of_its_own(tmp_path: Path) -> None:
    figures = Figures()
    fit(tmp_path, callbacks=[figures], data={**ppo(), **ONE_UPDATE}, model={"critic": CriticRule()})
    assert figures.seen[0]["loss/critic_gradient_norm"] > 0
    model, head = change(tmp_path, gradient_clip=1e-3)
    assert float(model.norm()) == pytest.approx(1e-3, rel=1e-2)
    assert float(head.norm()) == pytest.approx(0.05 * 1e-3, rel=1e-2)


def test_advantages_are_normalised_over_the_iteration(tmp_path: Path) -> None:
    """Mean 0 and standard deviation 1 over the turns in which something was chosen."""
    raw, scaled = seen_advantages(tmp_path, "ppo")
    torch.testing.assert_close(scaled, (raw - raw.mean()) / (raw.std() + 1e-6), rtol=1e-4, atol=1e-5)
    assert float(raw.std()) < 0.9


def test_those_of_rloo_are_divided_and_not_shifted(tmp_path: Path) -> None:
    """A group without spread stays without influence."""
    raw, scaled = seen_advantages(tmp_path, "rloo")
    torch.testing.assert_close(scaled, raw / (raw.std() + 1e-6), rtol=1e-4, atol=1e-5)
    assert abs(float(raw.mean())) > 0.01


def seen_advantages(root: Path, estimator: str) -> list[torch.Tensor]:
    """The advantage of every turn with a choice, as the update sees it, with `norm` none and std."""
    figures = []
    for norm in ("none", "std"):
        seen: list[torch.Tensor] = []
        module = make_module(critic=CriticRule() if estimator == "ppo" else None)
        object.__setattr__(module, "loss", Watching(module.loss, seen))
        data = make_data(**ppo(estimator=estimator, norm=norm), **ONE_UPDATE, max_tokens_per_batch=10**9)
        make_trainer(root).fit(module, datamodule=data)
        figures.append(seen[0])
    return figures


class Watching:
    """A loss that notes the advantage of every turn with a chosen token."""

    def __init__(self, loss: Any, seen: list[torch.Tensor]):
        self._loss, self._seen = loss, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def part(self, policy: Any, reference: Any, micro: Any, *args: Any, **options: Any) -> Any:
        _, index = np.unique(micro.turn.numpy(), return_index=True)
        self._seen.append(micro.advantages[torch.from_numpy(index)])
        return self._loss.part(policy, reference, micro, *args, **options)


def test_moments_of_several_processes_are_those_of_all_turns() -> None:
    random = np.random.default_rng(0)
    parts = [random.normal(3, 2, n) for n in (5, 1, 40)]
    moments = [(float(len(x)), float(x.mean()), float(((x - x.mean()) ** 2).sum())) for x in parts]
    mean, scale = _mean_and_scale([moments[0], (0.0, 0.0, 0.0), *moments[1:]])
    every = np.concatenate(parts)
    assert mean == pytest.approx(every.mean())
    assert scale == pytest.approx(1 / (every.std(ddof=1) + 1e-6))
    assert _mean_and_scale([(3.0, 0.1 + 0.2, 1e-34)])[1] == 0  # round-off is not divided by itself


def test_the_critic_learns_and_says_so(tmp_path: Path) -> None:
    figures = Figures()
    data = {**ppo(), "groups": 8, "passes": 40, "minibatches": 1}
    _, _, datamodule = fit(tmp_path, 2, [figures], data, {"critic": CriticRule(lr=0.03, clip=None)})
    first = [seen["loss/value"] for seen in figures.seen[:40]]
    assert first[-1] < 0.7 * first[0]
    metrics = datamodule.report.metrics
    rows = [row for row in rollouts(tmp_path)[1] if row["value_target"]]
    values, targets = (np.array([v for row in rows for v in row[name]]) for name in ("value", "value_target"))
    assert metrics["critic/value_mean"] == pytest.approx(values.mean())
    assert metrics["critic/target_mean"] == pytest.approx(targets.mean())
    assert metrics["critic/explained_variance"] == pytest.approx(1 - (targets - values).var() / targets.var())
    assert metrics["time/values_s"] > 0


def test_without_a_critic_nothing_is_said_of_one(tmp_path: Path) -> None:
    _, _, data = fit(tmp_path)
    assert not [name for name in data.report.metrics if name.startswith("critic/") or name == "time/values_s"]
    assert all(row["value"] is None and row["value_target"] is None for row in rollouts(tmp_path)[0])
