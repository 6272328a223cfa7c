"""The update: what a minibatch does to the weights, whatever it is cut into, and what every option changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.module import GiGPOModule
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.collection import CreditRule
from tests.toy_run import fit, initial_weights, make_data, make_module, make_policy, make_trainer, sgd, weights

# One update per iteration: the change of the weights is the gradient of the loss at the initial policy.
ONE_UPDATE = {"passes": 1, "minibatches": 1}
# Many updates on the same rollouts with large steps: the ratio leaves 1, so that clipping matters.
MANY_UPDATES = {"passes": 6, "minibatches": 1}
NUMBERS = ("clip_low", "clip_high", "dual_clip", "kl_coef", "gradient_clip")


def change(root: Path, data: dict[str, Any] = ONE_UPDATE, **model: Any) -> torch.Tensor:
    """What one iteration adds to the weights."""
    _, module, _ = fit(root, data=data, model={"optimizer": sgd, "gradient_clip": None, **model})
    return weights(module) - initial_weights()


class Figures(pl.Callback):
    """The figures of every update; Lightning shows their means only."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        log = pl_module.log_dict

        def log_and_note(figures: dict[str, torch.Tensor], **options: Any) -> None:
            self.seen.append({name: float(value) for name, value in figures.items()})
            log(figures, **options)

        pl_module.log_dict = log_and_note  # type: ignore[method-assign,assignment]


# -- the gradient ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "constrain"), [("token", True), ("turn", True), ("constant", True), ("token", False)]
)
def test_micro_batching_changes_no_gradient(tmp_path: Path, aggregation: str, constrain: bool) -> None:
    model = {"aggregation": aggregation, "constant_tokens": 50.0 if aggregation == "constant" else None}
    data = {**ONE_UPDATE, "constrain": constrain, "max_action_tokens": 8, "entropy_coef": 0.1}
    # 1: every row is a micro-batch of its own; 100: a few rows; 10**9: all in one.
    cuts = [change(tmp_path, {**data, "max_tokens_per_batch": n}, kl_coef=0.1, **model) for n in (1, 100, 10**9)]
    assert cuts[0].norm() > 0.03
    for other in cuts[1:]:
        torch.testing.assert_close(other, cuts[0], rtol=1e-4, atol=1e-6)


def test_micro_batching_changes_no_figure_of_the_loss(tmp_path: Path) -> None:
    cut, whole = Figures(), Figures()
    for figures, tokens in ((cut, 1), (whole, 10**9)):
        fit(tmp_path, callbacks=[figures], data={**ONE_UPDATE, "max_tokens_per_batch": tokens, "entropy_coef": 0.1})
    assert abs(whole.seen[0]["loss/policy"]) > 1e-3
    assert cut.seen[0] == pytest.approx(whole.seen[0], rel=1e-3, abs=1e-5)
    total = whole.seen[0]["loss/policy"] - 0.1 * whole.seen[0]["loss/entropy"]  # mean over tokens, as the bonus
    assert whole.seen[0]["loss/total"] == pytest.approx(total, rel=1e-4)


def test_aggregations_differ_and_constant_divides_by_its_number(tmp_path: Path) -> None:
    by_token, by_turn = change(tmp_path), change(tmp_path, aggregation="turn")
    assert not torch.allclose(by_token, by_turn, rtol=1e-2)
    hundred = change(tmp_path, aggregation="constant", constant_tokens=100.0)
    double = change(tmp_path, aggregation="constant", constant_tokens=50.0)
    torch.testing.assert_close(double, 2 * hundred, rtol=1e-4, atol=1e-6)


