"""Truncated importance weights: by hand, against an oracle, and unbiased where nothing is truncated."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigpo_lightning.functional.correction import truncated_importance


def test_by_hand() -> None:
    policy, sampler = torch.tensor([-1.0, -1.0, -3.0]), torch.tensor([-1.0, -3.0, -1.0])
    weights, metrics = truncated_importance(policy, sampler, cap=2.0)
    # d = 0, 2, −2: ratios 1, e² = 7.389 (cut to 2), e⁻² = 0.1353
    assert weights.tolist() == pytest.approx([1.0, 2.0, 0.135335], rel=1e-5)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {
            "kl_k1": 0.0,  # −(0 + 2 − 2) / 3
            "kl_k3": (0 + (7.389056 - 2 - 1) + (0.135335 + 2 - 1)) / 3,
            "ratio_mean": (1 + 7.389056 + 0.135335) / 3,
            "ratio_max": 7.389056,
            "truncated_frac": 1 / 3,
        },
        rel=1e-5,
    )


def test_equal_log_probs_weigh_1_and_have_no_distance() -> None:
    logprobs = -torch.rand(5) * 9
    weights, metrics = truncated_importance(logprobs, logprobs.clone(), cap=1.0)
    assert weights.tolist() == [1.0] * 5
    assert [float(metrics[name]) for name in ("kl_k1", "kl_k3", "truncated_frac")] == [0.0, 0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), max_size=20), st.floats(1, 5))
def test_is_the_oracle(pairs: list[tuple[float, float]], cap: float) -> None:
    policy, sampler = (torch.tensor([pair[i] for pair in pairs], dtype=torch.float64) for i in (0, 1))
    weights, metrics = truncated_importance(policy, sampler, cap=cap)
    assert weights.dtype == torch.float32 and len(weights) == len(pairs)
    differences = [min(max(p - s, -20.0), 20.0) for p, s in pairs]
    assert weights.tolist() == pytest.approx([min(math.exp(d), cap) for d in differences], rel=1e-4)
    mean_k1 = -sum(differences) / max(len(pairs), 1)
    assert float(metrics["kl_k1"]) == pytest.approx(mean_k1, rel=1e-4, abs=1e-5)
    assert float(metrics["kl_k3"]) >= -1e-6
    assert float(metrics["ratio_max"]) == pytest.approx(max(map(math.exp, differences), default=0.0), rel=1e-4)


def test_weighted_samples_of_one_distribution_are_those_of_another() -> None:
    """Σ sampler · w · f = Σ policy · f without truncation; with it the sum of large ratios is missing."""
    policy, sampler = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.2, 0.5, 0.3]).log()
    value = torch.tensor([3.0, -1.0, 2.0])
    free, metrics = truncated_importance(policy, sampler, cap=math.inf)
    assert float((sampler.exp() * free * value).sum()) == pytest.approx(0.7 * 3 - 0.2 + 0.2)
    capped, _ = truncated_importance(policy, sampler, cap=2.0)
    assert float((sampler.exp() * capped * value).sum()) == pytest.approx(0.2 * 2 * 3 - 0.2 + 0.2)  # 3.5 is cut to 2
    assert float(metrics["truncated_frac"]) == 0.0


def test_no_gradient_passes_through_the_weights() -> None:
    policy = torch.tensor([-1.0], requires_grad=True)
    assert not truncated_importance(policy, torch.tensor([-2.0])).weights.requires_grad


def test_broken_log_probs_stay_finite() -> None:
    weights, metrics = truncated_importance(torch.tensor([-1.0]), torch.tensor([-torch.inf]), cap=torch.inf)
    assert bool(weights.isfinite().all()) and all(bool(value.isfinite()) for value in metrics.values())


@pytest.mark.parametrize("cap", [0.99, 0.0, -1.0, math.nan])
def test_a_cap_below_1_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match=r"cap: .* is below 1"):
        truncated_importance(torch.zeros(1), torch.zeros(1), cap=cap)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        truncated_importance(torch.zeros(2), torch.zeros(3))
