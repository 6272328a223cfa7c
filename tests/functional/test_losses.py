"""Losses: a token-by-token oracle, the identities, gradients, and that micro-batching changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gigpo_lightning.functional.losses import TokenWeights, entropy_loss, k3_kl, kl_loss, policy_loss, token_weights

CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3}


def tokens(seed: int, n: int = 12) -> dict[str, Tensor]:
    """Log-probabilities around −1, ratios from about 0.3 to 3, both signs of advantage, some tokens not counted."""
    random = torch.Generator().manual_seed(seed)
    old = -torch.rand(n, generator=random, dtype=torch.float64) - 0.5
    return {
        "logprobs": old + 0.5 * torch.randn(n, generator=random, dtype=torch.float64),
        "old_logprobs": old,
        "advantages": torch.randn(n, generator=random, dtype=torch.float64),
        "mask": torch.rand(n, generator=random) < 0.8,
    }


def oracle_objective(logp: float, old: float, advantage: float, dual_clip: float | None) -> float:
    ratio = math.exp(logp - old)
    value = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    return max(value, dual_clip * advantage) if dual_clip is not None and advantage < 0 else value


@given(st.integers(0, 10_000), st.sampled_from([None, 1.5, 3.0]))
def test_policy_loss_is_the_oracle(seed: int, dual_clip: float | None) -> None:
    data = tokens(seed)
    found = policy_loss(**data, **CLIPS, dual_clip=dual_clip, denominator=7.0)
    rows = zip(*(data[k].tolist() for k in ("logprobs", "old_logprobs", "advantages", "mask")), strict=True)
    wanted = -sum(oracle_objective(p, o, a, dual_clip) for p, o, a, counts in rows if counts) / 7.0
    assert found.loss.item() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "gradient"),
    [
        # loss = −objective; d loss / d logp = −ρA where the plain branch is taken, else 0
        (1.0, 2.0, None, -2.0, -2.0),
        (1.2, 2.0, None, -2.4, -2.4),
        (1.5, 2.0, None, -2.6, 0.0),  # clipped at 1.3
        (0.5, 2.0, None, -1.0, -1.0),  # below the range with A > 0: free to rise
        (0.5, -2.0, None, 1.6, 0.0),  # clipped at 0.8
        (1.5, -2.0, None, 3.0, 3.0),  # above the range with A < 0: free to fall
        (5.0, -2.0, None, 10.0, 10.0),
        (5.0, -2.0, 3.0, 6.0, 0.0),  # dual clip: 3 · 2
        (2.0, -2.0, 3.0, 4.0, 4.0),
        (5.0, 2.0, 3.0, -2.6, 0.0),  # no dual clip for A > 0
    ],
)
def test_every_branch(ratio: float, advantage: float, dual_clip: float | None, loss: float, gradient: float) -> None:
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.bool)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    found = policy_loss(logp, zero, advantages, one, **CLIPS, dual_clip=dual_clip, denominator=1.0)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(loss)
    assert logp.grad.item() == pytest.approx(gradient)
    assert found.metrics["dual_clip_frac"] == float(dual_clip is not None and ratio == 5.0 and advantage < 0)
    assert found.metrics["clip_frac"] == float((ratio, advantage) in [(1.5, 2.0), (0.5, -2.0), (5.0, 2.0)])
    assert found.metrics["ratio_mean"].item() == pytest.approx(ratio)


def test_at_ratio_one_the_gradient_is_reinforce() -> None:
    data = tokens(3)
    data["logprobs"] = data["old_logprobs"].clone().requires_grad_()
    policy_loss(**data, **CLIPS, denominator=5.0).loss.backward()
    assert torch.allclose(data["logprobs"].grad, torch.where(data["mask"], -data["advantages"] / 5.0, 0.0))


def test_metrics() -> None:
    # ratios 2, 0.5 and an uncounted one: mean 1.25, max 2; k3 of old against new: ρ − 1 − log ρ,
    # (1 − 0.693147) and (−0.5 + 0.693147): mean 0.25
    logp = torch.tensor([math.log(2), math.log(0.5), float("nan")])
    mask = torch.tensor([True, True, False])
    found = policy_loss(logp, torch.zeros(3), torch.ones(3), mask, denominator=2.0).metrics
    assert found["ratio_mean"].item() == pytest.approx(1.25)
    assert found["ratio_max"].item() == pytest.approx(2.0)
    assert found["approx_kl"].item() == pytest.approx(0.25)
    assert found["clip_frac"].item() == pytest.approx(0.5)
    assert not any(value.requires_grad for value in found.values())


def test_the_rectangle_and_the_ragged_shape_agree() -> None:
    data = tokens(4)
    flat = policy_loss(**data, denominator=3.0)
    rectangle = policy_loss(**{k: v.reshape(3, 4) for k, v in data.items()}, denominator=3.0)
    assert flat.loss.item() == pytest.approx(rectangle.loss.item(), rel=1e-12)


def test_uncounted_tokens_leak_nothing() -> None:
    logp = torch.tensor([0.0, float("nan"), -torch.inf], requires_grad=True)
    mask = torch.tensor([True, False, False])
    entropy = torch.tensor([1.0, float("nan"), 0.0], requires_grad=True)
    loss = policy_loss(logp, torch.zeros(3), torch.tensor([1.0, torch.inf, 1.0]), mask, denominator=1.0).loss
    loss = loss + kl_loss(logp, torch.zeros(3), mask, denominator=1.0).loss
    loss = loss + entropy_loss(entropy, mask, denominator=1.0).loss
    loss.backward()
    assert loss.item() == -2.0  # −A ρ − H
    assert logp.grad.tolist() == [-1.0, 0.0, 0.0]
    assert entropy.grad.tolist() == [-1.0, 0.0, 0.0]


def test_an_empty_mask_is_no_loss() -> None:
    logp, mask = torch.zeros(2, requires_grad=True), torch.zeros(2, dtype=torch.bool)
    weights = token_weights(mask, torch.zeros(2, dtype=torch.long), "turn")
    found = policy_loss(logp, logp.detach(), logp.detach(), mask, **weights._asdict())
    found.loss.backward()
    assert found.loss == 0
    assert torch.equal(logp.grad, torch.zeros(2))
    assert all(value == 0 for value in found.metrics.values())


def test_an_absurd_ratio_stays_finite() -> None:
    logp = torch.tensor([0.0], requires_grad=True)
    found = policy_loss(logp, torch.tensor([-200.0]), torch.tensor([-1.0]), torch.tensor([True]), denominator=1.0)
    found.loss.backward()
    assert found.loss.isfinite()
    assert logp.grad.isfinite().all()


def test_half_precision_is_computed_in_float32() -> None:
    logp = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert policy_loss(logp, torch.tensor([-1.001]), torch.ones(1), torch.tensor([True]), denominator=1.0).loss != -1.0


# -- aggregation -------------------------------------------------------------------------------------------------------


def test_token_weights() -> None:
    # turn 5 has 3 counted tokens, turn 9 one, turn 7 none
    mask = torch.tensor([True, True, True, False, True, False])
    turns = torch.tensor([5, 5, 5, 5, 9, 7])
    one = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    token, turn = token_weights(mask, turns), token_weights(mask, turns, "turn")
    constant = token_weights(mask, turns, "constant", constant=50)
    assert (token.weights.tolist(), token.denominator) == (one, 4.0)
    assert (constant.weights.tolist(), constant.denominator) == (one, 50.0)
    third = pytest.approx(1 / 3)
    assert (turn.weights.tolist(), turn.denominator) == ([third, third, third, 0.0, 1.0, 0.0], 2.0)


@pytest.mark.parametrize("aggregation", ["token", "turn"])
def test_a_constant_term_has_itself_as_its_mean(aggregation: str) -> None:
    mask, turns = torch.rand(20) < 0.7, torch.arange(20) // 3
    weights = token_weights(mask, turns, aggregation)
    found = entropy_loss(torch.full((20,), 2.5), mask, **weights._asdict())
    assert found.loss.item() == pytest.approx(-2.5, rel=1e-6)


def test_equal_lengths_make_token_and_turn_agree() -> None:
    data, turns = tokens(6), torch.arange(12) // 4
    data["mask"] = torch.ones(12, dtype=torch.bool)
    one, other = (policy_loss(**data, **token_weights(data["mask"], turns, a)._asdict()) for a in ("token", "turn"))
    assert one.loss.item() == pytest.approx(other.loss.item(), rel=1e-6)


def whole_gradient(data: dict[str, Tensor], weights: TokenWeights, pieces: list[slice]) -> Tensor:
    """Gradient of all three losses, summed over the micro-batches."""
    logp = data["logprobs"].clone().requires_grad_()
    for piece in pieces:
        share: dict[str, Any] = {"denominator": weights.denominator, "weights": weights.weights[piece]}
        old, mask = data["old_logprobs"][piece], data["mask"][piece]
        loss = policy_loss(logp[piece], old, data["advantages"][piece], mask, **share).loss
        loss = loss + 0.01 * kl_loss(logp[piece], old, mask, **share).loss
        loss = loss + 0.02 * entropy_loss(-logp[piece], mask, **share).loss
        loss.backward()
    assert logp.grad is not None
    return logp.grad


@given(st.integers(0, 10_000), st.sampled_from(["token", "turn", "constant"]), st.integers(1, 5))
def test_micro_batching_changes_no_gradient(seed: int, aggregation: str, size: int) -> None:
    data, turns = tokens(seed), torch.arange(12) // 5
    weights = token_weights(data["mask"], turns, aggregation, constant=9.0)
    whole = whole_gradient(data, weights, [slice(None)])
    parts = whole_gradient(data, weights, [slice(i, i + size) for i in range(0, 12, size)])
    torch.testing.assert_close(whole, parts)
    assert whole.abs().sum() > 0 or not data["mask"].any()


# -- KL and entropy ----------------------------------------------------------------------------------------------------


def test_k3_is_zero_where_equal_and_positive_elsewhere() -> None:
    # d = log 2: 2 − 0.693147 − 1; d = −log 2: 0.5 + 0.693147 − 1
    mask = torch.tensor([True, True, True, False])
    found = k3_kl(torch.zeros(4), torch.tensor([0.0, math.log(2), -math.log(2), 9.0]), mask)
    assert found.tolist() == pytest.approx([0.0, 0.306853, 0.193147, 0.0], abs=1e-6)


def test_k3_is_unbiased_for_the_kl_divergence() -> None:
    # Σ p (exp d − d − 1) with d = log q − log p is Σ q − Σ p log(q / p) − 1 = KL(p ‖ q), exactly
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    mean = (p * k3_kl(p.log(), q.log(), torch.ones(3, dtype=torch.bool))).sum()
    assert mean.item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-12)


def test_gradients_by_finite_differences() -> None:
    data = tokens(8)
    old, advantages, mask = data["old_logprobs"], data["advantages"], data["mask"]
    logp = data["logprobs"].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantages, mask, denominator=3.0).loss, logp)
    assert torch.autograd.gradcheck(lambda x: kl_loss(x, old, mask, denominator=3.0).loss, logp)
    assert torch.autograd.gradcheck(lambda x: entropy_loss(x, mask, denominator=3.0).loss, logp)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": 1.0}, r"clip_low: 1.0 is outside \[0, 1\)"),
        ({"clip_high": -0.1}, "clip_high: -0.1 is negative"),
        ({"dual_clip": 1.0}, "dual_clip: 1.0 must be greater than 1"),
        ({"denominator": 0.0}, "denominator: 0.0 is not positive"),
        ({"logprobs": torch.zeros(3)}, r"logprobs: shapes \(3,\)"),
        ({"advantages": torch.zeros(3)}, r"advantages: shape \(3,\)"),
        ({"weights": torch.zeros(1)}, r"weights: shape \(1,\)"),
        ({"mask": torch.ones(12)}, "mask: torch.float32; expected torch.bool"),
    ],
)
def test_policy_loss_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss(**{**tokens(1), "denominator": 1.0, **change})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "mean"}, "aggregation: 'mean' is unknown; choose one of token, turn, constant"),
        ({"aggregation": "constant"}, "constant: None is no denominator"),
        ({"aggregation": "constant", "constant": 0.0}, "constant: 0.0 is no denominator"),
        ({"turn_ids": torch.zeros(2)}, r"turn_ids: shape \(2,\)"),
    ],
)
def test_token_weights_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_weights(**{"mask": torch.ones(3, dtype=torch.bool), "turn_ids": torch.zeros(3).long(), **options})