def test_the_first_update_has_ratio_one_and_later_ones_do_not(tmp_path: Path) -> None:
    figures = Figures()
    fit(tmp_path, callbacks=[figures], data={"passes": 2, "minibatches": 1})
    first, second = figures.seen
    assert first["loss/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["loss/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert first["loss/clip_frac"] == 0
    assert second["loss/ratio_max"] > 1.01


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_the_update_sees_the_temperature_that_was_sampled_with(tmp_path: Path, temperature: float) -> None:
    figures = Figures()
    fit(tmp_path, callbacks=[figures], data={**ONE_UPDATE, "temperature": temperature})
    assert figures.seen[0]["loss/ratio_max"] == pytest.approx(1, abs=1e-5)


def test_lambda_one_is_grpo_and_lambda_zero_is_step(tmp_path: Path) -> None:
    def after_two(lam: float, estimator: str) -> torch.Tensor:
        data = {"lam": lam if estimator == "gigpo" else None, "credit": CreditRule(estimator=estimator)}
        return weights(fit(tmp_path, epochs=2, data=data)[1])

    grpo, step = after_two(0.8, "grpo"), after_two(0.8, "step")  # neither reads λ
    assert after_two(1.0, "gigpo").equal(grpo)
    assert after_two(0.0, "gigpo").equal(step)
    between = after_two(0.5, "gigpo")
    assert not between.equal(grpo)
    assert not between.equal(step)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [{"clip_low": 0.02}, {"clip_high": 0.02}, {"dual_clip": 1.01}, {"kl_coef": 0.5}, {"gradient_clip": 0.01}],
    ids=lambda option: next(iter(option)),
)
def test_an_option_of_the_loss_changes_the_update(tmp_path: Path, option: dict[str, float]) -> None:
    usual = change(tmp_path, MANY_UPDATES)
    assert not torch.allclose(usual, change(tmp_path, MANY_UPDATES, **option), rtol=1e-3)


def test_the_entropy_bonus_raises_the_entropy(tmp_path: Path) -> None:
    def entropy(coef: float) -> float:
        figures = Figures()
        data = {"passes": 20, "minibatches": 1, "entropy_coef": coef}
        # A policy that starts with little entropy, so that there is room above.
        policy = ScratchPolicy(16, layers=1, heads=2, kv_heads=1, initializer_range=0.4, init_seed=0)
        fit(tmp_path, callbacks=[figures], data=data, model={"policy": policy})
        return figures.seen[-1]["loss/entropy"]

    assert entropy(1.0) > entropy(0.0) + 0.05


def test_the_kl_starts_at_zero_and_pulls_back(tmp_path: Path) -> None:
    def kl(coef: float) -> list[float]:
        figures = Figures()
        fit(tmp_path, callbacks=[figures], data={"passes": 20, "minibatches": 1}, model={"kl_coef": coef})
        return [seen["loss/kl"] for seen in figures.seen]

    free, held = kl(1e-9), kl(3.0)
    assert free[0] == held[0] == 0  # the reference is a copy: the very same log-probs
    assert 0 < held[-1] < 0.5 * free[-1]


def test_the_reference_is_frozen_and_made_only_where_it_is_used(tmp_path: Path) -> None:
    _, module, _ = fit(tmp_path, epochs=2, model={"kl_coef": 0.1})
    assert module.reference is not None
    frozen = torch.nn.utils.parameters_to_vector(module.reference.parameters())
    assert frozen.equal(initial_weights())
    assert not frozen.requires_grad
    assert fit(tmp_path)[1].reference is None


def test_the_gradient_is_clipped_to_its_norm(tmp_path: Path) -> None:
    whole = change(tmp_path)
    clipped = change(tmp_path, gradient_clip=1e-3)
    assert whole.norm() > 0.05
    assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-3)
    torch.testing.assert_close(clipped / clipped.norm(), whole / whole.norm(), rtol=1e-2, atol=1e-3)
    figures = Figures()
    fit(tmp_path, callbacks=[figures], data=ONE_UPDATE, model={"gradient_clip": 1e-3})
    # What is logged is the norm before clipping.
    assert figures.seen[0]["loss/gradient_norm"] == pytest.approx(float(whole.norm()), rel=1e-3)


def test_optimizer_and_schedule_are_those_given(tmp_path: Path) -> None:
    """A schedule of 1, 0, 0, …: only the first of four updates moves the weights."""

    def once(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: float(update == 0))

    four = {"passes": 4, "minibatches": 1}
    moved = change(tmp_path, four, lr_scheduler=once)
    torch.testing.assert_close(moved, change(tmp_path), rtol=0, atol=0)
    assert not torch.allclose(change(tmp_path, four), moved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": 1.0}, "clip_low=1.0"),
        ({"clip_low": -0.1}, "clip_low=-0.1"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 1.0}, "dual_clip=1.0: must be greater than 1"),
        ({"kl_coef": -0.1}, "kl_coef=-0.1"),
        ({"aggregation": "mean"}, "aggregation='mean': choose one of token, turn, constant"),
        ({"aggregation": "constant"}, "constant_tokens=None with aggregation='constant'"),
        ({"aggregation": "constant", "constant_tokens": 0.0}, "constant_tokens=0.0"),
        ({"constant_tokens": 100.0}, "constant_tokens=100.0 with aggregation='token'"),
        ({"gradient_clip": 0.0}, "gradient_clip=0.0"),
        ({"max_bad_updates": 0}, "max_bad_updates=0"),
        # `.nan` and `.inf` of YAML pass every comparison that asks what is wrong instead of what is right.
        *[({name: math.nan}, f"model.{name}=nan") for name in NUMBERS],
        *[({name: math.inf}, f"model.{name}=inf") for name in NUMBERS],
        ({"aggregation": "constant", "constant_tokens": math.nan}, "constant_tokens=nan"),
        ({"aggregation": "constant", "constant_tokens": math.inf}, "constant_tokens=inf"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GiGPOModule(make_policy(), **options)


# -- non-finite updates ------------------------------------------------------------------------------------------------


def break_updates(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> None:
    """Make the log-probs of update number n (counted from 0) NaN where `bad(n)`."""
    right, count = ScratchPolicy.chosen_logprobs, [0]

    def wrong(self: ScratchPolicy, *args: Any) -> Any:
        logprobs, entropy = right(self, *args)
        count[0] += 1
        return (logprobs * math.nan if bad(count[0] - 1) else logprobs), entropy

    monkeypatch.setattr(ScratchPolicy, "chosen_logprobs", wrong)


def test_a_non_finite_update_is_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"passes": 1, "minibatches": 1, "max_tokens_per_batch": 10**9}
    good = change(tmp_path, one)
    break_updates(monkeypatch, lambda n: n in (1, 2))
    trainer, module, _ = fit(
        tmp_path, data={**one, "passes": 3}, model={"optimizer": sgd, "gradient_clip": None, "max_bad_updates": 3}
    )
    assert trainer.callback_metrics["loss/skipped_updates"] == 2
    torch.testing.assert_close(weights(module) - initial_weights(), good, rtol=0, atol=0)
    assert all(math.isfinite(value) for value in trainer.callback_metrics.values())


def test_good_updates_in_between_start_the_count_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_updates(monkeypatch, lambda n: n % 3 != 0)  # never more than two in a row
    one = {"passes": 9, "minibatches": 1, "max_tokens_per_batch": 10**9}
    trainer, _, _ = fit(tmp_path, data=one, model={"max_bad_updates": 3})
    assert trainer.callback_metrics["loss/skipped_updates"] == 6


def test_several_bad_updates_in_a_row_stop_the_run_and_name_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_updates(monkeypatch, lambda n: n >= 3)  # from the second iteration on
    data = {"passes": 3, "minibatches": 1, "max_tokens_per_batch": 10**9}
    with pytest.raises(RuntimeError, match=r"3 updates in a row .*max_bad_updates=3.*iteration=000001\.ckpt"):
        fit(tmp_path, epochs=9, callbacks=[IterationCheckpoint()], data=data, model={"max_bad_updates": 3})


def test_a_resumed_run_goes_on_counting_bad_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"passes": 1, "minibatches": 1, "max_tokens_per_batch": 10**9}
    break_updates(monkeypatch, lambda n: True)
    fit(tmp_path, epochs=2, callbacks=[IterationCheckpoint()], data=data, model={"max_bad_updates": 3})
    path = str(tmp_path / "checkpoints/last.ckpt")
    with pytest.raises(RuntimeError, match="3 updates in a row"):
        fit(tmp_path, epochs=3, data=data, model={"max_bad_updates": 3}, ckpt_path=path)


def test_an_optimizer_without_numbers_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    for option, value in (("lr", math.inf), ("weight_decay", math.nan)):
        with pytest.raises(ValueError, match=rf"model\.optimizer: {option}={value} is not a finite number"):
            fit(tmp_path, model={"optimizer": lambda p, o=option, v=value: OpenSGD(p, **{"lr": 0.1, o: v})})
    assert not list(tmp_path.iterdir())


class OpenSGD(torch.optim.SGD):
    """Without torch's own checks, as optimisers of other packages are."""

    def __init__(self, parameters: Any, **options: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.defaults |= options


def test_a_step_to_infinity_stops_the_run_before_it_is_written(tmp_path: Path) -> None:
    """The rate is 1 in the first iteration, then infinite; the gradients are always finite."""

    def late(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0 if update < 1 else math.inf)

    with pytest.raises(
        ValueError, match=r"weights that are not finite; lower the learning rate.*iteration=000001\.ckpt"
    ):
        fit(tmp_path, 3, [IterationCheckpoint()], ONE_UPDATE, {"optimizer": sgd, "lr_scheduler": late})
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("iteration*")) == ["iteration=000001.ckpt"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_policy_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, callbacks=[IterationCheckpoint()])
    path = str(tmp_path / "checkpoints/last.ckpt")
    with pytest.raises(
        ValueError, match=r"of another policy: ScratchPolicy with other options \(hidden_size: 16 there, 32 here; "
    ):
        fit(tmp_path, epochs=2, model={"policy": make_policy(hidden_size=32)}, ckpt_path=path)
    with pytest.raises(
        ValueError, match=r"kl_coef=0.1, but the checkpoint holds no reference .* resume with kl_coef 0"
    ):
        fit(tmp_path, epochs=2, model={"kl_coef": 0.1}, ckpt_path=path)
    content = torch.load(path, weights_only=True)
    del content["policy_identity"]
    torch.save(content, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match="not one of gigpo_lightning"):
        fit(tmp_path, epochs=2, ckpt_path=str(tmp_path / "foreign.ckpt"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_checkpoint_whose_weights_are_no_numbers_is_refused(tmp_path: Path, bad: float) -> None:
    fit(tmp_path, callbacks=[IterationCheckpoint()])
    content = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    content["state_dict"]["policy.model.model.norm.weight"][3] = bad
    path = str(tmp_path / "broken.ckpt")
    torch.save(content, path)
    message = r"cannot be used: its weight policy\.model\.model\.norm\.weight is not finite; take an earlier one"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, epochs=2, ckpt_path=path)
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).test(make_module(), datamodule=make_data(), ckpt_path=path, weights_only=True)


def test_an_evaluation_needs_no_reference(tmp_path: Path) -> None:
    """A run with a KL penalty is evaluated without its second policy."""
    _, trained, _ = fit(tmp_path, callbacks=[IterationCheckpoint()], model={"kl_coef": 0.1})
    module = make_module(make_policy(init_seed=5), kl_coef=0.1)
    make_trainer(tmp_path).test(module, datamodule=make_data(), ckpt_path=str(tmp_path / "checkpoints/last.ckpt"))
    assert module.reference is None
    assert weights(module).equal(weights(trained))


def test_a_strategy_that_would_train_wrongly_is_refused() -> None:
    """DeepSpeed's and FSDP's own strategies need libraries or devices that are not here: their names are enough."""
    module = make_module()
    module._trainer = SimpleNamespace(strategy=type("DeepSpeedStrategy", (DDPStrategy,), {})())  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"trainer\.strategy=DeepSpeedStrategy: is not supported, .* choose fsdp2"):
        module.setup("fit")
    module.setup("test")
